//! ZB-H2: as ZB-H1 with about twice the forwards to warm up and twice the weight-gradients postponed. Where all parts of
//! the work take the same time there is no bubble at all, for twice the memory.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9 10 11 12          2 ranks, 4 micro-batches
//! rank 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3  .
//! rank 1 |  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
//! ```
//!
//! Bubble (p - 1)(F + I - 2W) for equal stages: "Zero Bubble Pipeline Parallelism", ICLR 2024.

use super::alternating::Alternating;
use super::{List, Shape, Writer};

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    let warm_up = 2 * (shape.p - 1 - rank);
    let alternating = Alternating { total: shape.m, warm_up, round: shape.m, chunks: 1, lag: Some(2 * rank) };
    alternating.write(writer)
}
