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
        Kind::Forward | Kind::CopyForward => Some((action.narrow_stage().checked_sub(1)?, OUTPUT)),
        Kind::Backward | Kind::InputGrad | Kind::CopyBackward if action.narrow_stage() < last_stage => {
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
/// passed every other check: what is needed on the same rank is taken for granted. Sends and receives wait for nobody, and
/// what is sent is there when it has been computed.
///
/// # Errors
/// A cycle of ranks that wait for one another.
pub(super) fn walk(schedule: &Schedule, mut visit: impl FnMut(usize, Action)) -> Result<(), Vec<Blocked>> {
    let last_stage = u16::try_from(schedule.stages() - 1).unwrap_or(u16::MAX);
    let m = schedule.microbatches;
    let mut done = vec![0u8; schedule.stages() * m];
    let mut heads = vec![0usize; schedule.ranks()];
    // How many of the overlapping pairs each rank has begun.
    let mut pairs = vec![0usize; schedule.ranks()];
    // A rank is listed when something that it may have waited for has been done, and at most once.
    let mut listed = vec![true; schedule.ranks()];
    let mut ready: Vec<usize> = (0..schedule.ranks()).rev().collect();
    while let Some(rank) = ready.pop() {
        let (Some(head), Some(pair)) = (heads.get_mut(rank), pairs.get_mut(rank)) else { continue };
        let (actions, overlaps) = (schedule.actions(rank).unwrap_or_default(), schedule.overlaps(rank));
        while *head < actions.len() {
            // Both of a pair begin when what either needs is there.
            let together = if overlaps.get(*pair) == Some(head) { 2 } else { 1 };
            let entry = actions.get(*head..*head + together).unwrap_or_default();
            if entry.iter().any(|&action| !is_ready(action, last_stage, &done, m)) {
                break;
            }
            for &action in entry {
                visit(rank, action);
                let (bit, waiting) = gives(action, last_stage);
                let microbatch = action.microbatch().unwrap_or_default();
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
            *head += together;
            *pair += together - 1;
        }
        if let Some(entry) = listed.get_mut(rank) {
            *entry = false;
        }
    }
    let blocked = |rank: usize| {
        let position = *heads.get(rank)?;
        let together = if schedule.overlaps(rank).contains(&position) { 2 } else { 1 };
        let (before, action) =
            (schedule.actions(rank)?.iter().copied().enumerate().skip(position).take(together))
                .find(|&(_, action)| !is_ready(action, last_stage, &done, m))?;
        let (stage, bit) = needs(action, last_stage)?;
        let other = schedule.rank_of(usize::from(stage))?;
        let kinds: &[Kind] =
            if bit == OUTPUT { &[Kind::Forward] } else { &[Kind::Backward, Kind::InputGrad] };
        let (found, there) = kinds.iter().find_map(|&kind| {
            let wanted = action.with(kind, stage);
            Some((wanted, schedule.find(other, wanted)?))
        })?;
        let at = At { rank, position: before, action };
        Some(Blocked { at, needs: At { rank: other, position: there, action: found } })
    };
    first_cycle(schedule.ranks(), blocked).map_or(Ok(()), Err)
}

/// Whether what an action needs from another stage has been done.
fn is_ready(action: Action, last_stage: u16, done: &[u8], m: usize) -> bool {
    needs(action, last_stage).is_none_or(|(stage, bit)| {
        let cell = usize::from(stage) * m + action.microbatch().unwrap_or_default();
        done.get(cell).is_some_and(|&bits| bits & bit != 0)
    })
}

/// The ranks that hold one another up, if any rank has not reached its end; `blocked` says what a rank waits for. From any
/// of them, following that must come back, since what is waited for stands ahead of another rank that has not reached its
/// end either.
pub(super) fn first_cycle(ranks: usize, blocked: impl Fn(usize) -> Option<Blocked>) -> Option<Vec<Blocked>> {
    let mut chain: Vec<Blocked> = Vec::new();
    let mut seen: Vec<Option<usize>> = vec![None; ranks];
    let mut next = (0..ranks).find_map(&blocked)?;
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
