//! Schedules: per rank, the list of what it does in one step.
//!
//! A schedule is a value. Makers produce it, [`Schedule::verify`] says whether it can be carried out, and whoever carries
//! it out follows each rank's list from first to last, waiting only for the actions of other ranks that one needs.

mod action;
mod costs;
mod csv;
mod draw;
mod entry;
mod held;
mod json;
mod lists;
mod lower;
mod makers;
mod memory;
mod placement;
mod refusal;
mod rendezvous;
mod simulate;
mod verify;
mod walk;

pub use action::{Action, Kind, MAX_STAGES};
pub use costs::{Costs, Links, PerStage};
pub use draw::{TextCell, TextPicture, TextRow};
pub use entry::Entry;
pub use held::Held;
pub use lower::Lowering;
pub use makers::{Gpipe, Maker, Recompute, make_gpipe, make_gpipe_rank};
pub(crate) use memory::is_limit;
pub use placement::Placement;
pub use simulate::{Cause, Idle, Simulation, Span};
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
    /// Per rank, in ascending order, the positions of actions that overlap with the one after them.
    overlaps: Vec<Vec<usize>>,
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
        let overlaps = vec![Vec::new(); ranks];
        Ok(Self { name: name.into(), placement, microbatches, backward, actions, overlaps })
    }

    /// The same, with pairs of actions that are carried out as one: of each pair the position of the first, per rank in
    /// ascending order. A rank beyond the end of `overlaps` has none.
    ///
    /// # Errors
    /// [`Error::BadOverlap`] for a pair that is not a forward and a backward (B or I) one after the other, or that shares an
    /// action with the pair before.
    pub fn with_overlaps(mut self, overlaps: Vec<Vec<usize>>) -> Result<Self> {
        for (rank, positions) in overlaps.iter().enumerate() {
            let actions = self.actions(rank).unwrap_or_default();
            let mut free = 0;
            for &position in positions {
                let pair = actions.get(position).zip(actions.get(position.saturating_add(1)));
                let fits =
                    pair.is_some_and(|(first, second)| entry::may_overlap(first.kind(), second.kind()));
                if !fits || position < free {
                    return Err(Error::BadOverlap { rank, position });
                }
                free = position + 2;
            }
        }
        self.overlaps = overlaps;
        self.overlaps.resize(self.ranks(), Vec::new());
        Ok(self)
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

    /// The rank of each stage.
    pub fn placement(&self) -> impl ExactSizeIterator<Item = usize> {
        self.placement.iter().map(|&rank| usize::from(rank))
    }

    /// Where a rank's overlapping pairs begin, in ascending order; empty if there is no such rank.
    pub fn overlaps(&self, rank: usize) -> &[usize] {
        self.overlaps.get(rank).map_or(&[], Vec::as_slice)
    }

    /// A rank's actions, those that overlap as one entry; empty if there is no such rank.
    pub fn entries(&self, rank: usize) -> impl Iterator<Item = Entry> {
        entry::entries(self.actions(rank).unwrap_or_default(), self.overlaps(rank))
    }

    /// How many pairs of stage and micro-batch there are.
    fn cells(&self) -> usize {
        self.stages() * self.microbatches
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
