//! 1f1b: as soon as there is a backward to do, one forward and one backward in turn, so that rank `r` never holds the
//! activations of more than `p - r` micro-batches, whatever their number. Its bubble is that of GPipe.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9 10 11          3 ranks, 4 micro-batches
//! rank 0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3
//! rank 1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3  .
//! rank 2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
//! ```

use super::alternating::Alternating;
use super::{List, Shape, Writer};

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    let alternating =
        Alternating { total: shape.m, warm_up: shape.p - 1 - rank, round: shape.m, chunks: 1, lag: None };
    alternating.write(writer)
}
