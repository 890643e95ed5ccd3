//! Schedules: `Action`, `Schedule`, `Costs`, `Simulation`, their makers, and the search.

mod action;
mod costs;
mod makers;
mod picture;
mod search;
mod simulation;
mod value;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

pub use action::Action;
pub use costs::Costs;
pub use makers::{make_gpipe, make_gpipe_rank, make_rank, make_schedule, schedule_names};
pub use picture::text_picture;
pub use search::{Found, search_schedule};
pub use simulation::Simulation;
pub use value::Schedule;

fn no_such(what: &str, given: usize, count: usize) -> PyErr {
    PyIndexError::new_err(format!("there is no {what} {given}, only {count}"))
}
