//! What a rank does: `Action`.

use pyo3::prelude::*;
use torchrelay_core as core;

use crate::convert::count;
use crate::errors::to_py;

/// One thing that a rank does.
#[pyclass(frozen, eq, hash, from_py_object, module = "torchrelay._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action(pub(super) core::Action);

impl From<core::Action> for Action {
    fn from(action: core::Action) -> Self {
        Self(action)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // methods of a Python object take it by reference
#[pymethods]
impl Action {
    #[new]
    #[pyo3(signature = (kind, stage, microbatch=None))]
    fn new(kind: &str, stage: &Bound<'_, PyAny>, microbatch: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let stage = count("the stage", stage)?;
        let microbatch = microbatch.map(|object| count("the micro-batch", object)).transpose()?;
        let action = kind.parse().and_then(|kind| core::Action::new(kind, stage, microbatch));
        action.map(Self).map_err(to_py)
    }

    /// The action that is written like this.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        text.parse().map(Self).map_err(to_py)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind().text()
    }

    #[getter]
    fn stage(&self) -> usize {
        self.0.stage()
    }

    #[getter]
    fn microbatch(&self) -> Option<usize> {
        self.0.microbatch()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let microbatch = self.0.microbatch().map_or_else(String::new, |microbatch| format!(", {microbatch}"));
        format!("Action('{}', {}{microbatch})", self.kind(), self.stage())
    }

    fn __getnewargs__(&self) -> (&'static str, usize, Option<usize>) {
        (self.kind(), self.stage(), self.microbatch())
    }
}

/// What stands in a rank's list: an action, or a tuple of two that overlap.
#[derive(FromPyObject, IntoPyObject)]
pub enum Entry {
    Single(Action),
    Overlap(Action, Action),
}

impl From<core::Entry> for Entry {
    fn from(entry: core::Entry) -> Self {
        match entry {
            core::Entry::Single(action) => Self::Single(action.into()),
            core::Entry::Overlap(first, second) => Self::Overlap(first.into(), second.into()),
        }
    }
}
