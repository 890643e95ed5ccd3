//! What a rank holds for later, after each of its actions: the plan's memory, counted in micro-batches.
//!
//! 1. A forward that is recomputed later leaves its input, any other its activations, until its backward.
//! 2. A recomputation turns an input into activations.
//! 3. A whole backward, or the weights' gradient behind an input's gradient, frees the activations.

use std::collections::HashSet;

use super::Schedule;
use super::action::{Action, Kind};
use crate::error::Result;

/// How many pairs of stage and micro-batch a rank holds something of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Those of which it keeps the input alone, to compute the forward again.
    pub inputs: usize,
    /// Those of which it keeps all that the backward needs.
    pub activations: usize,
}

impl Schedule {
    /// What `rank` holds after each of its actions, in order; `None` if there is no such rank. Without a backward it holds
    /// nothing.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`].
    pub fn held(&self, rank: usize) -> Result<Option<Vec<Held>>> {
        self.verify()?;
        let Some(actions) = self.actions(rank) else { return Ok(None) };
        let recomputed: HashSet<_> = actions
            .iter()
            .filter(|action| action.kind() == Kind::Recompute)
            .filter_map(|action| self.cell(*action))
            .collect();
        let mut now = Held::default();
        let after = |action: &Action| {
            let is_recomputed = self.cell(*action).is_some_and(|cell| recomputed.contains(&cell));
            match action.kind() {
                Kind::Forward if !self.backward => {}
                Kind::Forward if is_recomputed => now.inputs += 1,
                Kind::Forward => now.activations += 1,
                Kind::Recompute => {
                    now.inputs = now.inputs.saturating_sub(1);
                    now.activations += 1;
                }
                Kind::Backward | Kind::WeightGrad => now.activations = now.activations.saturating_sub(1),
                _ => {}
            }
            now
        };
        Ok(Some(actions.iter().map(after).collect()))
    }
}
