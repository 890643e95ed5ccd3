//! What each rank's list must be by itself: the invariants of `verify.rs` but for progress.

use super::Schedule;
use super::action::{Action, Kind};
use super::verify::At;
use crate::error::{Error, Result};

/// A set of kinds.
#[derive(Clone, Copy, Default)]
struct Kinds(u32);

impl Kinds {
    const fn of(kinds: &[Kind]) -> Self {
        let (mut bits, mut rest) = (0, kinds);
        while let [kind, others @ ..] = rest {
            bits |= 1 << *kind as u32;
            rest = others;
        }
        Self(bits)
    }

    const fn has(self, kind: Kind) -> bool {
        self.0 & (1 << kind as u32) != 0
    }

    const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What is in this set, and not in the other; the first in the order of the kinds.
    fn first_beyond(self, other: Self) -> Option<Kind> {
        let beyond = Self(self.0 & !other.0);
        if beyond.0 == 0 {
            return None;
        }
        Kind::ALL.iter().copied().find(|&kind| beyond.has(kind))
    }
}

const TRANSFERS: Kinds = Kinds::of(&[
    Kind::SendForward,
    Kind::RecvForward,
    Kind::SendBackward,
    Kind::RecvBackward,
    Kind::WaitSendForward,
    Kind::WaitSendBackward,
]);
const COPIES: Kinds =
    Kinds::of(&[Kind::CopyForward, Kind::CopyBackward, Kind::WaitCopyForward, Kind::WaitCopyBackward]);
const SEND_WAITS: Kinds = Kinds::of(&[Kind::WaitSendForward, Kind::WaitSendBackward]);
const FORWARDS: Kinds = Kinds::of(&[
    Kind::Forward,
    Kind::SendForward,
    Kind::RecvForward,
    Kind::WaitSendForward,
    Kind::CopyForward,
    Kind::WaitCopyForward,
]);

/// Where a neighbouring stage is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Neighbour {
    Nowhere,
    SameRank,
    OtherRank,
}

/// What is known of a stage.
#[derive(Clone, Copy)]
struct Stage {
    before: Neighbour,
    after: Neighbour,
    /// How many micro-batches have their weight gradients.
    weight_grads: usize,
    /// What of the whole step has been done.
    done: Kinds,
    /// Whether the weights are gathered at the start and, where the stage is never unsharded, all the time.
    sharded: bool,
    gathered: bool,
}

/// The check of all lists, as far as it has got.
pub(super) struct Lists<'a> {
    schedule: &'a Schedule,
    /// All kinds that occur.
    used: Kinds,
    /// What has been done for each pair of stage and micro-batch: a bit per kind that concerns one.
    marks: Vec<u16>,
    stages: Vec<Stage>,
}

impl<'a> Lists<'a> {
    /// The lists of a schedule, after all checks.
    pub(super) fn verified(schedule: &'a Schedule) -> Result<Self> {
        let mut lists = Self::new(schedule);
        for (rank, actions) in schedule.actions.iter().enumerate() {
            let mut overlaps = schedule.overlaps(rank).iter().copied().peekable();
            for (position, &action) in actions.iter().enumerate() {
                let at = At { rank, position, action };
                lists.verify_action(at)?;
                if overlaps.next_if(|&pair| pair + 1 == position).is_some() {
                    verify_overlap(at, actions)?;
                }
            }
        }
        lists.verify_complete()?;
        Ok(lists)
    }

    /// Whether the schedule says when each result is sent and received.
    pub(super) const fn transfers(&self) -> bool {
        self.used.meets(TRANSFERS)
    }

    /// Whether it says when each result is copied.
    pub(super) const fn copies(&self) -> bool {
        self.used.meets(COPIES)
    }

    fn new(schedule: &'a Schedule) -> Self {
        let all = || schedule.actions.iter().flatten();
        let used = all().fold(Kinds::default(), |used, action| used.with(Kinds(1 << action.kind() as u32)));
        let neighbour = |rank: u16, other: Option<&u16>| match other {
            None => Neighbour::Nowhere,
            Some(&other) if other == rank => Neighbour::SameRank,
            Some(_) => Neighbour::OtherRank,
        };
        let stage = |(stage, &rank): (usize, &u16)| Stage {
            before: neighbour(rank, stage.checked_sub(1).and_then(|before| schedule.placement.get(before))),
            after: neighbour(rank, schedule.placement.get(stage + 1)),
            weight_grads: 0,
            done: Kinds::default(),
            sharded: false,
            gathered: true,
        };
        let mut stages: Vec<_> = schedule.placement.iter().enumerate().map(stage).collect();
        if used.meets(Kinds::of(&[Kind::Unshard, Kind::Reshard])) {
            for action in all().filter(|action| matches!(action.kind(), Kind::Unshard | Kind::Reshard)) {
                if let Some(stage) = stages.get_mut(action.stage()) {
                    (stage.sharded, stage.gathered) = (true, false);
                }
            }
        }
        Self { schedule, used, marks: vec![0; schedule.stages() * schedule.microbatches], stages }
    }

