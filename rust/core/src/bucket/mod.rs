//! Which gradients are reduced together.

mod assign;

pub use assign::{Buckets, assign_buckets};
