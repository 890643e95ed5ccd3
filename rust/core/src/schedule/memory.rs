//! Whether ranks keep within their memory.
//!
//! A rank's list says in which order it takes and frees memory, whatever the time: so this needs no simulation, and names
//! the action with which the limit is exceeded.

use super::action::Kind;
use super::verify::At;
use super::{Costs, Schedule};
use crate::error::{Error, Result};

/// Sums of fractions differ in their last digits from what they should be.
const ROUNDING: f64 = 1e-9;

/// Whether that can be a limit: infinite memory is none, but there is nothing below a sum of all that is freed.
pub(crate) fn is_limit(value: f64) -> bool {
    value > f64::NEG_INFINITY
}

impl Schedule {
    /// Says whether the schedule can be carried out and no rank ever holds more than its limit, in the unit of the costs'
    /// memory: one limit for every rank, or one for each. Memory is counted as by [`Schedule::simulate`].
    ///
    /// # Errors
    /// Those of [`Schedule::verify`] and, for this schedule's stages, of [`Costs::check`]; [`Error::OverMemory`] for the
    /// first action of a rank that takes too much; [`Error::LimitsDiffer`] if there is neither one limit nor one for each
    /// rank; [`Error::BadLimit`] for a limit that is not a number, or infinite below zero.
    pub fn verify_within(&self, limits: &[f64], costs: &Costs) -> Result<()> {
        costs.check(Some(self.stages()))?;
        if limits.len() != 1 && limits.len() != self.ranks() {
            return Err(Error::LimitsDiffer { given: limits.len(), ranks: self.ranks() });
        }
        if let Some(&value) = limits.iter().find(|&&limit| !is_limit(limit)) {
            return Err(Error::BadLimit { value });
        }
        self.verify()?;
        let recomputed = self.recomputed();
        let limits = limits.iter().copied().cycle();
        (0..self.ranks())
            .zip(limits)
            .try_for_each(|(rank, limit)| self.verify_rank(rank, limit, costs, &recomputed))
    }

    /// Which pairs of stage and micro-batch are recomputed; empty if none is.
    pub(super) fn recomputed(&self) -> Vec<bool> {
        let mut recomputed = Vec::new();
        for action in self.actions.iter().flatten().filter(|action| action.kind() == Kind::Recompute) {
            recomputed.resize(self.cells(), false);
            if let Some(entry) = self.cell(*action).and_then(|cell| recomputed.get_mut(cell)) {
                *entry = true;
            }
        }
        recomputed
    }

    fn verify_rank(&self, rank: usize, limit: f64, costs: &Costs, recomputed: &[bool]) -> Result<()> {
        let actions = self.actions(rank).unwrap_or_default();
        let (mut held, mut most) = (0.0f64, limit.abs());
        for (position, &action) in actions.iter().enumerate() {
            let stage = action.stage();
            let is_recomputed = || self.cell(action).and_then(|cell| recomputed.get(cell)) == Some(&true);
            let (input_grad, weight_grad) =
                (costs.input_grad_memory.of(stage), costs.weight_grad_memory.of(stage));
            let effects = match action.kind() {
                Kind::Forward if is_recomputed() => continue,
                Kind::Forward | Kind::Recompute => [costs.forward_memory.of(stage), 0.0],
                Kind::InputGrad => [input_grad, 0.0],
                Kind::WeightGrad => [weight_grad, 0.0],
                Kind::Backward => [input_grad, weight_grad],
                _ => continue,
            };
            for effect in effects {
                held += effect;
                most = most.max(held);
                if held > limit + most * ROUNDING {
                    return Err(Error::OverMemory { at: At { rank, position, action }, held, limit });
                }
            }
        }
        Ok(())
    }
}
