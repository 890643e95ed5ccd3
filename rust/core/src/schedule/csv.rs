//! A schedule as CSV, the way `torch.distributed.pipelining` reads and writes it: a row per rank, an action per cell, an
//! empty cell where the rank idles. Rows may have different lengths.
//!
//! What the file does not say is taken from its actions: the rank of a stage is the one that acts on it, there are as many
//! micro-batches as the highest one tells, and there is a backward if any action belongs to one. Reading is strict.
//! Nothing is quoted, and no cell has blanks. A recomputation (`R`) is written and read too, which torch refuses.

use std::fmt::Write as _;

use super::Schedule;
use super::action::Action;
use super::entry::Entry;
use crate::error::{Error, Result};

/// A place in the text, both counted from 1; columns are characters.
#[derive(Clone, Copy)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn refuse(self, reason: impl Into<String>) -> Error {
        Error::Text { what: "a schedule", line: self.line, column: self.column, reason: reason.into() }
    }
}

impl Schedule {
    /// The schedule as CSV. The name is not part of it.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for rank in 0..self.ranks() {
            for (cell, entry) in self.entries(rank).enumerate() {
                let _ = if cell == 0 { write!(text, "{entry}") } else { write!(text, ",{entry}") };
            }
            text.push('\n');
        }
        text
    }

    /// Reads a schedule from CSV, and calls it `name`. The result still has to be verified.
    ///
    /// # Errors
    /// [`Error::Text`] with line and column for a cell that is no action, a stage on two ranks or on none, and for a row that
    /// is shorter than others and lacks an action, as where a file was cut off; or an error of [`Schedule::new`].
    pub fn from_csv(name: impl Into<String>, text: &str) -> Result<Self> {
        let mut rows = Rows::default();
        let text = text.strip_suffix('\n').unwrap_or(text);
        for (index, line) in text.split('\n').enumerate() {
            rows.read(index + 1, line.strip_suffix('\r').unwrap_or(line))?;
        }
        rows.schedule(name.into())
    }
}

/// What has been read so far.
#[derive(Default)]
struct Rows {
    actions: Vec<Vec<Action>>,
    overlaps: Vec<Vec<usize>>,
    /// The number of cells of each row, and the column behind its last.
    lengths: Vec<(usize, usize)>,
    /// Where each stage was first met, and on which rank.
    stages: Vec<Option<(usize, Place)>>,
    microbatches: usize,
    backward: bool,
}

impl Rows {
    fn read(&mut self, line: usize, text: &str) -> Result<()> {
        let (mut actions, mut overlaps) = (Vec::new(), Vec::new());
        let mut column = 1;
        let mut cells = 0;
        for cell in text.split(',') {
            let place = Place { line, column };
            if !cell.is_empty() {
                let entry: Entry = cell.parse().map_err(|error| in_cell(place, error))?;
                if matches!(entry, Entry::Overlap(..)) {
                    overlaps.push(actions.len());
                }
                for action in entry.actions() {
                    self.note(place, action)?;
                    actions.push(action);
                }
            }
            cells += 1;
            column += cell.chars().count() + 1;
        }
        self.lengths.push((cells, column - 1));
        self.actions.push(actions);
        self.overlaps.push(overlaps);
        Ok(())
    }

    fn note(&mut self, place: Place, action: Action) -> Result<()> {
        let (stage, rank) = (action.stage(), place.line - 1);
        if stage >= self.stages.len() {
            self.stages.resize(stage + 1, None);
        }
        if let Some(entry) = self.stages.get_mut(stage) {
            match *entry {
                Some((other, _)) if other != rank => {
                    return Err(
                        place.refuse(format!("stage {stage} is on rank {rank} here, on rank {other} before"))
                    );
                }
                Some(_) => {}
                None => *entry = Some((rank, place)),
            }
        }
        self.microbatches = self.microbatches.max(action.microbatch().map_or(0, |microbatch| microbatch + 1));
        self.backward |= action.kind().of_backward();
        Ok(())
    }

    fn schedule(self, name: String) -> Result<Schedule> {
        let Some(Some((_, highest))) = self.stages.last() else {
            return Err(Place { line: 1, column: 1 }.refuse("there is no action"));
        };
        if self.microbatches == 0 {
            return Err(highest.refuse("there is no action of a micro-batch"));
        }
        let mut placement = Vec::with_capacity(self.stages.len());
        for (stage, entry) in self.stages.iter().enumerate() {
            let last = self.stages.len() - 1;
            let Some((rank, _)) = entry else {
                return Err(
                    highest.refuse(format!("there is a stage {last}, but no action of stage {stage}"))
                );
            };
            placement.push(*rank);
        }
        let schedule = Schedule::new(name, &placement, self.microbatches, self.backward, self.actions)?
            .with_overlaps(self.overlaps)?;
        // What else may be wrong is for the verification to say, but a row that was cut off is no schedule to begin with.
        let longest = self.lengths.iter().map(|&(cells, _)| cells).max().unwrap_or_default();
        if self.lengths.iter().any(|&(cells, _)| cells < longest)
            && let Err(Error::Missing { action, rank }) = schedule.verify_lists()
            && let Some(&(cells, column)) = self.lengths.get(rank)
            && cells < longest
        {
            let cells =
                if longest - cells == 1 { "1 cell".to_owned() } else { format!("{} cells", longest - cells) };
            let short = format!("the row ends {cells} before the longest, and {action} is missing");
            return Err(Place { line: rank + 1, column }.refuse(short));
        }
        Ok(schedule)
    }
}

/// The error of a cell, with its place in the whole text.
fn in_cell(place: Place, error: Error) -> Error {
    match error {
        Error::ActionText { text, column, reason } => {
            let at = Place { column: place.column + column - 1, ..place };
            at.refuse(format!("{text:?} is not an action: {reason}"))
        }
        other => place.refuse(other.to_string()),
    }
}
