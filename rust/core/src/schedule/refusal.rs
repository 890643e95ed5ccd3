//! Where a schedule is at fault, as a few lines of text: a line for each rank that has a part in it, cut to what is near.
//!
//! ```text
//! rank 0 | 0F0 >0B0< (0F1) 0B1
//! rank 1 | 1F0 >1F1< 1B1 (1B0)
//! every > < waits for a ( )
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Schedule;
use super::verify::At;
use crate::error::Error;

/// How many actions are shown before and behind one that matters.
const NEAR: usize = 3;
/// How many ranks are shown, and how many actions that matter on each.
const MAX_ROWS: usize = 8;
const MAX_MARKS: usize = 4;

/// What matters of a rank: positions of what is refused, and of what it is refused for.
type Marks = BTreeMap<usize, (bool, bool)>;

#[derive(Default)]
struct Picture {
    rows: BTreeMap<usize, Marks>,
    legend: &'static str,
}

impl Picture {
    fn of(schedule: &Schedule, error: &Error) -> Option<Self> {
        let mut picture = Self { legend: "> < is at fault", ..Self::default() };
        match error {
            Error::NoSuchStage { at, .. }
            | Error::NoSuchMicrobatch { at, .. }
            | Error::Misplaced { at, .. }
            | Error::UnexpectedBackward { at }
            | Error::NoPeer { at, .. }
            | Error::CopiedAndSent { at }
            | Error::Sharded { at }
            | Error::ShardedTwice { at } => picture.refuse(at),
            Error::OverMemory { at, .. } => {
                picture.refuse(at);
                picture.legend = "> < takes too much";
            }
            Error::Repeated { at, first } => {
                picture.refuse(at);
                picture.reason(at.rank, *first);
                picture.legend = "> < repeats ( )";
            }
            Error::WholeAndSplit { at, first, .. } => {
                picture.refuse(at);
                picture.reason(at.rank, *first);
                picture.legend = "> < contradicts ( )";
            }
            Error::OutOfOrder { at, later, .. } => {
                picture.refuse(at);
                picture.reason(at.rank, *later);
                picture.legend = "> < needs ( ), which must come first";
            }
            Error::OverlapNeeds { at, .. } => {
                picture.refuse(at);
                picture.reason(at.rank, at.position.saturating_sub(1));
                picture.legend = "> < needs ( ), which must have ended";
            }
            Error::Missing { action, rank } => {
                let actions = schedule.actions(*rank)?.iter().enumerate();
                let same = |other: &super::Action| {
                    other.stage() == action.stage()
                        && (action.microbatch().is_none() || other.microbatch() == action.microbatch())
                };
                for (position, _) in actions.filter(|(_, other)| same(other)).take(MAX_MARKS) {
                    picture.reason(*rank, position);
                }
                picture.rows.entry(*rank).or_default();
                picture.legend = if action.microbatch().is_some() {
                    "( ) is of the same micro-batch"
                } else {
                    "( ) is of the same stage"
                };
            }
            Error::Deadlock { cycle } | Error::Rendezvous { cycle } => {
                for blocked in cycle {
                    picture.refuse(&blocked.at);
                    picture.reason(blocked.needs.rank, blocked.needs.position);
                }
                picture.legend = "every > < waits for a ( )";
            }
            Error::MessageOrder { send, receive, .. } => {
                picture.refuse(receive);
                picture.reason(send.rank, send.position);
                picture.legend = "> < would be given ( )";
            }
            _ => return None,
        }
        Some(picture)
    }

    fn refuse(&mut self, at: &At) {
        self.rows.entry(at.rank).or_default().entry(at.position).or_default().0 = true;
    }

    fn reason(&mut self, rank: usize, position: usize) {
        self.rows.entry(rank).or_default().entry(position).or_default().1 = true;
    }
}

impl Schedule {
    /// The lines around what [`Schedule::verify`] refuses, without a newline at the end; `None` for an error that has no
    /// place in the schedule.
    ///
    /// ```
    /// use torchrelay_core::Schedule;
    ///
    /// let schedule = Schedule::from_csv("by hand", "0F0,0B1,0F1,0B0\n")?;
    /// let error = schedule.verify().unwrap_err();
    /// assert_eq!(error.to_string(), "0B1 (rank 0, position 1) needs 0F1, which comes later, at position 2");
    /// let lines = "rank 0 | 0F0 >0B1< (0F1) 0B0\n> < needs ( ), which must come first";
    /// assert_eq!(schedule.picture_of(&error), Some(lines.to_owned()));
    /// # Ok::<(), torchrelay_core::Error>(())
    /// ```
    pub fn picture_of(&self, error: &Error) -> Option<String> {
        let picture = Picture::of(self, error)?;
        let mut text = String::new();
        let margin = picture.rows.keys().last().map_or(0, |rank| format!("rank {rank} |").len());
        for (&rank, marks) in picture.rows.iter().take(MAX_ROWS) {
            let _ = writeln!(text, "{:>margin$}{}", format!("rank {rank} |"), self.row(rank, marks));
        }
        if picture.rows.len() > MAX_ROWS {
            let _ = writeln!(text, "{:>margin$} {} more ranks", "...", picture.rows.len() - MAX_ROWS);
        }
        text += picture.legend;
        Some(text)
    }

    /// What is near the marks of a rank.
    fn row(&self, rank: usize, marks: &Marks) -> String {
        let actions = self.actions(rank).unwrap_or_default();
        let mut line = String::new();
        let mut next = 0;
        // Without a mark the beginning is as good as any place.
        let first_of_all = (0, (false, false));
        let marked = marks.iter().map(|(&position, &mark)| (position, mark));
        let places: Vec<_> =
            if marks.is_empty() { vec![first_of_all] } else { marked.take(MAX_MARKS).collect() };
        for (position, _) in places {
            let begin = position.saturating_sub(NEAR).max(next);
            if begin > next {
                line += " ...";
            }
            let end = (position + NEAR + 1).min(actions.len());
            for (position, action) in actions.iter().enumerate().take(end).skip(begin) {
                let _ = match marks.get(&position) {
                    None => write!(line, " {action}"),
                    Some((true, true)) => write!(line, " >({action})<"),
                    Some((true, false)) => write!(line, " >{action}<"),
                    Some((false, _)) => write!(line, " ({action})"),
                };
            }
            next = next.max(end);
        }
        if next < actions.len() {
            line += " ...";
        }
        if actions.is_empty() {
            line += " (nothing)";
        }
        line
    }
}
