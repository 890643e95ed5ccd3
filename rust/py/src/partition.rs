//! Partitions: `verify_partition`.

use pyo3::prelude::*;
use torchrelay_core::Member;

use crate::convert::integers;
use crate::errors::to_py;

#[allow(clippy::needless_pass_by_value)] // Python's lists arrive as new ones
/// The first layer and one past the last of each partition.
#[pyfunction]
pub fn verify_partition(
    py: Python<'_>,
    layers: Vec<String>,
    balance: Option<&Bound<'_, PyAny>>,
    devices: Vec<String>,
    modules: Vec<(u64, usize, String)>,
    parameters: Vec<(u64, usize, String)>,
) -> PyResult<Vec<(usize, usize)>> {
    let balance = balance.map(|balance| integers("the balance", balance)).transpose()?;
    let (modules, parameters) = (members(modules), members(parameters));
    let verify =
        || torchrelay_core::verify_partition(&layers, balance.as_deref(), &devices, &modules, &parameters);
    py.detach(verify).map_err(to_py)
}

fn members(rows: Vec<(u64, usize, String)>) -> Vec<Member> {
    rows.into_iter().map(|(identity, layer, path)| Member { identity, layer, path }).collect()
}
