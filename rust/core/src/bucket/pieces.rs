//! Pieces of a bucket: gradients that are taken into it together, before the bucket is complete.
//!
//! A large gradient is taken as soon as it is there: it is still in the cache, and its own memory can be used again at
//! once. Small ones are taken together, since each call costs more than it moves; but not later than the next large one.
//! They lie beside it on the heap, and as long as they do, a large gradient that comes after finds no room there: it
//! gets fresh memory, which the system has to provide page by page.
//!
//! ```text
//! gradients, in order of arrival    LARGE  small  small  LARGE  small  small  small  small      (together: three)
//! pieces                            [0]    [1     2      3]     [4     5      6]     [7]
//! ```
//!
//! 1. Pieces are runs: one after the other, they are the members in the order given.
//! 2. A piece is closed by a member of `large` bytes or more, by the one with which it reaches `together` bytes, or by
//!    the end.

use crate::error::{Error, Result};

/// Divides a bucket's members, whose sizes in bytes are given in the order in which they arrive; see the module's text.
/// Returns positions in `sizes`.
///
/// # Errors
/// [`Error::NegativeSize`] for a negative size.
pub fn pieces(sizes: &[i64], large: i64, together: i64) -> Result<Vec<Vec<usize>>> {
    let mut pieces = Vec::new();
    let mut open = Vec::new();
    let mut bytes = 0i64;
    for (position, &size) in sizes.iter().enumerate() {
        if size < 0 {
            return Err(Error::NegativeSize { position, value: size });
        }
        open.push(position);
        bytes = bytes.saturating_add(size);
        if size >= large || bytes >= together {
            pieces.push(std::mem::take(&mut open));
            bytes = 0;
        }
    }
    if !open.is_empty() {
        pieces.push(open);
    }
    Ok(pieces)
}
