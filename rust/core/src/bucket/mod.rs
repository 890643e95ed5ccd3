//! Which gradients are reduced together, and when.

mod assign;
mod readiness;

pub use assign::{Buckets, assign_buckets};
pub use readiness::{Phase, Readiness};
