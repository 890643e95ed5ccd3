//! Plans for data- and pipeline-parallel training, as plain values.
//!
//! Everything that will happen in a training step is decided here: which gradients travel in which bucket, which
//! partition computes which micro-batch when. The functions are pure: the same arguments give the same plan in every
//! process. Nothing here knows of Python, torch, clocks or I/O.

mod clock;
mod error;

pub use clock::clock_cycles;
pub use error::{Error, Result};
