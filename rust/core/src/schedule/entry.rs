//! A place in a rank's list: an action, or two that are carried out as one so that they overlap.
//!
//! `(0F4;7B1)OVERLAP_F_B` is a forward and a backward, of which neither waits for the other: both begin when what either
//! needs is there, and what they give to other ranks is there when both have ended.

use std::fmt;
use std::str::FromStr;

use super::action::{Action, Kind, refused};
use crate::error::{Error, Result};

const SUFFIX: &str = ")OVERLAP_F_B";

/// One action, or an overlapping pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// An action by itself.
    Single(Action),
    /// A forward, and a backward (whole, or the input's gradient).
    Overlap(Action, Action),
}

impl Entry {
    /// Its actions, in order.
    pub fn actions(self) -> impl Iterator<Item = Action> {
        let (first, second) = match self {
            Self::Single(action) => (action, None),
            Self::Overlap(first, second) => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

/// A list of actions as entries, given where the pairs begin.
pub(super) fn entries(actions: &[Action], overlaps: &[usize]) -> impl Iterator<Item = Entry> {
    let mut actions = actions.iter().copied().enumerate();
    let mut overlaps = overlaps.iter().copied().peekable();
    std::iter::from_fn(move || {
        let (position, first) = actions.next()?;
        if overlaps.next_if_eq(&position).is_none() {
            return Some(Entry::Single(first));
        }
        let (_, second) = actions.next()?;
        Some(Entry::Overlap(first, second))
    })
}

/// Whether two kinds may overlap, in this order.
pub(super) const fn may_overlap(first: Kind, second: Kind) -> bool {
    matches!(first, Kind::Forward) && matches!(second, Kind::Backward | Kind::InputGrad)
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single(action) => action.fmt(f),
            Self::Overlap(first, second) => write!(f, "({first};{second}{SUFFIX}"),
        }
    }
}

impl FromStr for Entry {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some(rest) = text.strip_prefix('(') else { return text.parse().map(Self::Single) };
        let Some((first, rest)) = rest.split_once(';') else {
            return Err(refused(text, text.len(), "expected two actions with ';' between them"));
        };
        let Some((second, suffix)) = rest.split_once(')') else {
            return Err(refused(text, text.len(), "expected ')OVERLAP_F_B'"));
        };
        if Some(suffix) != SUFFIX.strip_prefix(')') {
            return Err(refused(text, text.len() - suffix.len(), "expected 'OVERLAP_F_B' and then the end"));
        }
        let part = |part: &str, bytes_before: usize| -> Result<Action> {
            part.parse().map_err(|error| match error {
                Error::ActionText { column, reason, .. } => {
                    // Columns before this part are one byte each: the part before was read.
                    refused(text, bytes_before + column - 1, reason)
                }
                other => other,
            })
        };
        let actions = (part(first, 1)?, part(second, first.len() + 2)?);
        if !may_overlap(actions.0.kind(), actions.1.kind()) {
            return Err(refused(
                text,
                1,
                "only a forward (F) and a backward (B or I) overlap, in this order",
            ));
        }
        Ok(Self::Overlap(actions.0, actions.1))
    }
}
