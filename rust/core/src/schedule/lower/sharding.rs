//! When the sharded weights of stages are gathered and dropped.
//!
//! A rank holds the weights of the stages that it computes on next, as many as it may. What else it holds is dropped before
//! the next computation, and what it lacks is gathered, so that there is time to gather it before it is needed.
//!
//! ```text
//! stages 0, 2, 4 on a rank, two at a time: UNSHARD 0, UNSHARD 2 | F of 0 | RESHARD 0, UNSHARD 4 | F of 2 | F of 4 ...
//! ```

use std::collections::{BTreeMap, BTreeSet};

use super::super::action::{Action, Kind};
use super::super::verify::At;
use super::super::{Entry, Schedule};
use crate::error::{Error, Result};

/// The same schedule, with at most `limit` stages unsharded on any rank at a time, but for a pair that is next and needs
/// one more.
pub(super) fn unshard(schedule: &Schedule, limit: usize) -> Result<Schedule> {
    if limit == 0 {
        return Err(Error::NotPositive { what: "the number of unsharded stages", value: 0 });
    }
    let is_sharding = |action: &Action| matches!(action.kind(), Kind::Unshard | Kind::Reshard);
    if schedule.actions.iter().flatten().any(is_sharding) {
        return Err(Error::Lowered { what: "when weights are gathered" });
    }
    let (mut lists, mut overlaps) = (Vec::new(), Vec::new());
    for rank in 0..schedule.ranks() {
        let entries: Vec<_> = schedule.entries(rank).collect();
        if limit == 1 {
            verify_pairs(schedule, rank)?;
        }
        let (mut list, mut pairs) = (Vec::new(), Vec::new());
        let (first, after) = uses(&entries);
        let mut weights = Weights { limit, held: Vec::new(), next: first };
        for (index, (&entry, after)) in entries.iter().zip(after).enumerate() {
            if computes(entry) {
                weights.change(&mut list);
                weights.pass(index, entry, after);
            }
            if matches!(entry, Entry::Overlap(..)) {
                pairs.push(list.len());
            }
            list.extend(entry.actions());
        }
        list.extend(weights.held.iter().map(|&stage| Action::of_step(Kind::Reshard, stage)));
        lists.push(list);
        overlaps.push(pairs);
    }
    schedule.with_lists(lists, overlaps)
}

/// Which entry uses a stage, as which of a pair, and the stage.
type Use = (usize, usize, u16);

/// What a rank holds, and when it needs each of its stages next.
struct Weights {
    limit: usize,
    /// In the order in which they were gathered.
    held: Vec<u16>,
    /// The next use of every stage that has one, the nearest first.
    next: BTreeSet<Use>,
}

impl Weights {
    /// Drops and gathers what is to be before the next computation.
    fn change(&mut self, list: &mut Vec<Action>) {
        let mut wanted: Vec<u16> = Vec::with_capacity(self.limit.min(self.next.len()) + 1);
        let mut reached = None;
        for &(entry, _, stage) in &self.next {
            // A pair is not taken apart.
            if wanted.len() >= self.limit && reached != Some(entry) {
                break;
            }
            reached = Some(entry);
            wanted.push(stage);
        }
        self.held.retain(|stage| {
            let stays = wanted.contains(stage);
            if !stays {
                list.push(Action::of_step(Kind::Reshard, *stage));
            }
            stays
        });
        for stage in wanted {
            if !self.held.contains(&stage) {
                self.held.push(stage);
                list.push(Action::of_step(Kind::Unshard, stage));
            }
        }
    }

    /// Takes note that an entry has been written; `after` is when each of its stages is needed again.
    fn pass(&mut self, index: usize, entry: Entry, after: [Option<Use>; 2]) {
        for (of, action) in entry.actions().enumerate() {
            self.next.remove(&(index, of, action.narrow_stage()));
        }
        self.next.extend(after.into_iter().flatten());
    }
}

fn computes(entry: Entry) -> bool {
    entry.actions().all(|action| action.kind().computes())
}

/// The first use of every stage; and for each entry, when the stages of its actions are used next.
fn uses(entries: &[Entry]) -> (BTreeSet<Use>, Vec<[Option<Use>; 2]>) {
    let mut after = vec![[None; 2]; entries.len()];
    let mut next = BTreeMap::new();
    for ((index, entry), after) in entries.iter().enumerate().zip(&mut after).rev() {
        if !computes(*entry) {
            continue;
        }
        for (action, after) in entry.actions().zip(after.iter_mut()) {
            // Taken, so that of a pair of one stage only the first has it.
            *after = next.remove(&action.narrow_stage());
        }
        for (of, action) in entry.actions().enumerate() {
            let stage = action.narrow_stage();
            next.entry(stage).or_insert((index, of, stage));
        }
    }
    (next.into_values().collect(), after)
}

/// One stage at a time does not do for a pair of two.
fn verify_pairs(schedule: &Schedule, rank: usize) -> Result<()> {
    let actions = schedule.actions(rank).unwrap_or_default();
    for &position in schedule.overlaps(rank) {
        if let (Some(&action), Some(second)) = (actions.get(position), actions.get(position + 1))
            && action.stage() != second.stage()
        {
            return Err(Error::PairSharded { at: At { rank, position, action } });
        }
    }
    Ok(())
}
