//! A schedule as a picture in plain text.
//!
//! A row per rank, a column per unit of time: every action takes one, and a whole backward two where others are split.
//! Where the picture is too wide, a column shrinks to a letter, and then stands for several units of time; where it is
//! too high, rows in the middle are left out. The last lines say what was done.

use std::fmt::Write as _;

use super::action::{Action, Kind};
use super::{Costs, Schedule};

/// More rows than this are cut in the middle.
const MAX_ROWS: usize = 32;
/// The columns that a picture has at least, however narrow it should be.
const MIN_COLUMNS: usize = 16;
const IDLE: char = '.';

/// An action and the units of time that it takes.
struct Bar {
    action: Action,
    start: usize,
    end: usize,
}

type Row = Vec<Bar>;

impl Schedule {
    /// The picture, without a newline at its end, `width` characters wide at most (unless that leaves less than a few
    /// columns). A schedule that cannot be carried out is drawn by position instead of time, and a line at the end says so.
    pub fn draw(&self, width: usize) -> String {
        let (rows, in_time) = self.rows();
        let units = rows.iter().filter_map(|row| row.last()).map(|bar| bar.end).max().unwrap_or(0);
        let margin = format!("rank {} |", self.ranks() - 1).len();
        let room = width.saturating_sub(margin).max(MIN_COLUMNS);
        let (top, bottom) = if rows.len() > MAX_ROWS {
            (MAX_ROWS / 2, rows.len() - MAX_ROWS / 2)
        } else {
            (rows.len(), rows.len())
        };
        let shown = || rows.iter().enumerate().filter(|(rank, _)| *rank < top || *rank >= bottom);

        // Labels matter only where there is room for the shortest of them.
        let labels = if units * 2 <= room { shown().flat_map(|(_, row)| row).collect() } else { Vec::new() };
        let longest = labels.iter().map(|bar| self.label(bar.action).len()).max();
        let numbered = longest.filter(|longest| units * (longest + 1) <= room);
        let scale = units.div_ceil(room).max(1);

        let mut picture = String::new();
        for (rank, row) in shown() {
            if rank == bottom {
                let _ = writeln!(picture, "{:>margin$} {} ranks left out", "...", bottom - top);
            }
            let line = match numbered {
                Some(longest) => self.with_numbers(row, units, longest),
                None => letters(row, units, scale),
            };
            let _ = writeln!(picture, "{:>margin$}{line}", format!("rank {rank} |"));
        }
        picture += if in_time { "(time runs to the right)" } else { "(NOT VALID: columns are positions)" };
        match (numbered, scale) {
            _ if units == 0 => {}
            (Some(_), _) => {}
            (None, 1) => picture += "\n(too wide for numbers: a letter is one unit)",
            (None, scale) => {
                let _ = write!(picture, "\n(too wide for numbers: a letter is {scale} units)");
            }
        }
        picture
    }

    /// What each rank does when, and whether that is time: a schedule that cannot be carried out has only positions.
    fn rows(&self) -> (Vec<Row>, bool) {
        let split = self.actions.iter().flatten().any(|action| action.kind() == Kind::WeightGrad);
        let backward = if split { 2.0 } else { 1.0 };
        let by_position = |actions: &Vec<Action>| {
            let bar = |(start, &action)| Bar { action, start, end: start + 1 };
            actions.iter().enumerate().map(bar).collect()
        };
        match self.simulate(&Costs { backward: Some(backward.into()), ..Costs::default() }) {
            Err(_) => (self.actions.iter().map(by_position).collect(), false),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // sums of ones and twos
            Ok(simulation) => {
                let bar = |span: &super::Span| Bar {
                    action: span.action,
                    start: span.start as usize,
                    end: span.end as usize,
                };
                let row = |rank| {
                    let mut row: Row = simulation.spans(rank).unwrap_or_default().iter().map(bar).collect();
                    // Two that overlap are drawn one after the other, in the time of both.
                    for &position in self.overlaps(rank) {
                        let forward_ends = row.get(position).map_or(0, |bar| bar.start + 1);
                        row.iter_mut().skip(position).take(1).for_each(|bar| bar.end = forward_ends);
                        row.iter_mut().skip(position + 1).take(1).for_each(|bar| bar.start = forward_ends);
                    }
                    row
                };
                ((0..simulation.ranks()).map(row).collect(), true)
            }
        }
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
    fn with_numbers(&self, row: &Row, units: usize, width: usize) -> String {
        let mut columns = vec![IDLE.to_string(); units];
        for bar in row {
            columns
                .iter_mut()
                .take(bar.end)
                .skip(bar.start)
                .for_each(|column| *column = self.label(bar.action));
        }
        columns.iter().fold(String::new(), |mut line, column| {
            let _ = write!(line, " {column:>width$}");
            line
        })
    }
}

/// A letter per `scale` units: what most of them are, the earliest if there are as many of others.
fn letters(row: &Row, units: usize, scale: usize) -> String {
    let mut columns: Vec<Vec<(char, usize)>> = vec![Vec::new(); units.div_ceil(scale)];
    for bar in row {
        let letter = bar.action.kind().text().chars().next().unwrap_or(IDLE);
        for (index, counts) in
            columns.iter_mut().enumerate().take(bar.end.div_ceil(scale)).skip(bar.start / scale)
        {
            let units = bar.end.min((index + 1) * scale) - bar.start.max(index * scale);
            match counts.iter_mut().find(|(known, _)| *known == letter) {
                Some((_, count)) => *count += units,
                None => counts.push((letter, units)),
            }
        }
    }
    let most = |(index, counts): (usize, Vec<(char, usize)>)| {
        let busy: usize = counts.iter().map(|(_, count)| count).sum();
        let idle = scale.min(units - index * scale) - busy;
        // The last of the largest is taken, hence in reverse.
        let best = counts.into_iter().rev().max_by_key(|(_, count)| *count);
        best.filter(|(_, count)| *count >= idle).map_or(IDLE, |(letter, _)| letter)
    };
    columns.into_iter().enumerate().map(most).collect()
}