    fn verify_action(&mut self, at: At) -> Result<()> {
        let (schedule, action) = (self.schedule, at.action);
        let Some(home) = schedule.rank_of(action.stage()) else {
            return Err(Error::NoSuchStage { at, stages: schedule.stages() });
        };
        if home != at.rank {
            return Err(Error::Misplaced { at, home });
        }
        if action.microbatch().is_some_and(|microbatch| microbatch >= schedule.microbatches) {
            return Err(Error::NoSuchMicrobatch { at, microbatches: schedule.microbatches });
        }
        if !schedule.backward && action.kind().of_backward() {
            return Err(Error::UnexpectedBackward { at });
        }
        if self.transfers() && COPIES.has(action.kind()) {
            return Err(Error::CopiedAndSent { at });
        }
        if action.microbatch().is_none() {
            return self.verify_whole_step(at);
        }
        self.verify_pair(at)?;
        if let Some(marks) = schedule.cell(action).and_then(|cell| self.marks.get_mut(cell)) {
            *marks |= bit(action.kind());
        }
        if matches!(action.kind(), Kind::Backward | Kind::WeightGrad)
            && let Some(stage) = self.stages.get_mut(action.stage())
        {
            stage.weight_grads += 1;
        }
        Ok(())
    }

    /// What has been done for the pair of an action.
    fn done(&self, action: Action) -> Kinds {
        let marks = self.schedule.cell(action).and_then(|cell| self.marks.get(cell));
        Kinds(marks.copied().unwrap_or_default().into())
    }

    /// What must and what must not have been done before an action of one micro-batch.
    fn verify_pair(&self, at: At) -> Result<()> {
        let action = at.action;
        let (kind, done) = (action.kind(), self.done(action));
        if done.has(kind) {
            return Err(Error::Repeated { at, first: self.earlier(at.rank, action) });
        }
        let Some(stage) = self.stages.get(action.stage()) else { return Ok(()) };
        let contradictions: &[Kind] = match kind {
            Kind::Backward => &[Kind::InputGrad, Kind::WeightGrad],
            Kind::InputGrad | Kind::WeightGrad => &[Kind::Backward],
            _ => &[],
        };
        if let Some(&other) = contradictions.iter().find(|&&other| done.has(other)) {
            let other = same_pair(action, other);
            return Err(Error::WholeAndSplit { at, other, first: self.earlier(at.rank, other) });
        }
        if kind.computes() && !stage.gathered {
            return Err(Error::Sharded { at });
        }
        match kind {
            Kind::Forward => self.verify_input(at, stage.before, [Kind::RecvForward, Kind::WaitCopyForward]),
            Kind::Backward | Kind::InputGrad => {
                self.needs(at, &[Kind::Forward])?;
                self.verify_input(at, stage.after, [Kind::RecvBackward, Kind::WaitCopyBackward])
            }
            Kind::WeightGrad => self.needs(at, &[Kind::InputGrad]),
            Kind::Recompute => {
                let backward = [Kind::Backward, Kind::InputGrad].into_iter().find(|&kind| done.has(kind));
                if let Some(backward) = backward {
                    return Err(self.too_early(at.rank, same_pair(action, backward), at));
                }
                self.needs(at, &[Kind::Forward])
            }
            Kind::SendForward => {
                verify_peer(at, stage.after)?;
                self.needs(at, &[Kind::Forward])
            }
            Kind::SendBackward => {
                verify_peer(at, stage.before)?;
                self.needs(at, &[Kind::Backward, Kind::InputGrad])
            }
            Kind::RecvForward | Kind::CopyForward => verify_peer(at, stage.before),
            Kind::RecvBackward | Kind::CopyBackward => verify_peer(at, stage.after),
            Kind::WaitCopyForward => {
                verify_peer(at, stage.before)?;
                self.needs(at, &[Kind::CopyForward])
            }
            Kind::WaitCopyBackward => {
                verify_peer(at, stage.after)?;
                self.needs(at, &[Kind::CopyBackward])
            }
            Kind::WaitSendForward => {
                verify_peer(at, stage.after)?;
                self.needs(at, &[Kind::SendForward])
            }
            Kind::WaitSendBackward => {
                verify_peer(at, stage.before)?;
                self.needs(at, &[Kind::SendBackward])
            }
            Kind::Unshard | Kind::Reshard | Kind::ReduceGrad | Kind::WaitReduceGrad => Ok(()),
        }
    }

