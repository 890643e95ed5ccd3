//! When everything would be done, by a clock that knows no costs.

use super::super::Schedule;
use super::super::action::{Action, Kind};
use super::super::walk::walk;
use crate::error::{Error, Result};

/// A result on its way.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    /// When it has been computed.
    pub(super) time: u32,
    /// The sending and the receiving rank, and what each does.
    pub(super) ends: [(usize, Action); 2],
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

    /// All transfers in order of time, and link by link where they are done at the same time.
    pub(super) fn transfers(&self, schedule: &Schedule) -> Vec<Transfer> {
        let m = schedule.microbatches;
        let border = |upper: usize| Some((schedule.rank_of(upper - 1)?, schedule.rank_of(upper)?, upper));
        let mut borders: Vec<_> =
            (1..schedule.stages()).filter_map(border).filter(|(below, above, _)| below != above).collect();
        borders.sort_unstable_by_key(|&(below, above, stage)| (below.min(above), below.max(above), stage));
        let mut transfers = Vec::with_capacity(borders.len() * m * if schedule.backward { 2 } else { 1 });
        for (below, above, upper) in borders {
            // Always fits, being within the limit.
            let narrow = |stage: usize| u16::try_from(stage).unwrap_or(u16::MAX);
            let row = |table: &'_ [u32], stage: usize| stage * m..((stage + 1) * m).min(table.len());
            let known = |kind, stage, i| Action::known(kind, narrow(stage), i);
            let lower = upper - 1;
            for (i, &time) in (0..).zip(self.outputs.get(row(&self.outputs, lower)).unwrap_or_default()) {
                let send = (below, known(Kind::SendForward, lower, i));
                transfers.push(Transfer { time, ends: [send, (above, known(Kind::RecvForward, upper, i))] });
            }
            if !schedule.backward {
                continue;
            }
            for (i, &time) in
                (0..).zip(self.input_grads.get(row(&self.input_grads, upper)).unwrap_or_default())
            {
                let send = (above, known(Kind::SendBackward, upper, i));
                transfers.push(Transfer { time, ends: [send, (below, known(Kind::RecvBackward, lower, i))] });
            }
        }
        by_time(&transfers)
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

/// Sorted by counting how many there are of each time, of which there are at most as many as there is work.
fn by_time(transfers: &[Transfer]) -> Vec<Transfer> {
    let Some(first) = transfers.first() else { return Vec::new() };
    let last = transfers.iter().map(|transfer| transfer.time).max().unwrap_or_default();
    let mut places = vec![0usize; last as usize + 2];
    for transfer in transfers {
        if let Some(count) = places.get_mut(transfer.time as usize + 1) {
            *count += 1;
        }
    }
    let mut before = 0;
    for place in &mut places {
        before += *place;
        *place = before;
    }
    let mut sorted = vec![*first; transfers.len()];
    for transfer in transfers {
        if let Some(place) = places.get_mut(transfer.time as usize) {
            if let Some(entry) = sorted.get_mut(*place) {
                *entry = *transfer;
            }
            *place += 1;
        }
    }
    sorted
}
