//! A schedule as a picture in plain text.
//!
//! A row per rank, and time runs to the right:
//!
//! 1. While there is room for it, a column is as long as the shortest action, and says which action is done.
//! 2. Else a column is a letter, the kind of most of what is done in that time: of the shortest action's length if that
//!    fits, and otherwise as many as there is room for.
//! 3. Where there are too many ranks, rows in the middle are left out. The last lines say what was done.

use std::fmt::Write as _;

use super::action::{Action, Kind};
use super::{Costs, Schedule};
use crate::error::{Error, Result};

/// More rows than this are cut in the middle.
const MAX_ROWS: usize = 32;
/// The columns that a picture has at least, however narrow it should be.
const MIN_COLUMNS: usize = 16;
/// And at most, however wide it might be.
const MAX_COLUMNS: usize = 100_000;
const IDLE: char = '.';

/// A picture whose parts are still apart, for those who give them colours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextPicture {
    /// A row per rank that is shown, the first rank's first; one that says how many are left out.
    pub rows: Vec<TextRow>,
    /// What to know about it, a line each.
    pub notes: Vec<String>,
    /// How many cells are meant for one character; 0 where a cell names its action, and is as wide as that.
    pub per_character: usize,
}

/// A row of a [`TextPicture`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextRow {
    /// What stands before it, as wide in every row.
    pub head: String,
    /// From left to right.
    pub cells: Vec<TextCell>,
}

/// A column of a [`TextRow`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextCell {
    /// What is printed.
    pub text: String,
    /// What is done; `None` if nothing. Of several actions, the first of those kinds that are done for longest.
    pub action: Option<Action>,
}

impl TextCell {
    fn idle(text: impl Into<String>) -> Self {
        Self { text: text.into(), action: None }
    }
}

/// An action, and from when to when.
struct Bar {
    action: Action,
    start: f64,
    end: f64,
}

type Row = Vec<Bar>;

impl Schedule {
    /// The picture, without a newline at its end, `width` characters wide at most (unless that leaves less than a few
    /// columns). Every action takes one unit of time, but a whole backward two where others are split. A schedule that
    /// cannot be carried out is drawn by position instead of time, and a line at the end says so.
    pub fn draw(&self, width: usize) -> String {
        let (rows, is_time) = self.rows(&self.usual()).unwrap_or_else(|_| (self.positions(), false));
        self.composed(&rows, is_time, width, 1).to_string()
    }

    /// The same for given costs (by default those of [`Schedule::draw`]) and still in parts. Where cells are letters, there
    /// are `per_character` times as many as there is room for.
    ///
    /// # Errors
    /// Those of [`Costs::check`].
    pub fn text_picture(
        &self,
        costs: Option<&Costs>,
        width: usize,
        per_character: usize,
    ) -> Result<TextPicture> {
        let (rows, is_time) = match costs {
            Some(costs) => self.rows(costs)?,
            None => self.rows(&self.usual())?,
        };
        Ok(self.composed(&rows, is_time, width, per_character.max(1)))
    }

    fn usual(&self) -> Costs {
        let split = self.actions.iter().flatten().any(|action| action.kind() == Kind::WeightGrad);
        Costs { backward: Some(if split { 2.0 } else { 1.0 }.into()), ..Costs::default() }
    }

    /// What each rank does when, and whether that is time: a schedule that cannot be carried out has only positions.
    fn rows(&self, costs: &Costs) -> Result<(Vec<Row>, bool)> {
        let simulation = match self.simulate(costs) {
            Ok(simulation) => simulation,
            Err(
                error @ (Error::BadCost { .. }
                | Error::BadMemory { .. }
                | Error::CostsDiffer { .. }
                | Error::CostsOverflow),
            ) => {
                return Err(error);
            }
            Err(_) => return Ok((self.positions(), false)),
        };
        let row = |rank| {
            let bar = |span: &super::Span| Bar { action: span.action, start: span.start, end: span.end };
            let mut row: Row = simulation.spans(rank).unwrap_or_default().iter().map(bar).collect();
            // Two that overlap are drawn one after the other, in the time of both.
            for &position in self.overlaps(rank) {
                if let Some([first, second]) = row.get_mut(position..position + 2) {
                    let (one, other) = (alone(costs, first.action), alone(costs, second.action));
                    let share = if one + other > 0.0 { one / (one + other) } else { 0.5 };
                    first.end = first.start + share * (first.end - first.start);
                    second.start = first.end;
                }
            }
            row.retain(|bar| bar.end > bar.start);
            row
        };
        Ok(((0..simulation.ranks()).map(row).collect(), true))
    }

    /// The order alone.
    #[allow(clippy::cast_precision_loss)] // far fewer than 2^53
    fn positions(&self) -> Vec<Row> {
        let bar =
            |(place, &action): (usize, &Action)| Bar { action, start: place as f64, end: place as f64 + 1.0 };
        self.actions.iter().map(|actions| actions.iter().enumerate().map(bar).collect()).collect()
    }

