//! GPipe: all forwards, then all backwards. Any number of micro-batches; the activations of all of them are alive at the
//! turn.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9          3 ranks, 3 micro-batches, by default the last one turns first
//! rank 0 | F0 F1 F2  .  .  .  . B2 B1 B0
//! rank 1 |  . F0 F1 F2  .  . B2 B1 B0  .
//! rank 2 |  .  . F0 F1 F2 B2 B1 B0  .  .
//! ```

use super::action::{Action, Kind};
use super::{MAX_STAGES, Schedule};
use crate::error::{Error, Result};

/// What can be chosen about a GPipe schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpipe {
    /// Whether a backward belongs to the step; without it the schedule is for inference.
    pub backward: bool,
    /// Backward in the order of the forward, which is what `torch.distributed.pipelining` does, rather than in reverse,
    /// which frees first what was stored last.
    pub ascending: bool,
}

impl Default for Gpipe {
    fn default() -> Self {
        Self { backward: true, ascending: false }
    }
}

/// The GPipe schedule; rank `r` holds stage `r`.
///
/// # Errors
/// [`Error::NotPositive`] without ranks or micro-batches, [`Error::TooLarge`] beyond the limits of [`Schedule::new`].
pub fn make_gpipe(ranks: usize, microbatches: usize, options: Gpipe) -> Result<Schedule> {
    super::checked_ranks(ranks)?;
    crate::limits::cells(("the number of micro-batches", microbatches), ("the number of ranks", ranks))?;
    let m = u32::try_from(microbatches).map_err(|_| Error::TooLarge {
        what: "the number of micro-batches",
        value: microbatches as u64,
        limit: u64::from(u32::MAX),
    })?;
    let rank_actions = |stage: u16| {
        let mut actions = Vec::with_capacity(microbatches * (1 + usize::from(options.backward)));
        actions.extend((0..m).map(|i| Action::known(Kind::Forward, stage, i)));
        if options.backward && options.ascending {
            actions.extend((0..m).map(|i| Action::known(Kind::Backward, stage, i)));
        } else if options.backward {
            actions.extend((0..m).rev().map(|i| Action::known(Kind::Backward, stage, i)));
        }
        actions
    };
    debug_assert!(ranks <= MAX_STAGES);
    let actions = (0..=u16::MAX).take(ranks).map(rank_actions).collect();
    let placement: Vec<_> = (0..ranks).collect();
    Schedule::new("gpipe", &placement, microbatches, options.backward, actions)
}
