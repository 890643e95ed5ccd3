//! The parts of a picture of text.

use pyo3::prelude::*;
use torchrelay_core as core;

use super::action::Action;
use super::costs::Costs;
use super::value::Schedule;
use crate::errors::to_py;

/// A row of a picture in parts: what stands before it, and its cells with the actions that they show.
type TextRow = (String, Vec<(String, Option<Action>)>);

/// The parts of a picture of text, for who gives them colours: its rows; what to know about it; and how many cells there
/// are for a character, where they are letters, or 0.
#[pyfunction]
pub fn text_picture(
    py: Python<'_>,
    schedule: &Bound<'_, Schedule>,
    costs: Option<&Bound<'_, Costs>>,
    width: usize,
    per_character: usize,
) -> PyResult<(Vec<TextRow>, Vec<String>, usize)> {
    let (schedule, costs) = (schedule.get(), costs.map(|costs| &costs.get().0));
    let picture = py.detach(|| schedule.0.text_picture(costs, width, per_character)).map_err(to_py)?;
    let row = |row: core::TextRow| {
        let cells = row.cells.into_iter().map(|cell| (cell.text, cell.action.map(Action)));
        (row.head, cells.collect())
    };
    Ok((picture.rows.into_iter().map(row).collect(), picture.notes, picture.per_character))
}
