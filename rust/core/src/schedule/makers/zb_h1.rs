//! ZB-H1: 1f1b with split backwards. An input-gradient is done as early as a whole backward would be, and the later ranks
//! postpone `r` weight-gradients to the end, where they would have nothing to do. Memory as 1f1b's on its first rank.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9 10          3 ranks, 3 micro-batches
//! rank 0 | F0 F1 F2  .  . I0 W0 I1 W1 I2 W2
//! rank 1 |  . F0 F1  . I0 F2 I1 W0 I2 W1 W2
//! rank 2 |  .  . F0 I0 F1 I1 F2 I2 W0 W1 W2
//! ```
//!
//! Bubble (p - 1)(F + I - W) for equal stages: "Zero Bubble Pipeline Parallelism", ICLR 2024.

use super::alternating::Alternating;
use super::{List, Shape, Writer};

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    let warm_up = shape.p - 1 - rank;
    let alternating = Alternating { total: shape.m, warm_up, round: shape.m, chunks: 1, lag: Some(rank) };
    alternating.write(writer)
}
