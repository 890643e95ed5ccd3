//! Schedules: per rank, the list of what it does in one step.
//!
//! A schedule is a value. Makers produce it, [`Schedule::verify`] says whether it can be carried out, and whoever carries
//! it out follows each rank's list from first to last, waiting only for the actions of other ranks that one needs.

mod action;
mod draw;
mod json;
mod makers;
mod simulate;
mod verify;
mod walk;

pub use action::{Action, Kind, MAX_STAGES};
pub use makers::{Gpipe, Maker, Recompute, make_gpipe};
pub use simulate::{Costs, Simulation, Span};
pub use verify::At;
pub use walk::Blocked;

use crate::error::{Error, Result};
use crate::limits;

/// What each rank does in one step, in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    name: String,
    /// The rank of each stage.
    placement: Vec<u16>,
    microbatches: usize,
    backward: bool,
    actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// A schedule of explicit actions, one list per rank; `placement` is the rank of each stage, and `backward` says
    /// whether a backward belongs to the step. What the actions say is judged by [`Schedule::verify`] alone, so that a
    /// broken schedule can be held, shown and refused.
    ///
    /// # Errors
    /// [`Error::NotPositive`] without ranks, stages or micro-batches; [`Error::NoSuchRank`] for a stage that is placed
    /// nowhere; [`Error::TooLarge`] beyond [`MAX_STAGES`] stages or ranks, or [`MAX_CELLS`](crate::MAX_CELLS) pairs of
    /// stage and micro-batch.
    pub fn new(
        name: impl Into<String>,
        placement: &[usize],
        microbatches: usize,
        backward: bool,
        actions: Vec<Vec<Action>>,
    ) -> Result<Self> {
        let ranks = checked_ranks(actions.len())?;
        let stages = placement.len();
        if stages > MAX_STAGES {
            let (what, value) = ("the number of stages", stages as u128);
            return Err(Error::TooLarge { what, value, limit: MAX_STAGES });
        }
        limits::cells(("the number of micro-batches", microbatches), ("the number of stages", stages))?;
        let narrow = |(stage, &rank)| match u16::try_from(rank) {
            Ok(narrow) if rank < ranks => Ok(narrow),
            _ => Err(Error::NoSuchRank { stage, rank, ranks }),
        };
        let placement = placement.iter().enumerate().map(narrow).collect::<Result<_>>()?;
        Ok(Self { name: name.into(), placement, microbatches, backward, actions })
    }

    /// The name of the maker, or what the caller chose.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// How many micro-batches a step has.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Whether a backward belongs to the step.
    pub fn backward(&self) -> bool {
        self.backward
    }

    /// What a rank does, in order; `None` if there is no such rank.
    pub fn actions(&self, rank: usize) -> Option<&[Action]> {
        self.actions.get(rank).map(Vec::as_slice)
    }

    /// The rank that holds a stage; `None` if there is no such stage.
    pub fn rank_of(&self, stage: usize) -> Option<usize> {
        self.placement.get(stage).map(|&rank| usize::from(rank))
    }

    /// The place of a pair in a table with a row per stage.
    fn cell(&self, action: Action) -> Option<usize> {
        Some(action.stage() * self.microbatches + action.microbatch()?)
    }

    /// All ranks' actions, each after those that it needs and each rank's in its order.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`].
    pub(crate) fn in_order(&self) -> Result<Vec<Action>> {
        self.verify_lists()?;
        let mut ordered = Vec::with_capacity(self.actions.iter().map(Vec::len).sum());
        walk::walk(self, |_, action| ordered.push(action)).map_err(|cycle| Error::Deadlock { cycle })?;
        Ok(ordered)
    }

    /// Where a rank does an action, if it does. Linear: for messages only.
    pub(crate) fn find(&self, rank: usize, action: Action) -> Option<usize> {
        self.actions(rank)?.iter().position(|&other| other == action)
    }
}

fn checked_ranks(ranks: usize) -> Result<usize> {
    match ranks {
        0 => Err(Error::NotPositive { what: "the number of ranks", value: 0 }),
        1..=MAX_STAGES => Ok(ranks),
        _ => Err(Error::TooLarge { what: "the number of ranks", value: ranks as u128, limit: MAX_STAGES }),
    }
}
