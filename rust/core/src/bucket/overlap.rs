//! How much of the reduction is left when the backward is over.
//!
//! ```text
//! backward    |------- ready[0] ---- ready[1] --------- ready[2]
//! link                 [ bucket 0 ]  [    bucket 1     ][ 2 ]
//!                                                       |---| exposed
//! ```
//!
//! 1. A bucket is sent when it is ready and the one before it is through: one link, in plan order.
//! 2. Sending takes the latency, and a time in proportion to the bytes.

use crate::error::{Error, Result};

/// When the last bucket is through, in the unit of `ready` and of the costs: bucket `i` has `bytes[i]` and is complete
/// at `ready[i]`.
///
/// ```
/// let end = torchrelay_core::reduction_end(&[10, 40, 5], &[1.0, 2.0, 9.0], 1.0, 0.1)?;
/// assert!((end - 10.5).abs() < 1e-9); // the last one waits for nothing but its gradients
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::LengthsDiffer`] unless there are as many times as buckets; [`Error::NegativeSize`].
pub fn reduction_end(bytes: &[i64], ready: &[f64], latency: f64, per_byte: f64) -> Result<f64> {
    if ready.len() != bytes.len() {
        let (length, expected) = (ready.len(), bytes.len());
        return Err(Error::LengthsDiffer { what: "the list of times", length, expected });
    }
    let mut free = 0.0_f64;
    for (position, (&size, &ready)) in bytes.iter().zip(ready).enumerate() {
        if size < 0 {
            return Err(Error::NegativeSize { position, value: size });
        }
        #[allow(clippy::cast_precision_loss)] // an estimate
        let transfer = latency + size as f64 * per_byte;
        free = free.max(ready) + transfer;
    }
    Ok(free)
}
