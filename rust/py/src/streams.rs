//! Stream plans: `StreamOperation`, `StreamPlan` and their maker.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use torchrelay_core as core;
use torchrelay_core::{Host, Work};

use crate::errors::to_py;
use crate::schedule::{Action, Schedule};

/// What one host tells one stream.
#[pyclass(frozen, eq, hash, from_py_object, module = "torchrelay._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StreamOperation(core::Operation);

#[pymethods]
impl StreamOperation {
    /// The rank of the lane that issues it; None for the caller.
    #[getter]
    fn rank(&self) -> Option<u32> {
        match self.0.host {
            Host::Caller => None,
            Host::Lane(rank) => Some(rank),
        }
    }

    #[getter]
    fn action(&self) -> Option<Action> {
        self.0.action.map(Action::from)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.work {
            Work::Run { .. } => "run",
            Work::Copy { .. } => "copy",
            Work::Record { .. } => "record",
            Work::Wait { .. } => "wait",
            Work::Share { .. } => "share",
            Work::Release { .. } => "release",
            Work::Post(_) => "post",
            Work::Take(_) => "take",
        }
    }

    /// The stream that is told, of a copy the receiving end; None for the host.
    #[getter]
    fn stream(&self) -> Option<String> {
        match self.0.work {
            Work::Run { stream, .. } | Work::Copy { to: stream, .. } | Work::Wait { stream, .. } => stream,
            Work::Record { stream, .. } | Work::Share { stream, .. } => Some(stream),
            Work::Release { .. } | Work::Post(_) | Work::Take(_) => None,
        }
        .map(|stream| stream.to_string())
    }

    /// The sending end of a copy; None for the host.
    #[getter]
    fn source(&self) -> Option<String> {
        match self.0.work {
            Work::Copy { from, .. } => from.map(|stream| stream.to_string()),
            _ => None,
        }
    }

    #[getter]
    fn event(&self) -> Option<u32> {
        match self.0.work {
            Work::Record { event, .. } | Work::Wait { event, .. } => Some(event.0),
            _ => None,
        }
    }

    /// What is copied, shared or released.
    #[getter]
    fn buffer(&self) -> Option<String> {
        match self.0.work {
            Work::Copy { buffer, .. } | Work::Share { buffer, .. } | Work::Release { buffer } => {
                Some(buffer.to_string())
            }
            _ => None,
        }
    }

    /// What is posted or taken.
    #[getter]
    fn message(&self) -> Option<String> {
        match self.0.work {
            Work::Post(message) | Work::Take(message) => Some(message.to_string()),
            _ => None,
        }
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<StreamOperation: {}>", self.0)
    }
}

/// The operations of one step.
#[pyclass(frozen, eq, hash, module = "torchrelay._core")]
#[derive(PartialEq, Eq, Hash)]
pub struct StreamPlan(core::StreamPlan);

#[pymethods]
impl StreamPlan {
    #[new]
    fn new(operations: Vec<StreamOperation>) -> Self {
        Self(core::StreamPlan::new(operations.into_iter().map(|operation| operation.0).collect()))
    }

    /// The operations, in an order in which hosts may issue them.
    #[getter]
    fn operations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.operations().iter().cloned().map(StreamOperation))
    }

    /// The index of the device of each stream.
    #[getter]
    fn streams<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let devices = PyDict::new(py);
        for stream in self.0.streams() {
            devices.set_item(stream.to_string(), stream.device())?;
        }
        Ok(devices)
    }

    /// Raises `StreamError` unless everything that has to be ordered is.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.verify()).map_err(to_py)
    }

    fn __len__(&self) -> usize {
        self.0.operations().len()
    }

    fn __str__(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_string())
    }

    fn __repr__(&self) -> String {
        format!("<StreamPlan: {} operations on {} streams>", self.__len__(), self.0.streams().len())
    }
}

/// What carries a schedule out on the devices of its stages, with skips from stage to stage.
#[pyfunction]
#[pyo3(signature = (schedule, devices, skips = vec![]))]
#[allow(clippy::needless_pass_by_value)] // Python's lists arrive as new ones
pub fn plan_streams(
    py: Python<'_>,
    schedule: &Bound<'_, Schedule>,
    devices: Vec<Option<u32>>,
    skips: Vec<(u32, u32)>,
) -> PyResult<StreamPlan> {
    let schedule = schedule.get().core();
    py.detach(|| core::plan_streams(schedule, &devices, &skips)).map(StreamPlan).map_err(to_py)
}