    fn composed(&self, rows: &[Row], is_time: bool, width: usize, per_character: usize) -> TextPicture {
        let end = rows.iter().filter_map(|row| row.last()).fold(0.0, |latest, bar| bar.end.max(latest));
        let margin = format!("rank {} |", self.ranks() - 1).len();
        let room = width.saturating_sub(margin).clamp(MIN_COLUMNS, MAX_COLUMNS);
        let (top, bottom) = if rows.len() > MAX_ROWS {
            (MAX_ROWS / 2, rows.len() - MAX_ROWS / 2)
        } else {
            (rows.len(), rows.len())
        };
        let shown = || rows.iter().enumerate().filter(|(rank, _)| *rank < top || *rank >= bottom);
        let shortest = shown().flat_map(|(_, row)| row).map(|bar| bar.end - bar.start).fold(end, f64::min);
        // Beyond what fits it does not matter how many.
        let units = if end > 0.0 { columns(end / shortest) } else { 0 };

        // Labels matter only where there is room for the shortest of them.
        let labels = if units * 2 <= room { shown().flat_map(|(_, row)| row).collect() } else { Vec::new() };
        let longest = labels.iter().map(|bar| self.label(bar.action).len()).max();
        let numbered = longest.filter(|longest| units * (longest + 1) <= room);
        let count = if units <= room * per_character { units } else { room * per_character };
        let scale = if count == units { shortest } else { end / as_float(count) };
        let per_character = if numbered.is_some() { 0 } else { count.div_ceil(room).max(1) };

        let mut drawn = Vec::new();
        for (rank, row) in shown() {
            if rank == bottom {
                drawn.push(TextRow {
                    head: format!("{:>margin$}", "..."),
                    cells: vec![TextCell::idle(format!(" {} ranks left out", bottom - top))],
                });
            }
            drawn.push(TextRow {
                head: format!("{:>margin$}", format!("rank {rank} |")),
                cells: match numbered {
                    Some(longest) => self.with_numbers(row, units, shortest, longest),
                    None => letters(row, count, scale, end),
                },
            });
        }
        let mut notes = vec![
            if is_time { "(time runs to the right)" } else { "(NOT VALID: columns are positions)" }
                .to_owned(),
        ];
        if count > 0 && numbered.is_none() {
            notes.push(match number(scale * as_float(per_character)).as_str() {
                "1" => "(too wide for numbers: a letter is one unit)".to_owned(),
                each => format!("(too wide for numbers: a letter is {each} units)"),
            });
        }
        TextPicture { rows: drawn, notes, per_character }
    }

    /// `F3`, or `1F3` where ranks hold several stages.
    fn label(&self, action: Action) -> String {
        let text = action.to_string();
        if self.stages() == self.ranks() {
            text.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned()
        } else {
            text
        }
    }

    /// A column per unit, each with its action's label.
    fn with_numbers(&self, row: &Row, count: usize, unit: f64, width: usize) -> Vec<TextCell> {
        let mut cells = vec![TextCell::idle(format!(" {IDLE:>width$}")); count];
        for bar in row {
            // At least one, since no action is shorter than a unit.
            let (from, to) = (columns_until(bar.start / unit), columns_until(bar.end / unit));
            let text = format!(" {:>width$}", self.label(bar.action));
            for cell in cells.iter_mut().take(to).skip(from) {
                *cell = TextCell { text: text.clone(), action: Some(bar.action) };
            }
        }
        cells
    }
}

impl std::fmt::Display for TextPicture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for row in &self.rows {
            f.write_str(&row.head)?;
            row.cells.iter().try_for_each(|cell| f.write_str(&cell.text))?;
            f.write_char('\n')?;
        }
        f.write_str(&self.notes.join("\n"))
    }
}

/// What an action takes by itself, of the kinds that may overlap.
fn alone(costs: &Costs, action: Action) -> f64 {
    match action.kind() {
        Kind::Backward => costs.backward_of(action.stage()),
        Kind::InputGrad => costs.input_grad.of(action.stage()),
        _ => costs.forward.of(action.stage()),
    }
}

/// Columns of length one that hold so much; a little more is a sum that is not exact.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is not negative
fn columns(length: f64) -> usize {
    (length - 1e-6).ceil().min(1e9) as usize
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is not negative
fn columns_until(place: f64) -> usize {
    place.round() as usize
}

#[allow(clippy::cast_precision_loss)] // far fewer than 2^53
fn as_float(count: usize) -> f64 {
    count as f64
}

/// Three digits, without zeros at the end.
fn number(value: f64) -> String {
    if !(1e-3..1e6).contains(&value) {
        return format!("{value:.2e}");
    }
    let decimals = if value < 1.0 { 4 } else { usize::from(value < 100.0) };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A letter per `scale` of time: what most of it is, the earliest if there is as much of others.
fn letters(row: &Row, count: usize, scale: f64, end: f64) -> Vec<TextCell> {
    // The first action of each kind in each column, and how long the kind lasts in it.
    let mut found: Vec<Vec<(Action, f64)>> = vec![Vec::new(); count];
    for bar in row {
        // A sum that is not exact must not reach into the next column.
        let first = columns_until((bar.start / scale + 1e-6).floor());
        for (index, kinds) in found.iter_mut().enumerate().skip(first) {
            let (left, right) = (as_float(index) * scale, as_float(index + 1) * scale);
            if left + 1e-6 * scale >= bar.end {
                break;
            }
            let within = bar.end.min(right) - bar.start.max(left);
            match kinds.iter_mut().find(|(action, _)| action.kind() == bar.action.kind()) {
                Some((_, length)) => *length += within,
                None => kinds.push((bar.action, within)),
            }
        }
    }
    let most = |(index, kinds): (usize, Vec<(Action, f64)>)| {
        let busy: f64 = kinds.iter().map(|(_, length)| length).sum();
        let idle = (end - as_float(index) * scale).min(scale) - busy;
        // The last of the largest is taken, hence in reverse.
        let best = kinds.into_iter().rev().max_by(|a, b| a.1.total_cmp(&b.1));
        match best.filter(|(_, length)| *length + 1e-9 * scale >= idle) {
            Some((action, _)) => {
                let letter = action.kind().text().chars().next().unwrap_or(IDLE);
                TextCell { text: letter.into(), action: Some(action) }
            }
            None => TextCell::idle(IDLE),
        }
    };
    found.into_iter().enumerate().map(most).collect()
}
