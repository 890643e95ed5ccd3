//! When everything would be done, by a clock that knows no costs.

use super::super::Schedule;
use super::super::action::{Action, Kind};
use super::super::walk::walk;
use crate::error::{Error, Result};

/// A result on its way to the next stage, or a gradient to the one before. There are many: twelve bytes each.
#[derive(Clone, Copy, Default)]
pub(super) struct Transfer {
    /// When it has been computed.
    pub(super) time: u32,
    microbatch: u32,
    /// The stage that computed it.
    stage: u16,
    backward: bool,
}

impl Transfer {
    /// The sending and the receiving rank, and what each does.
    pub(super) fn ends(self, schedule: &Schedule) -> [(usize, Action); 2] {
        let (send, receive, there) = if self.backward {
            (Kind::SendBackward, Kind::RecvBackward, self.stage.saturating_sub(1))
        } else {
            (Kind::SendForward, Kind::RecvForward, self.stage.saturating_add(1))
        };
        [(send, self.stage), (receive, there)].map(|(kind, stage)| {
            let rank = schedule.rank_of(usize::from(stage)).unwrap_or_default();
            (rank, Action::known(kind, stage, self.microbatch))
        })
    }
}

/// When all actions begin, and all results are done.
pub(super) struct Timing {
    /// For each rank, action by action.
    starts: Vec<Vec<u32>>,
    /// For each pair of stage and micro-batch.
    outputs: Vec<u32>,
    input_grads: Vec<u32>,
}

/// At most four for each pair of stage and micro-batch, of which there are so few that no sum exceeds 32 bits.
const fn duration(kind: Kind) -> u32 {
    match kind {
        Kind::Backward => 2,
        kind if kind.computes() => 1,
        _ => 0,
    }
}

impl Timing {
    /// Every rank begins an action as soon as it is free and what the action needs is there.
    pub(super) fn of(schedule: &Schedule) -> Result<Self> {
        let cells = schedule.stages() * schedule.microbatches;
        let mut timing = Self {
            starts: schedule.actions.iter().map(|list| Vec::with_capacity(list.len())).collect(),
            outputs: vec![0; cells],
            input_grads: vec![0; cells],
        };
        let mut ranks: Vec<_> = (0..schedule.ranks()).map(|_| Progress::default()).collect();
        let visit = |rank, action| {
            let (Some(progress), Some(actions)) = (ranks.get_mut(rank), schedule.actions(rank)) else {
                return;
            };
            let position = timing.starts.get(rank).map_or(0, Vec::len);
            if schedule.overlaps(rank).get(progress.pairs) == Some(&position) {
                // Both begin when what either needs is there, and end together.
                let second = actions.get(position + 1).copied().unwrap_or(action);
                let ready = timing.ready(schedule, action).max(timing.ready(schedule, second));
                progress.begin(ready, duration(action.kind()) + duration(second.kind()));
                progress.pairs += 1;
                progress.in_pair = true;
            } else if progress.in_pair {
                progress.in_pair = false;
            } else {
                progress.begin(timing.ready(schedule, action), duration(action.kind()));
            }
            if let Some(starts) = timing.starts.get_mut(rank) {
                starts.push(progress.start);
            }
            let table = match action.kind() {
                Kind::Forward => &mut timing.outputs,
                kind if kind.gives_input_grad() => &mut timing.input_grads,
                _ => return,
            };
            if let Some(entry) = schedule.cell(action).and_then(|cell| table.get_mut(cell)) {
                *entry = progress.end;
            }
        };
        walk(schedule, visit).map_err(|cycle| Error::Deadlock { cycle })?;
        Ok(timing)
    }

    /// When what an action needs of other stages is there. Nothing is needed of the first in forward, the last in backward.
    fn ready(&self, schedule: &Schedule, action: Action) -> u32 {
        let (cell, m) = (schedule.cell(action).unwrap_or_default(), schedule.microbatches);
        let needed = match action.kind() {
            Kind::Forward => cell.checked_sub(m).and_then(|before| self.outputs.get(before)),
            kind if kind.gives_input_grad() => self.input_grads.get(cell + m),
            _ => None,
        };
        needed.copied().unwrap_or_default()
    }

    /// When a rank begins the action at a position.
    pub(super) fn start(&self, rank: usize, position: usize) -> Option<u32> {
        self.starts.get(rank)?.get(position).copied()
    }

    /// All transfers in order of time, and link by link where they are done at the same time. They are sorted by counting
    /// how many there are of each time, and there are no more times than there is work.
    pub(super) fn transfers(&self, schedule: &Schedule) -> Vec<Transfer> {
        let mut places: Vec<usize> = Vec::new();
        self.for_each_transfer(schedule, |transfer| {
            let place = transfer.time as usize + 1;
            if place >= places.len() {
                places.resize((place + 1).next_power_of_two(), 0);
            }
            if let Some(count) = places.get_mut(place) {
                *count += 1;
            }
        });
        let mut total = 0;
        for place in &mut places {
            total += *place;
            *place = total;
        }
        let mut sorted = vec![Transfer::default(); total];
        self.for_each_transfer(schedule, |transfer| {
            let Some(place) = places.get_mut(transfer.time as usize) else { return };
            if let Some(entry) = sorted.get_mut(*place) {
                *entry = transfer;
            }
            *place += 1;
        });
        sorted
    }

    /// All transfers, link by link.
    fn for_each_transfer(&self, schedule: &Schedule, mut visit: impl FnMut(Transfer)) {
        let m = schedule.microbatches;
        let border = |upper: usize| Some((schedule.rank_of(upper - 1)?, schedule.rank_of(upper)?, upper));
        let mut borders: Vec<_> =
            (1..schedule.stages()).filter_map(border).filter(|(below, above, _)| below != above).collect();
        borders.sort_unstable_by_key(|&(below, above, stage)| (below.min(above), below.max(above), stage));
        for (_, _, upper) in borders {
            let mut of_stage = |table: &[u32], stage: usize, backward| {
                // Always fits, being within the limit.
                let narrow = u16::try_from(stage).unwrap_or(u16::MAX);
                let times = table.get(stage * m..(stage + 1) * m).unwrap_or_default();
                for (microbatch, &time) in (0..).zip(times) {
                    visit(Transfer { time, microbatch, stage: narrow, backward });
                }
            };
            of_stage(&self.outputs, upper - 1, false);
            if schedule.backward {
                of_stage(&self.input_grads, upper, true);
            }
        }
    }
}

/// How far a rank has come.
#[derive(Default)]
struct Progress {
    start: u32,
    end: u32,
    pairs: usize,
    in_pair: bool,
}

impl Progress {
    fn begin(&mut self, ready: u32, duration: u32) {
        self.start = self.end.max(ready);
        self.end = self.start + duration;
    }
}
