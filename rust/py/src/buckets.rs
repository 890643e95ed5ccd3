//! Buckets: `assign_buckets`.

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
