//! Whether a schedule can be carried out, and computes what a step is.
//!
//! 1. Placement: every action is of a stage that its rank holds, and of a micro-batch that exists.
//! 2. Completeness: for each pair of stage and micro-batch there is one forward and, unless the schedule is forward only,
//!    one backward, either whole (B) or split (I and W). A recomputation (R) may happen once.
//! 3. Order: nothing comes before an action of the same rank that it needs: a forward before the backward of its pair, with
//!    a recomputation in between; I before W; the stage before in forward, the stage after in backward.
//! 4. Progress: no ranks wait for one another for ever.
//!
//! The first fault is reported, with its place. Every action costs constant time: tables with a place per pair, no search
//! but for the message.

use std::fmt;

use super::Schedule;
use super::action::{Action, Kind};
use super::walk::walk;
use crate::error::{Error, Result};

/// An action and where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The rank whose list it is in.
    pub rank: usize,
    /// Counted from 0 in that list.
    pub position: usize,
    /// The action.
    pub action: Action,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {}, position {})", self.action, self.rank, self.position)
    }
}

const FORWARD: u8 = 1 << 0;
const BACKWARD: u8 = 1 << 1;
const INPUT_GRAD: u8 = 1 << 2;
const WEIGHT_GRAD: u8 = 1 << 3;
const RECOMPUTE: u8 = 1 << 4;

/// The mark that an action leaves on its pair; `None` if it does not compute.
const fn mark(kind: Kind) -> Option<u8> {
    match kind {
        Kind::Forward => Some(FORWARD),
        Kind::Backward => Some(BACKWARD),
        Kind::InputGrad => Some(INPUT_GRAD),
        Kind::WeightGrad => Some(WEIGHT_GRAD),
        Kind::Recompute => Some(RECOMPUTE),
        _ => None,
    }
}

impl Schedule {
    /// Says whether the schedule can be carried out; see the invariants at the top of this file.
    ///
    /// # Errors
    /// The first fault: [`Error::NoSuchStage`], [`Error::NoSuchMicrobatch`], [`Error::Misplaced`], [`Error::Repeated`],
    /// [`Error::WholeAndSplit`], [`Error::UnexpectedBackward`], [`Error::NotComputation`], [`Error::OutOfOrder`],
    /// [`Error::Missing`] or [`Error::Deadlock`].
    pub fn verify(&self) -> Result<()> {
        self.verify_lists()?;
        walk(self, |_, _| {}).map_err(|cycle| Error::Deadlock { cycle })
    }

    /// Invariants 1 to 3. With them, [`walk`] can only fail for a deadlock.
    pub(super) fn verify_lists(&self) -> Result<()> {
        let mut marks = vec![0u8; self.stages() * self.microbatches];
        for (rank, actions) in self.actions.iter().enumerate() {
            for (position, &action) in actions.iter().enumerate() {
                self.verify_action(At { rank, position, action }, &mut marks)?;
            }
        }
        self.verify_complete(&marks)
    }

    fn verify_action(&self, at: At, marks: &mut [u8]) -> Result<()> {
        let action = at.action;
        let Some(mark) = mark(action.kind()) else { return Err(Error::NotComputation { at }) };
        let Some(home) = self.rank_of(action.stage()) else {
            return Err(Error::NoSuchStage { at, stages: self.stages() });
        };
        if home != at.rank {
            return Err(Error::Misplaced { at, home });
        }
        if action.microbatch().is_none_or(|microbatch| microbatch >= self.microbatches) {
            return Err(Error::NoSuchMicrobatch { at, microbatches: self.microbatches });
        }
        if !self.backward && action.kind() != Kind::Forward {
            return Err(Error::UnexpectedBackward { at });
        }
        self.verify_order(at, mark, marks)?;
        if let Some(pair) = self.cell(action).and_then(|cell| marks.get_mut(cell)) {
            *pair |= mark;
        }
        Ok(())
    }