    /// What an action takes from a neighbouring stage: it has been computed on this rank; or received, or its
    /// copy waited for, if anything is.
    fn verify_input(&self, at: At, neighbour: Neighbour, [receive, wait]: [Kind; 2]) -> Result<()> {
        match neighbour {
            Neighbour::OtherRank if self.transfers() => self.needs(at, &[receive]),
            Neighbour::OtherRank if self.copies() => self.needs(at, &[wait]),
            // What other ranks have computed is not for a single list to say.
            Neighbour::Nowhere | Neighbour::OtherRank => Ok(()),
            Neighbour::SameRank => {
                let stage = at.action.narrow_stage();
                if at.action.kind() == Kind::Forward {
                    self.needs_any(at, &[at.action.with(Kind::Forward, stage - 1)])
                } else {
                    let there = |kind| at.action.with(kind, stage + 1);
                    self.needs_any(at, &[there(Kind::Backward), there(Kind::InputGrad)])
                }
            }
        }
    }

    /// One of these kinds has been done for the same pair.
    fn needs(&self, at: At, kinds: &[Kind]) -> Result<()> {
        if kinds.iter().any(|&kind| self.done(at.action).has(kind)) {
            return Ok(());
        }
        let wanted: Vec<_> = kinds.iter().map(|&kind| same_pair(at.action, kind)).collect();
        Err(self.not_yet(at, &wanted))
    }

    /// One of these has been done.
    fn needs_any(&self, at: At, wanted: &[Action]) -> Result<()> {
        if wanted.iter().any(|&action| self.done(action).has(action.kind())) {
            return Ok(());
        }
        Err(self.not_yet(at, wanted))
    }

    /// What must and what must not have been done before an action of the whole step.
    fn verify_whole_step(&mut self, at: At) -> Result<()> {
        let (schedule, kind) = (self.schedule, at.action.kind());
        let Some(stage) = self.stages.get(at.action.stage()).copied() else { return Ok(()) };
        match kind {
            Kind::Unshard if stage.gathered => return Err(Error::ShardedTwice { at }),
            Kind::Reshard if !stage.gathered => return Err(Error::ShardedTwice { at }),
            Kind::ReduceGrad | Kind::WaitReduceGrad if stage.done.has(kind) => {
                return Err(Error::Repeated { at, first: self.earlier(at.rank, at.action) });
            }
            Kind::ReduceGrad if stage.weight_grads < schedule.microbatches => {
                return Err(self.reduced_too_early(at));
            }
            Kind::WaitReduceGrad if !stage.done.has(Kind::ReduceGrad) => {
                let reduction = Action::new(Kind::ReduceGrad, at.action.stage(), None)?;
                return Err(self.not_yet(at, &[reduction]));
            }
            _ => {}
        }
        if let Some(stage) = self.stages.get_mut(at.action.stage()) {
            stage.done = stage.done.with(Kinds(1 << kind as u32));
            stage.gathered = match kind {
                Kind::Unshard => true,
                Kind::Reshard => false,
                _ => stage.gathered,
            };
        }
        Ok(())
    }

    /// A reduction comes before weight gradients of its stage, or some of them are nowhere.
    fn reduced_too_early(&self, at: At) -> Error {
        let stage = at.action.stage();
        let adds = |action: &Action| {
            action.stage() == stage && matches!(action.kind(), Kind::Backward | Kind::WeightGrad)
        };
        let mut later =
            self.schedule.actions(at.rank).unwrap_or_default().iter().enumerate().skip(at.position);
        match later.find(|(_, action)| adds(action)) {
            Some((later, &needs)) => Error::OutOfOrder { at, needs, later },
            None => self.missing(stage).unwrap_or(Error::Missing { action: at.action, rank: at.rank }),
        }
    }

    /// Where an action of the same rank stands that is known to be there.
    fn earlier(&self, rank: usize, action: Action) -> usize {
        self.schedule.find(rank, action).unwrap_or_default()
    }

    /// An action that came before another one that should have come first.
    fn too_early(&self, rank: usize, action: Action, needs: At) -> Error {
        let at = At { rank, position: self.earlier(rank, action), action };
        Error::OutOfOrder { at, needs: needs.action, later: needs.position }
    }

    /// An action comes before any of the wanted ones, of which one is needed: it stands later, or is missing.
    fn not_yet(&self, at: At, wanted: &[Action]) -> Error {
        let later = wanted.iter().find_map(|&needs| Some((needs, self.schedule.find(at.rank, needs)?)));
        match (later, wanted) {
            (Some((needs, later)), _) => Error::OutOfOrder { at, needs, later },
            (None, [action, ..]) => Error::Missing { action: *action, rank: at.rank },
            (None, []) => Error::Missing { action: at.action, rank: at.rank },
        }
    }

