//! Balance: `balance`.

use pyo3::prelude::*;

use crate::convert::{count, numbers};
use crate::errors::to_py;

/// The number of layers of each of so many parts, for layers of these costs.
#[pyfunction]
pub fn balance(costs: &Bound<'_, PyAny>, parts: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let py = costs.py();
    let parts = count("the number of parts", parts)?;
    let costs = numbers("the cost of the layer", costs)?;
    py.detach(|| torchrelay_core::balance(&costs, parts)).map_err(to_py)
}
