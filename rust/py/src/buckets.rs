//! Buckets: `assign_buckets`, `buckets_by_arrival`, `agreed_order`, `verify_buckets`, `reduction_end`, `pieces`.

use pyo3::prelude::*;

use crate::convert::{bools, integers};
use crate::errors::to_py;

/// Assigns tensors of these sizes in bytes to buckets.
#[pyfunction]
#[pyo3(signature = (sizes, keys, limits, *, sparse=None, indices=None))]
pub fn assign_buckets(
    sizes: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyAny>,
    limits: &Bound<'_, PyAny>,
    sparse: Option<&Bound<'_, PyAny>>,
    indices: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Vec<Vec<usize>>, Vec<i64>)> {
    let py = sizes.py();
    let sizes = integers("the size of the tensor", sizes)?;
    let keys = integers("the key of the tensor", keys)?;
    let limits = integers("the bucket size limit", limits)?;
    let sparse = sparse.map(|sparse| bools("the expected sparse gradient", sparse)).transpose()?;
    let indices = indices.map(|indices| integers("the tensor index", indices)).transpose()?;
    let assign =
        || torchrelay_core::assign_buckets(&sizes, &keys, &limits, sparse.as_deref(), indices.as_deref());
    let buckets = py.detach(assign).map_err(to_py)?;
    Ok((buckets.indices, buckets.limits))
}

/// Buckets for gradients that arrive in this order.
#[pyfunction]
#[pyo3(signature = (sizes, keys, limits, arrival, *, sparse=None))]
pub fn buckets_by_arrival(
    sizes: &Bound<'_, PyAny>,
    keys: &Bound<'_, PyAny>,
    limits: &Bound<'_, PyAny>,
    arrival: &Bound<'_, PyAny>,
    sparse: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Vec<Vec<usize>>, Vec<i64>)> {
    let py = sizes.py();
    let sizes = integers("the size of the tensor", sizes)?;
    let keys = integers("the key of the tensor", keys)?;
    let limits = integers("the bucket size limit", limits)?;
    let arrival = integers("the index of the tensor that arrives", arrival)?;
    let sparse = sparse.map(|sparse| bools("the expected sparse gradient", sparse)).transpose()?;
    let plan = || torchrelay_core::buckets_by_arrival(&sizes, &keys, &limits, sparse.as_deref(), &arrival);
    let buckets = py.detach(plan).map_err(to_py)?;
    Ok((buckets.indices, buckets.limits))
}

/// The order of arrival on which ranks agree, from the latest position of each parameter on any rank.
#[pyfunction]
pub fn agreed_order(latest: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let py = latest.py();
    let latest = integers("the latest place of the parameter", latest)?;
    Ok(py.detach(|| torchrelay_core::agreed_order(&latest)))
}

/// Returns if these buckets can be carried out.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
pub fn verify_buckets(
    keys: &Bound<'_, PyAny>,
    sparse: &Bound<'_, PyAny>,
    buckets: Vec<Vec<usize>>,
) -> PyResult<()> {
    let keys = integers("the key of the parameter", keys)?;
    let sparse = bools("the expected sparse gradient", sparse)?;
    torchrelay_core::verify_buckets(&keys, &sparse, &buckets).map_err(to_py)
}

/// When the last of these buckets is through.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
pub fn reduction_end(
    sizes: &Bound<'_, PyAny>,
    ready: Vec<f64>,
    latency: f64,
    per_byte: f64,
) -> PyResult<f64> {
    let sizes = integers("the size of the bucket", sizes)?;
    torchrelay_core::reduction_end(&sizes, &ready, latency, per_byte).map_err(to_py)
}

/// Divides the members of a bucket into those that are taken into it together.
#[pyfunction]
#[pyo3(signature = (sizes, *, large, together))]
pub fn pieces(sizes: &Bound<'_, PyAny>, large: i64, together: i64) -> PyResult<Vec<Vec<usize>>> {
    let sizes = integers("the size of the gradient", sizes)?;
    torchrelay_core::pieces(&sizes, large, together).map_err(to_py)
}
