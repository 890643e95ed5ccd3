//! The wavefront of GPipe.

use crate::error::{Error, Result};

/// The clocks of `m` micro-batches through `n` partitions: in clock `k`, partition `j` computes micro-batch `k - j`.
///
/// # Errors
/// [`Error::NotPositive`] if there is no micro-batch or no partition.
pub fn clock_cycles(m: usize, n: usize) -> Result<Vec<Vec<(usize, usize)>>> {
    for (what, value) in [("the number of micro-batches", m), ("the number of partitions", n)] {
        if value == 0 {
            return Err(Error::NotPositive { what, value: 0 });
        }
    }
    Ok((0..m + n - 1).map(|k| ((1 + k).saturating_sub(m)..n.min(k + 1)).map(|j| (k - j, j)).collect()).collect())
}
