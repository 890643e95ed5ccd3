//! The wavefront of GPipe.
//!
//! ```text
//!               clock    0       1       2       3         m = 3 micro-batches
//! partition 0          (0,0)   (1,0)   (2,0)               n = 2 partitions
//! partition 1                  (0,1)   (1,1)   (2,1)
//! ```
//!
//! 1. Every pair of micro-batch and partition is in exactly one clock.
//! 2. What a pair needs, (i - 1, j) and (i, j - 1), is in earlier clocks.
//! 3. There are m + n - 1 clocks, none wider than min(m, n), each ascending by partition.

use crate::error::Result;
use crate::limits;

/// The clocks of `m` micro-batches through `n` partitions: in clock `k`, partition `j` computes micro-batch `k - j`.
///
/// ```
/// let clocks = torchrelay_core::clock_cycles(3, 2)?;
/// assert_eq!(clocks, [vec![(0, 0)], vec![(1, 0), (0, 1)], vec![(2, 0), (1, 1)], vec![(2, 1)]]);
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::NotPositive`](crate::Error::NotPositive) if there is no micro-batch or no partition,
/// [`Error::TooLarge`](crate::Error::TooLarge) if there are more than [`MAX_CELLS`](crate::MAX_CELLS) pairs.
pub fn clock_cycles(m: usize, n: usize) -> Result<Vec<Vec<(usize, usize)>>> {
    limits::cells(("the number of micro-batches", m), ("the number of partitions", n))?;
    Ok((0..m + n - 1)
        .map(|k| ((1 + k).saturating_sub(m)..n.min(k + 1)).map(|j| (k - j, j)).collect())
        .collect())
}
