//! Pieces of a bucket: gradients that are taken into it together, before the bucket is complete.
//!
//! A large gradient is taken by itself as soon as it is there: it is still in the cache, and its own memory can be used
//! again at once. Small ones are taken together, since each call costs more than it moves.
//!
//! ```text
//! gradients, in order of arrival    large  small  small  LARGE  small  small          (together: three small ones)
//! pieces                            [0]    [1     2             4]    [5]  and [3]
//! ```
//!
//! 1. Every member is in exactly one piece; within a piece they are in the order given.
//! 2. A member of `alone` bytes or more is a piece of its own.
//! 3. The other pieces are closed by the member with which they reach `together` bytes, or by the end.
//! 4. Pieces are in the order in which their last members come.

use crate::error::{Error, Result};

/// Divides a bucket's members, whose sizes in bytes are given in the order in which they arrive; see the module's text.
/// Returns positions in `sizes`.
///
/// # Errors
/// [`Error::NegativeSize`] for a negative size.
pub fn pieces(sizes: &[i64], alone: i64, together: i64) -> Result<Vec<Vec<usize>>> {
    let mut pieces = Vec::new();
    let mut open = Vec::new();
    let mut bytes = 0i64;
    for (position, &size) in sizes.iter().enumerate() {
        if size < 0 {
            return Err(Error::NegativeSize { position, value: size });
        }
        if size >= alone {
            pieces.push(vec![position]);
            continue;
        }
        open.push(position);
        bytes = bytes.saturating_add(size);
        if bytes >= together {
            pieces.push(std::mem::take(&mut open));
            bytes = 0;
        }
    }
    if !open.is_empty() {
        pieces.push(open);
        // 4: a large member may have come after the last small one.
        pieces.sort_by_key(|piece| piece.last().copied());
    }
    Ok(pieces)
}
