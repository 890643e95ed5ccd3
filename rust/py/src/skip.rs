//! Skip connections: `verify_skips`.

use pyo3::prelude::*;
use torchrelay_core::{SkipRole, SkipUse};

use crate::errors::to_py;

/// Skip, stashing module, popping module, source and target partition of each.
type Rows = Vec<(usize, String, String, usize, usize)>;

#[allow(clippy::needless_pass_by_value)] // Python's lists arrive as new ones
/// Where each skip goes. A use is (skip, whether it pops, layer, order, path).
#[pyfunction]
pub fn verify_skips(
    py: Python<'_>,
    names: Vec<String>,
    uses: Vec<(usize, bool, usize, usize, String)>,
    partitions: Vec<(usize, usize)>,
) -> PyResult<Rows> {
    let uses: Vec<_> = uses
        .into_iter()
        .map(|(skip, pops, layer, order, path)| {
            let role = if pops { SkipRole::Pop } else { SkipRole::Stash };
            SkipUse { skip, role, layer, order, path }
        })
        .collect();
    let skips = py.detach(|| torchrelay_core::verify_skips(&names, &uses, &partitions)).map_err(to_py)?;
    Ok(skips.into_iter().map(|s| (s.skip, s.stash, s.pop, s.source, s.target)).collect())
}
