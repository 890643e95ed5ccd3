//! All ranks' lists while they are written: computations as the clock runs, and what follows from them.

use super::super::Schedule;
use super::super::action::{Action, Kind};
use super::Lowering;
use super::timing::Timing;

/// A rank's list.
struct List {
    actions: Vec<Action>,
    overlaps: Vec<usize>,
    /// How many computations and pairs of the schedule have been written.
    next: usize,
    next_pair: usize,
    /// A stage whose reduction is due.
    due: Vec<u16>,
    /// The stage whose reduction has yet to be waited for.
    reducing: Option<u16>,
}

/// What is still owed for a stage.
#[derive(Clone, Copy)]
struct Stage {
    /// How many micro-batches lack their weight gradients.
    missing: usize,
    /// The latest send that is not waited for by the backward of its pair.
    sent: Option<Action>,
}

pub(super) struct Writer<'a> {
    schedule: &'a Schedule,
    timing: &'a Timing,
    waits: bool,
    copies: bool,
    /// Whether the schedule does not say itself when to reduce.
    reduces: bool,
    lists: Vec<List>,
    stages: Vec<Stage>,
    /// For each pair of stage and micro-batch, whether an output was sent that its backward has to wait for.
    sent: Vec<bool>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(schedule: &'a Schedule, timing: &'a Timing, options: Lowering) -> Self {
        let is_reduction = |action: &Action| action.kind() == Kind::ReduceGrad;
        let list = |actions: &Vec<Action>| List {
            // What it computes is received, sent and waited for, at most.
            actions: Vec::with_capacity(actions.len() * 4),
            overlaps: Vec::new(),
            next: 0,
            next_pair: 0,
            due: Vec::new(),
            reducing: None,
        };
        Self {
            schedule,
            timing,
            waits: options.waits,
            copies: options.copies,
            reduces: !schedule.actions.iter().flatten().any(is_reduction),
            lists: schedule.actions.iter().map(list).collect(),
            stages: vec![Stage { missing: schedule.microbatches, sent: None }; schedule.stages()],
            sent: vec![false; schedule.stages() * schedule.microbatches],
        }
    }

    /// Writes one end of a transfer of that time on a rank, after all that the rank begins before.
    pub(super) fn transfer(&mut self, rank: usize, time: u32, end: Action) {
        self.compute_until(rank, Some(time));
        match end.kind() {
            Kind::RecvForward if self.copies => {
                self.push(rank, end.with(Kind::CopyForward, end.narrow_stage()));
            }
            Kind::RecvBackward if self.copies => {
                self.push(rank, end.with(Kind::CopyBackward, end.narrow_stage()));
            }
            _ if self.copies => {}
            Kind::RecvForward | Kind::RecvBackward => {
                self.reduce(rank);
                self.push(rank, end);
            }
            Kind::SendForward if self.schedule.backward => {
                if let Some(sent) = self.schedule.cell(end).and_then(|cell| self.sent.get_mut(cell)) {
                    *sent = true;
                }
                self.push(rank, end);
            }
            _ => {
                let before = self.stages.get_mut(end.stage()).and_then(|stage| stage.sent.replace(end));
                self.wait_for(rank, before);
                self.push(rank, end);
            }
        }
    }

    /// Writes what a rank begins before a time; everything, if there is no time.
    fn compute_until(&mut self, rank: usize, time: Option<u32>) {
        let actions = self.schedule.actions(rank).unwrap_or_default();
        let overlaps = self.schedule.overlaps(rank);
        while let Some(list) = self.lists.get_mut(rank)
            && let Some(start) = self.timing.start(rank, list.next)
            && time.is_none_or(|time| start < time)
        {
            let pair = overlaps.get(list.next_pair) == Some(&list.next);
            let entry = actions.get(list.next..list.next + 1 + usize::from(pair)).unwrap_or_default();
            list.next += 1 + usize::from(pair);
            list.next_pair += usize::from(pair);
            self.reduce(rank);
            if self.copies {
                for &action in entry {
                    self.wait_for_copy(rank, action);
                }
            }
            if pair && let Some(list) = self.lists.get_mut(rank) {
                list.overlaps.push(list.actions.len());
            }
            for &action in entry {
                self.push(rank, action);
            }
            for &action in entry {
                self.follow(rank, action);
            }
        }
    }

    /// Writes the wait for what a computation needs of another rank.
    fn wait_for_copy(&mut self, rank: usize, action: Action) {
        let stage = action.stage();
        let (from, wait) = match action.kind() {
            Kind::Forward => (stage.checked_sub(1), Kind::WaitCopyForward),
            Kind::Backward | Kind::InputGrad => (stage.checked_add(1), Kind::WaitCopyBackward),
            _ => return,
        };
        if from.and_then(|from| self.schedule.rank_of(from)).is_some_and(|other| other != rank) {
            self.push(rank, action.with(wait, action.narrow_stage()));
        }
    }

    /// Writes what follows from a computation.
    fn follow(&mut self, rank: usize, action: Action) {
        let kind = action.kind();
        if kind.gives_input_grad()
            && let Some(sent) = self.schedule.cell(action).and_then(|cell| self.sent.get_mut(cell))
            && std::mem::take(sent)
        {
            self.wait_for(rank, Some(action.with(Kind::SendForward, action.narrow_stage())));
        }
        if self.reduces
            && matches!(kind, Kind::Backward | Kind::WeightGrad)
            && let (Some(stage), Some(list)) = (self.stages.get_mut(action.stage()), self.lists.get_mut(rank))
        {
            stage.missing = stage.missing.saturating_sub(1);
            if stage.missing == 0 {
                list.due.push(action.narrow_stage());
            }
        }
    }

    /// Writes the wait for a send.
    fn wait_for(&mut self, rank: usize, send: Option<Action>) {
        let Some(send) = send.filter(|_| self.waits) else { return };
        let kind =
            if send.kind() == Kind::SendForward { Kind::WaitSendForward } else { Kind::WaitSendBackward };
        self.push(rank, send.with(kind, send.narrow_stage()));
    }

    /// Writes the reductions that are due, each after the wait for the one before: torch has no more than one under way.
    fn reduce(&mut self, rank: usize) {
        let Some(list) = self.lists.get_mut(rank) else { return };
        for stage in std::mem::take(&mut list.due) {
            if let Some(before) = list.reducing.replace(stage).filter(|_| self.waits) {
                list.actions.push(Action::of_step(Kind::WaitReduceGrad, before));
            }
            list.actions.push(Action::of_step(Kind::ReduceGrad, stage));
        }
    }

    fn push(&mut self, rank: usize, action: Action) {
        if let Some(list) = self.lists.get_mut(rank) {
            list.actions.push(action);
        }
    }

    /// The lists, and where pairs begin in each.
    pub(super) fn done(mut self) -> (Vec<Vec<Action>>, Vec<Vec<usize>>) {
        for rank in 0..self.lists.len() {
            self.compute_until(rank, None);
            self.reduce(rank);
        }
        for (stage, rank) in self.schedule.placement().enumerate() {
            let last = self.stages.get(stage).and_then(|stage| stage.sent);
            self.wait_for(rank, last);
        }
        for list in &mut self.lists {
            if let Some(last) = list.reducing.filter(|_| self.waits) {
                list.actions.push(Action::of_step(Kind::WaitReduceGrad, last));
            }
        }
        self.lists.into_iter().map(|list| (list.actions, list.overlaps)).unzip()
    }
}
