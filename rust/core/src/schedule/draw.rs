//! A schedule as a picture in plain text.
//!
//! A row per rank, a column per unit of time: a forward takes one, a backward one (or, where backwards are split, one for
//! each half). Where the picture is too wide, columns shrink to a letter, and then stand for several units of time; where
//! it is too high, rows in the middle are left out. The last lines say what was done.

use std::fmt::Write as _;

use super::action::Kind;
use super::simulate::Costs;
use super::{Schedule, Span};

/// More rows than this are cut in the middle.
const MAX_ROWS: usize = 32;
const IDLE: char = '.';

/// A row to be: what happens in each unit of time.
type Row = Vec<Option<Span>>;

impl Schedule {
    /// The picture, `width` columns wide at most (but never narrower than a readable row needs), without a newline at
    /// its end. A schedule that cannot be carried out is drawn by position instead of time, and a line at the end says so.
    pub fn draw(&self, width: usize) -> String {
        let (rows, in_time) = self.rows();
        let units = rows.iter().map(Vec::len).max().unwrap_or(0);
        let margin = format!("rank {} |", self.ranks() - 1).len();
        let room = width.saturating_sub(margin).max(16);
        let label = rows.iter().flatten().flatten().map(|span| self.label(span).len()).max().unwrap_or(1);

        let mut notes = vec![
            if in_time { "time runs to the right" } else { "NOT VALID: columns are positions" }.to_owned(),
        ];
        let units_per_column = units.div_ceil(room).max(1);
        let with_numbers = units * (label + 1) <= room;
        if !with_numbers && units_per_column == 1 {
            notes.push("too wide for numbers: a letter is one unit".to_owned());
        } else if !with_numbers {
            notes.push(format!("too wide for numbers: a letter is {units_per_column} units"));
        }
        let mut picture = String::new();
        let hidden = rows.len().checked_sub(MAX_ROWS).filter(|&hidden| hidden > 0);
        for (rank, row) in rows.iter().enumerate() {
            if let Some(hidden) = hidden {
                if rank == MAX_ROWS / 2 {
                    let _ = writeln!(picture, "{:>margin$} {hidden} ranks left out", "...");
                }
                if (MAX_ROWS / 2..MAX_ROWS / 2 + hidden).contains(&rank) {
                    continue;
                }
            }
            let mut line = format!("{:>margin$}", format!("rank {rank} |"));
            if with_numbers {
                for unit in 0..units {
                    let text = row.get(unit).and_then(|span| Some(self.label(span.as_ref()?)));
                    let _ = write!(line, " {:>label$}", text.unwrap_or_else(|| IDLE.to_string()));
                }
            } else {
                line.extend(columns(row, units, units_per_column));
            }
            let _ = writeln!(picture, "{line}");
        }
        let _ = write!(picture, "({})", notes.join(")\n("));
        picture
    }

    /// What each rank does in each unit of time, and whether it is time: a schedule that cannot be carried out has only
    /// positions.
    fn rows(&self) -> (Vec<Row>, bool) {
        let split = self.actions.iter().flatten().any(|action| action.kind() == Kind::WeightGrad);
        // Shares of one unit would not be columns, so every stage takes a whole one.
        let stages_held = self.stages().div_ceil(self.ranks());
        #[allow(clippy::cast_precision_loss)] // at most 2^16
        let unit = stages_held as f64;
        let costs = Costs::new(unit, unit, if split { unit } else { 0.0 });
        let positions = || {
            let span = |(position, &action)| {
                #[allow(clippy::cast_precision_loss)] // at most the length of a list
                let start = position as f64;
                Some(Span { action, start, end: start + 1.0 })
            };
            self.actions.iter().map(|actions| actions.iter().enumerate().map(span).collect()).collect()
        };
        match costs.and_then(|costs| self.simulate(&costs)) {
            Err(_) => (positions(), false),
            Ok(simulation) => {
                let rows = (0..self.ranks()).filter_map(|rank| Some(in_units(simulation.spans(rank)?)));
                (rows.collect(), true)
            }
        }
    }

    /// `F3`, or `1F3` where ranks hold several stages.
    fn label(&self, span: &Span) -> String {
        let text = span.action.to_string();
        if self.stages() == self.ranks() {
            text.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned()
        } else {
            text
        }
    }
}

/// Every unit of time with what is done in it.
fn in_units(spans: &[Span]) -> Row {
    let mut row = Row::new();
    for span in spans {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // counts of units
        let (start, end) = (span.start.round() as usize, span.end.round() as usize);
        row.resize(start.max(row.len()), None);
        row.resize(end.max(row.len()), Some(*span));
    }
    row
}

/// A letter per `units_per_column` units: what most of them are.
fn columns(row: &Row, units: usize, units_per_column: usize) -> impl Iterator<Item = char> {
    (0..units).step_by(units_per_column).map(move |start| {
        let letters = (start..units.min(start + units_per_column))
            .map(|unit| row.get(unit).and_then(|span| span.as_ref()?.action.kind().text().chars().next()));
        let mut counts: Vec<(char, usize)> = Vec::new();
        for letter in letters.map(|letter| letter.unwrap_or(IDLE)) {
            match counts.iter_mut().find(|(known, _)| *known == letter) {
                Some((_, count)) => *count += 1,
                None => counts.push((letter, 1)),
            }
        }
        // The earliest wins a tie.
        counts.iter().rev().max_by_key(|(_, count)| *count).map_or(IDLE, |(letter, _)| *letter)
    })
}
