//! Interleaved zero-bubble: interleaved 1f1b with a shorter warm-up and split backwards, whose weight-gradients start `r`
//! backwards late on rank `r` and so fill what would be its bubble.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9  10  11  12          2 ranks with 2 stages each, 2 micro-batches
//! rank 0 | 0F0 0F1 2F0 2F1   . 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
//! rank 1 |   . 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
//! ```

use super::alternating::Alternating;
use super::{List, Shape, Writer, interleaved_1f1b};

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    let round = interleaved_1f1b::round(shape);
    let warm_up = (shape.v - 1) * round + shape.p - 1 - rank;
    let alternating =
        Alternating { total: shape.v * shape.m, warm_up, round, chunks: shape.v, lag: Some(rank) };
    alternating.write(writer)
}
