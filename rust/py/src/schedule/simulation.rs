//! `Simulation`.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use torchrelay_core as core;

use super::action::Action;
use super::no_such;
use crate::convert::count;

/// A schedule in time.
#[pyclass(frozen, module = "torchrelay._core")]
pub struct Simulation(pub(super) core::Simulation);

/// A rank, what it does, and when that starts and ends.
type Step = (usize, Action, f64, f64);

/// When a rank has nothing to do, why, and the action that is to blame.
type Idle = (f64, f64, &'static str, Option<Action>);

#[pymethods]
impl Simulation {
    #[getter]
    fn makespan(&self) -> f64 {
        self.0.makespan()
    }

    #[getter]
    fn cost(&self) -> f64 {
        self.0.cost()
    }

    #[getter]
    fn bubble_rate(&self) -> f64 {
        self.0.bubble_rate()
    }

    #[getter]
    fn bubble(&self) -> Vec<f64> {
        self.0.bubble()
    }

    #[getter]
    fn peak_memory(&self) -> Vec<f64> {
        self.0.peak_memory().to_vec()
    }

    #[getter]
    fn critical_path(&self, py: Python<'_>) -> Vec<Step> {
        let path = py.detach(|| self.0.critical_path());
        path.into_iter().map(|(rank, span)| (rank, Action(span.action), span.start, span.end)).collect()
    }

    /// What a rank does, and when it starts and ends.
    fn spans<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let rank = count("the rank", rank)?;
        let spans = self.0.spans(rank).ok_or_else(|| self.no_such(rank))?;
        let tuples: PyResult<Vec<Bound<'py, PyTuple>>> =
            spans.iter().map(|span| (Action(span.action), span.start, span.end).into_pyobject(py)).collect();
        PyList::new(py, tuples?)
    }

    /// When a rank has nothing to do, and why.
    fn idle(&self, py: Python<'_>, rank: &Bound<'_, PyAny>) -> PyResult<Vec<Idle>> {
        let rank = count("the rank", rank)?;
        let idle = py.detach(|| self.0.idle(rank)).ok_or_else(|| self.no_such(rank))?;
        let tuple = |idle: core::Idle| {
            let (cause, action) = match idle.cause {
                core::Cause::Waits(action) => ("waits", Some(Action(action))),
                core::Cause::Transfer(action) => ("transfer", Some(Action(action))),
                core::Cause::Sends(action) => ("sends", Some(Action(action))),
                core::Cause::Done => ("done", None),
            };
            (idle.start, idle.end, cause, action)
        };
        Ok(idle.into_iter().map(tuple).collect())
    }

    /// What a rank holds from each time on.
    fn memory(&self, rank: &Bound<'_, PyAny>) -> PyResult<Vec<(f64, f64)>> {
        let rank = count("the rank", rank)?;
        self.0.memory(rank).map(<[_]>::to_vec).ok_or_else(|| self.no_such(rank))
    }

    fn __repr__(&self) -> String {
        format!("<Simulation: makespan {}, bubble rate {:.4}>", self.makespan(), self.bubble_rate())
    }
}

impl Simulation {
    fn no_such(&self, rank: usize) -> PyErr {
        no_such("rank", rank, self.0.ranks())
    }
}