    /// What must and what must not have been done before an action. `mark` is the action's own.
    fn verify_order(&self, at: At, mark: u8, marks: &[u8]) -> Result<()> {
        let action = at.action;
        let stage = action.narrow_stage();
        let marks_of =
            |action: Action| self.cell(action).and_then(|cell| marks.get(cell)).copied().unwrap_or(0);
        let done = marks_of(action);
        let earlier = |action: Action| self.find(at.rank, action).unwrap_or_default();
        if done & mark != 0 {
            return Err(Error::Repeated { at, first: earlier(action) });
        }
        let contradictions: &[(u8, Kind)] = match action.kind() {
            Kind::Backward => &[(INPUT_GRAD, Kind::InputGrad), (WEIGHT_GRAD, Kind::WeightGrad)],
            Kind::InputGrad | Kind::WeightGrad => &[(BACKWARD, Kind::Backward)],
            _ => &[],
        };
        for &(bit, kind) in contradictions {
            if done & bit != 0 {
                let other = action.with(kind, stage);
                return Err(Error::WholeAndSplit { at, other, first: earlier(other) });
            }
        }
        if action.kind() == Kind::Recompute && done & (BACKWARD | INPUT_GRAD) != 0 {
            let backward = if done & BACKWARD != 0 { Kind::Backward } else { Kind::InputGrad };
            let other = action.with(backward, stage);
            let position = earlier(other);
            return Err(Error::OutOfOrder {
                at: At { rank: at.rank, position, action: other },
                needs: action,
                later: at.position,
            });
        }
        let (own, neighbour) = match action.kind() {
            Kind::Forward => (None, stage.checked_sub(1)),
            Kind::Backward | Kind::InputGrad => (Some((FORWARD, Kind::Forward)), stage.checked_add(1)),
            Kind::WeightGrad => (Some((INPUT_GRAD, Kind::InputGrad)), None),
            _ => (Some((FORWARD, Kind::Forward)), None),
        };
        if let Some((bit, kind)) = own
            && done & bit == 0
        {
            return Err(self.not_yet(at, &[action.with(kind, stage)]));
        }
        // Of the neighbouring stage only if this rank holds it too; other ranks are the business of `walk`.
        let Some(stage) = neighbour.filter(|&stage| self.rank_of(usize::from(stage)) == Some(at.rank)) else {
            return Ok(());
        };
        let (bits, kinds): (u8, &[Kind]) = if action.kind() == Kind::Forward {
            (FORWARD, &[Kind::Forward])
        } else {
            (BACKWARD | INPUT_GRAD, &[Kind::Backward, Kind::InputGrad])
        };
        if marks_of(action.with(action.kind(), stage)) & bits == 0 {
            let wanted: Vec<_> = kinds.iter().map(|&kind| action.with(kind, stage)).collect();
            return Err(self.not_yet(at, &wanted));
        }
        Ok(())
    }

    /// An action comes before any of the wanted ones, of which one is needed: it stands later, or is missing.
    fn not_yet(&self, at: At, wanted: &[Action]) -> Error {
        let later = wanted.iter().find_map(|&needs| Some((needs, self.find(at.rank, needs)?)));
        match (later, wanted) {
            (Some((needs, later)), _) => Error::OutOfOrder { at, needs, later },
            (None, [action, ..]) => Error::Missing { action: *action, rank: at.rank },
            (None, []) => Error::Missing { action: at.action, rank: at.rank },
        }
    }

    fn verify_complete(&self, marks: &[u8]) -> Result<()> {
        let missing = |done: u8| match done {
            _ if done & FORWARD == 0 => Some(Kind::Forward),
            _ if !self.backward || done & BACKWARD != 0 => None,
            _ if done & INPUT_GRAD == 0 => Some(Kind::Backward),
            _ if done & WEIGHT_GRAD == 0 => Some(Kind::WeightGrad),
            _ => None,
        };
        for (stage, (rank, row)) in self.placement.iter().zip(marks.chunks(self.microbatches)).enumerate() {
            let first = row.iter().enumerate().find_map(|(i, &done)| Some((i, missing(done)?)));
            if let Some((microbatch, kind)) = first {
                let action = Action::new(kind, stage, Some(microbatch))?;
                return Err(Error::Missing { action, rank: usize::from(*rank) });
            }
        }
        Ok(())
    }
}