    fn verify_complete(&self) -> Result<()> {
        for (index, stage) in self.stages.iter().enumerate() {
            if let Some(missing) = self.missing(index) {
                return Err(missing);
            }
            let wanted = Kinds(self.used.0 & Kinds::of(&[Kind::ReduceGrad, Kind::WaitReduceGrad]).0);
            let mut lacking = wanted.first_beyond(stage.done);
            if stage.sharded && stage.gathered {
                lacking = lacking.or(Some(Kind::Reshard));
            }
            if let Some(kind) = lacking {
                let rank = self.schedule.rank_of(index).unwrap_or_default();
                return Err(Error::Missing { action: Action::new(kind, index, None)?, rank });
            }
        }
        Ok(())
    }

    /// What every micro-batch of a stage needs, but for its backward, which has two forms.
    fn always(&self, stage: Stage) -> Kinds {
        let mut kinds = Kinds::of(&[Kind::Forward]);
        if self.copies() {
            if stage.before == Neighbour::OtherRank {
                kinds = kinds.with(Kinds::of(&[Kind::CopyForward, Kind::WaitCopyForward]));
            }
            if stage.after == Neighbour::OtherRank && self.schedule.backward {
                kinds = kinds.with(Kinds::of(&[Kind::CopyBackward, Kind::WaitCopyBackward]));
            }
            return kinds;
        }
        if !self.transfers() {
            return kinds;
        }
        let ends = [
            (stage.before, &[Kind::RecvForward], &[Kind::SendBackward, Kind::WaitSendBackward]),
            (stage.after, &[Kind::RecvBackward], &[Kind::SendForward, Kind::WaitSendForward]),
        ];
        for (neighbour, receives, sends) in ends {
            if neighbour == Neighbour::OtherRank {
                let sends = if self.used.meets(SEND_WAITS) { sends.as_slice() } else { &sends[..1] };
                kinds = kinds.with(Kinds::of(receives)).with(Kinds::of(sends));
            }
        }
        if self.schedule.backward { kinds } else { Kinds(kinds.0 & FORWARDS.0) }
    }

    /// The first action of a stage that is nowhere, micro-batch by micro-batch.
    fn missing(&self, index: usize) -> Option<Error> {
        let (schedule, stage) = (self.schedule, *self.stages.get(index)?);
        let always = self.always(stage);
        let lacks = |done: Kinds| {
            let backward = if !schedule.backward || done.has(Kind::Backward) {
                None
            } else if done.has(Kind::InputGrad) {
                (!done.has(Kind::WeightGrad)).then_some(Kind::WeightGrad)
            } else {
                Some(Kind::Backward)
            };
            // A backward comes right after the forward in the order of the kinds.
            match always.first_beyond(done) {
                Some(Kind::Forward) => Some(Kind::Forward),
                other => backward.or(other),
            }
        };
        let m = schedule.microbatches;
        let row = self.marks.get(index * m..(index + 1) * m)?;
        let (i, kind) =
            row.iter().enumerate().find_map(|(i, &done)| Some((i, lacks(Kinds(done.into()))?)))?;
        let action = Action::new(kind, index, Some(i)).ok()?;
        Some(Error::Missing { action, rank: schedule.rank_of(index)? })
    }
}

/// Of two actions that overlap the second does not need the first, the only one that it could need and not find before.
fn verify_overlap(second: At, actions: &[Action]) -> Result<()> {
    let first = second.position.checked_sub(1).and_then(|first| actions.get(first));
    match first {
        Some(&needs)
            if (needs.stage(), needs.microbatch()) == (second.action.stage(), second.action.microbatch()) =>
        {
            Err(Error::OverlapNeeds { at: second, needs })
        }
        _ => Ok(()),
    }
}

/// Refuses a transfer that goes nowhere.
const fn verify_peer(at: At, neighbour: Neighbour) -> Result<()> {
    match neighbour {
        Neighbour::OtherRank => Ok(()),
        Neighbour::SameRank => Err(Error::NoPeer { at, same_rank: true }),
        Neighbour::Nowhere => Err(Error::NoPeer { at, same_rank: false }),
    }
}

/// The mark of a kind that concerns one micro-batch; those are the first of all.
const fn bit(kind: Kind) -> u16 {
    1 << kind as u16
}

fn same_pair(action: Action, kind: Kind) -> Action {
    action.with(kind, action.narrow_stage())
}
