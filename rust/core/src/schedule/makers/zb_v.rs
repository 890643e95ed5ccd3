//! ZB-V: two stages on each rank, placed in a V, so that rank `r` holds stages `r` and `2p - 1 - r`. A micro-batch begins
//! and ends on rank 0, and memory is that of 1f1b. Without any bubble where all parts of the work take the same time; for
//! other costs there is the search.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9  10  11  12  13          2 ranks with 2 stages each, 2 micro-batches
//! rank 0 | 0F0 0F1   . 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0   . 0I1 0W1
//! rank 1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1   .
//! ```
//!
//! From "Zero Bubble Pipeline Parallelism", ICLR 2024. Fewer micro-batches than the pattern needs (2p - 1) are those that
//! are left of it when the others are taken out.

use super::super::action::Kind;
use super::{List, Shape, Writer};

pub(super) fn list(shape: Shape, rank: usize, mut writer: Writer) -> List {
    use Kind::{Forward, InputGrad, WeightGrad};
    let Shape { p, m, .. } = shape;
    let full = m.max(2 * p - 1);
    let both = |writer: &mut Writer, chunk| {
        writer.next(InputGrad, chunk);
        writer.next(WeightGrad, chunk);
    };
    for _ in 0..2 * (p - rank) - 1 {
        writer.next(Forward, 0);
    }
    for _ in 0..rank {
        writer.next(Forward, 1);
        writer.next(Forward, 0);
    }
    for _ in 0..p - rank {
        writer.next(Forward, 1);
        both(&mut writer, 1);
    }
    while writer.forwards(1) < writer.forwards(0) || writer.forwards(0) < full {
        if writer.forwards(0) < full {
            writer.next(Forward, 0);
        }
        both(&mut writer, 0);
        writer.next(Forward, 1);
        both(&mut writer, 1);
    }
    for _ in 0..rank {
        writer.next(InputGrad, 0);
        writer.next(InputGrad, 1);
    }
    for _ in 0..p - rank {
        both(&mut writer, 0);
    }
    for chunk in [1, 0] {
        for _ in 0..writer.postponed(chunk) {
            writer.next(WeightGrad, chunk);
        }
    }
    let mut list = writer.done();
    list.actions.retain(|action| action.microbatch().is_some_and(|microbatch| microbatch < m));
    list
}
