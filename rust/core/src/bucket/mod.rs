//! Which gradients are reduced together, and when.

mod arrival;
mod assign;
mod overlap;
mod pieces;
mod readiness;

pub use arrival::{agreed_order, buckets_by_arrival, verify_buckets};
pub use assign::{Buckets, assign_buckets};
pub use overlap::reduction_end;
pub use pieces::pieces;
pub use readiness::{Marked, Phase, Readiness};
