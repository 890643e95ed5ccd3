//! How large a plan may be. Without a limit a typing error would end in an exhausted memory instead of an error.

use crate::error::{Error, Result};

/// The most pairs of micro-batch and partition (or stage) that a plan may have: 4096 times 4096.
pub const MAX_CELLS: usize = 1 << 24;

/// The number of pairs of two positive counts.
pub(crate) fn cells(rows: (&'static str, usize), columns: (&'static str, usize)) -> Result<usize> {
    for (what, value) in [rows, columns] {
        if value == 0 {
            return Err(Error::NotPositive { what, value: 0 });
        }
    }
    let product = rows.1.checked_mul(columns.1);
    product.filter(|&cells| cells <= MAX_CELLS).ok_or(Error::TooLarge {
        what: "the number of pairs of micro-batch and partition",
        value: rows.1 as u128 * columns.1 as u128, // two 64-bit factors always fit
        limit: MAX_CELLS,
    })
}
