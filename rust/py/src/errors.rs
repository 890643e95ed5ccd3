//! The one way from the core's errors to Python's.

use pyo3::PyErr;
use torchrelay_core::Error;

pyo3::import_exception!(torchrelay.errors, PlanError);

/// The Python exception for an error of the core.
#[allow(clippy::needless_pass_by_value)] // so that it fits `map_err`
pub fn to_py(error: Error) -> PyErr {
    PlanError::new_err(error.to_string())
}
