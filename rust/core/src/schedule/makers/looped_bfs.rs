//! Looped BFS: all micro-batches through one stage of a rank before the next stage, and back the same way. The bubble is
//! that of interleaved 1f1b, the memory that of GPipe; but a stage's weights are needed for one stretch of time only.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9          2 ranks with 2 stages each, 2 micro-batches
//! rank 0 | 0F0 0F1 2F0 2F1   .   . 2B1 2B0 0B1 0B0
//! rank 1 |   . 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0   .
//! ```

use super::super::action::Kind;
use super::{List, Shape, Writer};

pub(super) fn list(shape: Shape, mut writer: Writer) -> List {
    let m = u32::try_from(shape.m).unwrap_or(u32::MAX); // fits, being within the limit
    for chunk in 0..shape.v {
        (0..m).for_each(|i| writer.of(Kind::Forward, chunk, i));
    }
    for chunk in (0..shape.v).rev() {
        (0..m).rev().for_each(|i| writer.of(Kind::Backward, chunk, i));
    }
    writer.done()
}
