//! Carrying out a schedule without computing: every rank follows its list, and waits where it needs another rank.
//!
//! What an action needs from another stage is one action, and what it sets free is one action of a neighbouring stage.
//! So each action costs constant time, whatever the number of ranks.

use std::fmt;

use super::Schedule;
use super::action::{Action, Kind};
use super::verify::At;

/// An action that waits for one of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocked {
    /// The action that cannot begin.
    pub at: At,
    /// The action that it waits for.
    pub needs: At,
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} waits for {}", self.at, self.needs)
    }
}

/// What has been computed for a pair of stage and micro-batch, as far as other stages can need it.
const OUTPUT: u8 = 1;
const INPUT_GRAD: u8 = 2;

/// The stage, seen from an action's own, whose result the action needs, and which result.
fn needs(action: Action, last_stage: u16) -> Option<(u16, u8)> {
    match action.kind() {
        Kind::Forward => Some((action.narrow_stage().checked_sub(1)?, OUTPUT)),
        Kind::Backward | Kind::InputGrad if action.narrow_stage() < last_stage => {
            Some((action.narrow_stage() + 1, INPUT_GRAD))
        }
        _ => None,
    }
}

/// What an action leaves for others, and the stage that waits for it.
fn gives(action: Action, last_stage: u16) -> (u8, Option<u16>) {
    match action.kind() {
        Kind::Forward if action.narrow_stage() < last_stage => (OUTPUT, Some(action.narrow_stage() + 1)),
        Kind::Forward => (OUTPUT, None),
        Kind::Backward | Kind::InputGrad => (INPUT_GRAD, action.narrow_stage().checked_sub(1)),
        _ => (0, None),
    }
}

/// Calls `visit(rank, action)` for every action after those that it needs, each rank's in order. The schedule must have
/// passed every other check: what is needed on the same rank is taken for granted.
///
/// # Errors
/// A cycle of ranks that wait for one another.
pub(super) fn walk(schedule: &Schedule, mut visit: impl FnMut(usize, Action)) -> Result<(), Vec<Blocked>> {
    let last_stage = u16::try_from(schedule.stages() - 1).unwrap_or(u16::MAX);
    let m = schedule.microbatches;
    let mut done = vec![0u8; schedule.stages() * m];
    let mut heads = vec![0usize; schedule.ranks()];
    // A rank is listed when something that it may have waited for has been done, and at most once.
    let mut listed = vec![true; schedule.ranks()];
    let mut ready: Vec<usize> = (0..schedule.ranks()).rev().collect();
    while let Some(rank) = ready.pop() {
        let (Some(head), Some(actions)) = (heads.get_mut(rank), schedule.actions.get(rank)) else { continue };
        while let Some(&action) = actions.get(*head) {
            let microbatch = action.microbatch().unwrap_or_default();
            let is_done = |(stage, bit)| {
                done.get(usize::from(stage) * m + microbatch).is_some_and(|&bits: &u8| bits & bit != 0)
            };
            if !needs(action, last_stage).is_none_or(is_done) {
                break;
            }
            visit(rank, action);
            *head += 1;
            let (bit, waiting) = gives(action, last_stage);
            if let Some(bits) = done.get_mut(action.stage() * m + microbatch) {
                *bits |= bit;
            }
            let Some(other) = waiting.and_then(|stage| schedule.rank_of(usize::from(stage))) else {
                continue;
            };
            if let Some(entry) = listed.get_mut(other).filter(|entry| !**entry) {
                *entry = true;
                ready.push(other);
            }
        }
        if let Some(entry) = listed.get_mut(rank) {
            *entry = false;
        }
    }
    cycle(schedule, &heads, last_stage).map_or(Ok(()), Err)
}

/// The ranks that hold one another up, if any rank has not reached its end. From any of them, following what it waits for
/// must come back, since what is waited for stands ahead of another rank that has not reached its end either.
fn cycle(schedule: &Schedule, heads: &[usize], last_stage: u16) -> Option<Vec<Blocked>> {
    let blocked = |rank: usize| {
        let position = *heads.get(rank)?;
        let action = *schedule.actions(rank)?.get(position)?;
        let (stage, bit) = needs(action, last_stage)?;
        let other = schedule.rank_of(usize::from(stage))?;
        let kinds: &[Kind] =
            if bit == OUTPUT { &[Kind::Forward] } else { &[Kind::Backward, Kind::InputGrad] };
        let (found, there) = kinds.iter().find_map(|&kind| {
            let wanted = action.with(kind, stage);
            Some((wanted, schedule.find(other, wanted)?))
        })?;
        let at = At { rank, position, action };
        Some(Blocked { at, needs: At { rank: other, position: there, action: found } })
    };
    let mut chain: Vec<Blocked> = Vec::new();
    let mut seen: Vec<Option<usize>> = vec![None; schedule.ranks()];
    let mut next = (0..schedule.ranks()).find_map(blocked)?;
    loop {
        let entry = seen.get_mut(next.at.rank)?;
        if let Some(start) = *entry {
            return Some(chain.split_off(start));
        }
        *entry = Some(chain.len());
        chain.push(next);
        next = blocked(next.needs.rank)?;
    }
}
