//! GPipe: all forwards, then all backwards. Any number of micro-batches; the activations of all of them are alive at the
//! turn.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9          3 ranks, 3 micro-batches, by default the last one turns first
//! rank 0 | F0 F1 F2  .  .  .  . B2 B1 B0
//! rank 1 |  . F0 F1 F2  .  . B2 B1 B0  .
//! rank 2 |  .  . F0 F1 F2 B2 B1 B0  .  .
//! ```

use std::str::FromStr;

use super::super::action::{Action, Kind};
use super::super::{Entry, Schedule, checked_ranks};
use super::{List, Maker, Shape};
use crate::error::{Error, Result};

/// Which micro-batches keep only their input in forward, and are recomputed right before their backward.
///
/// A recomputation waits for nobody, so that a rank is through with it when the gradient arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// None.
    #[default]
    Never,
    /// All but the last, whose backward comes first: there is nothing to gain in between.
    ExceptLast,
    /// All.
    Always,
}

impl FromStr for Recompute {
    type Err = Error;

    /// By the names that GPipe's users know.
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "never" => Ok(Self::Never),
            "except_last" => Ok(Self::ExceptLast),
            "always" => Ok(Self::Always),
            _ => Err(Error::UnknownOption {
                what: "recompute",
                given: name.to_owned(),
                known: "never, except_last, always",
            }),
        }
    }
}

impl Recompute {
    /// How many of `m` micro-batches are recomputed, counted from the first.
    pub(in super::super) fn count(self, m: u32) -> u32 {
        match self {
            Self::Never => 0,
            Self::ExceptLast => m.saturating_sub(1),
            Self::Always => m,
        }
    }
}

/// What can be chosen about a GPipe schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpipe {
    /// Whether a backward belongs to the step; without it the schedule is for inference.
    pub backward: bool,
    /// Backward in the order of the forward, which is what `torch.distributed.pipelining` does, rather than in reverse,
    /// which frees first what was stored last.
    pub ascending: bool,
    /// What is recomputed.
    pub recompute: Recompute,
}

impl Default for Gpipe {
    fn default() -> Self {
        Self { backward: true, ascending: false, recompute: Recompute::Never }
    }
}

/// The GPipe schedule; rank `r` holds stage `r`.
///
/// # Errors
/// [`Error::NotPositive`](crate::Error::NotPositive) without ranks or micro-batches,
/// [`Error::TooLarge`](crate::Error::TooLarge) beyond the limits of [`Schedule::new`].
pub fn make_gpipe(ranks: usize, microbatches: usize, options: Gpipe) -> Result<Schedule> {
    checked_ranks(ranks)?;
    crate::limits::cells(("the number of micro-batches", microbatches), ("the number of ranks", ranks))?;
    let actions = (0..ranks).map(|rank| with(microbatches, rank, options)).collect();
    let placement: Vec<_> = (0..ranks).collect();
    Schedule::new("gpipe", &placement, microbatches, options.backward, actions)
}

/// The list of one rank of it alone, in time and memory linear in its length.
///
/// # Errors
/// Those of [`make_gpipe`], and [`Error::OutOfRange`] if there is no such rank.
pub fn make_gpipe_rank(ranks: usize, microbatches: usize, options: Gpipe, rank: usize) -> Result<Vec<Entry>> {
    let shape = Maker::Gpipe.shape(ranks, microbatches, None)?;
    if rank >= ranks {
        return Err(super::no_such(rank, ranks));
    }
    Ok(with(shape.m, rank, options).into_iter().map(Entry::Single).collect())
}

/// The list of one rank, with what is chosen by default.
pub(super) fn list(shape: Shape, rank: usize) -> List {
    List { actions: with(shape.m, rank, Gpipe::default()), overlaps: Vec::new() }
}

fn with(microbatches: usize, rank: usize, options: Gpipe) -> Vec<Action> {
    // Both always fit, being within the limits.
    let m = u32::try_from(microbatches).unwrap_or(u32::MAX);
    let stage = u16::try_from(rank).unwrap_or(u16::MAX);
    let recomputed = if options.backward { options.recompute.count(m) } else { 0 };
    let total = microbatches * (1 + usize::from(options.backward)) + recomputed as usize;
    let mut actions = Vec::with_capacity(total);
    actions.extend((0..m).map(|i| Action::known(Kind::Forward, stage, i)));
    let mut back = |i| {
        if i < recomputed {
            actions.push(Action::known(Kind::Recompute, stage, i));
        }
        actions.push(Action::known(Kind::Backward, stage, i));
    };
    match (options.backward, options.ascending) {
        (true, true) => (0..m).for_each(&mut back),
        (true, false) => (0..m).rev().for_each(&mut back),
        (false, _) => {}
    }
    actions
}
