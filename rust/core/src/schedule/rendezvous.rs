//! Carrying out a schedule that says when each result is sent and received.
//!
//! A send and its receive happen together, when both ranks have come to them (rendezvous): no more than that can be relied
//! on, since a network may take nothing that is not awaited. Then all transfers stand in one order, in which each rank's
//! list has its own; so the messages between two ranks cannot be received in another order than they were sent, and a
//! network that takes more only lets ranks go on earlier. Why a schedule fails is looked for after it has failed.

use std::collections::HashMap;

use super::Schedule;
use super::action::{Action, Kind};
use super::verify::At;
use super::walk::{Blocked, first_cycle};
use crate::error::{Error, Result};

/// The other end of a transfer: its rank and its action there; `None` for all other actions.
fn other_end(schedule: &Schedule, action: Action) -> Option<(usize, Action)> {
    let (kind, stage) = match action.kind() {
        Kind::SendForward => (Kind::RecvForward, action.narrow_stage().checked_add(1)?),
        Kind::RecvForward => (Kind::SendForward, action.narrow_stage().checked_sub(1)?),
        Kind::SendBackward => (Kind::RecvBackward, action.narrow_stage().checked_sub(1)?),
        Kind::RecvBackward => (Kind::SendBackward, action.narrow_stage().checked_add(1)?),
        _ => return None,
    };
    Some((schedule.rank_of(usize::from(stage))?, action.with(kind, stage)))
}

const fn is_send(kind: Kind) -> bool {
    matches!(kind, Kind::SendForward | Kind::SendBackward)
}

/// Whether the transfers can all happen. The lists must have passed every other check.
///
/// # Errors
/// [`Error::MessageOrder`], [`Error::Deadlock`], or [`Error::Rendezvous`] if it would not be one with buffered sends.
pub(super) fn verify(schedule: &Schedule) -> Result<()> {
    let stuck = progress(schedule);
    let Some(cycle) = cycle(schedule, &stuck) else { return Ok(()) };
    verify_message_order(schedule)?;
    // In a deadlock that buffers would not solve, only receives wait: that cycle is the one to show.
    let stuck = buffered_progress(schedule);
    Err(match self::cycle(schedule, &stuck) {
        Some(cycle) => Error::Deadlock { cycle },
        None => Error::Rendezvous { cycle },
    })
}

/// How far each rank comes.
fn progress(schedule: &Schedule) -> Vec<usize> {
    let mut heads = vec![0usize; schedule.ranks()];
    let mut ready: Vec<usize> = (0..schedule.ranks()).rev().collect();
    while let Some(rank) = ready.pop() {
        let Some(actions) = schedule.actions(rank) else { continue };
        let mut head = heads.get(rank).copied().unwrap_or_default();
        while let Some(&action) = actions.get(head) {
            if let Some((other, wanted)) = other_end(schedule, action) {
                let Some(there) = heads.get_mut(other) else { break };
                if schedule.actions(other).and_then(|actions| actions.get(*there)) != Some(&wanted) {
                    break;
                }
                *there += 1;
                // It stood there, or has not been looked at yet; either way it can go on.
                ready.push(other);
            }
            head += 1;
        }
        if let Some(entry) = heads.get_mut(rank) {
            *entry = head;
        }
    }
    heads
}

/// How far each rank comes if sends wait for nobody.
fn buffered_progress(schedule: &Schedule) -> Vec<usize> {
    let mut heads = vec![0usize; schedule.ranks()];
    let mut sent = std::collections::HashSet::new();
    let mut ready: Vec<usize> = (0..schedule.ranks()).rev().collect();
    while let Some(rank) = ready.pop() {
        let Some(actions) = schedule.actions(rank) else { continue };
        let mut head = heads.get(rank).copied().unwrap_or_default();
        while let Some(&action) = actions.get(head) {
            if let Some((other, wanted)) = other_end(schedule, action) {
                if is_send(action.kind()) {
                    sent.insert(action);
                    ready.push(other);
                } else if !sent.contains(&wanted) {
                    break;
                }
            }
            head += 1;
        }
        if let Some(entry) = heads.get_mut(rank) {
            *entry = head;
        }
    }
    heads
}

/// The ranks that hold one another up, if any has not reached its end.
fn cycle(schedule: &Schedule, heads: &[usize]) -> Option<Vec<Blocked>> {
    let blocked = |rank: usize| {
        let position = *heads.get(rank)?;
        let action = *schedule.actions(rank)?.get(position)?;
        let (other, wanted) = other_end(schedule, action)?;
        let needs = At { rank: other, position: schedule.find(other, wanted)?, action: wanted };
        Some(Blocked { at: At { rank, position, action }, needs })
    };
    first_cycle(schedule.ranks(), blocked)
}

/// That the messages from one rank to another are received in the order in which they are sent.
fn verify_message_order(schedule: &Schedule) -> Result<()> {
    // From whom to whom; what was sent, in order, and how much of it has been received.
    let mut channels: HashMap<(usize, usize), (Vec<At>, usize)> = HashMap::new();
    let ends = |send: bool| {
        let ranks = (0..schedule.ranks()).flat_map(move |rank| {
            let actions = schedule.actions(rank).unwrap_or_default().iter().enumerate();
            actions.map(move |(position, &action)| At { rank, position, action })
        });
        ranks.filter_map(move |at| {
            let (other, wanted) = other_end(schedule, at.action)?;
            (is_send(at.action.kind()) == send).then_some((at, other, wanted))
        })
    };
    for (at, other, _) in ends(true) {
        channels.entry((at.rank, other)).or_default().0.push(at);
    }
    for (receive, other, wanted) in ends(false) {
        let Some((sent, received)) = channels.get_mut(&(other, receive.rank)) else { continue };
        if let Some(&send) = sent.get(*received).filter(|send| send.action != wanted) {
            return Err(Error::MessageOrder { send, receive, number: *received });
        }
        *received += 1;
    }
    Ok(())
}
