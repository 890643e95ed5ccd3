//! V-Min: stages in a V, with the shortest building block that there is: about a third of the memory of 1f1b, for a bubble
//! that does not shrink where weights' gradients could fill it.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19          2 ranks with 2 stages each, 3 micro-batches
//! rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 3W1   . 0I1 0W1 3F2 3I2 3W2   . 0I2 0W2
//! rank 1 |   . 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 2F2 2W1 1W1   . 2I2 1I2 2W2 1W2
//! ```

use super::super::action::Action;
use super::{Shape, block};

/// All ranks' lists, or `only` one's.
pub(super) fn lists(shape: Shape, only: Option<usize>) -> Option<Vec<Vec<Action>>> {
    let blocks = block::blocks(shape.p, [1, 1, 1, 1]);
    // The first of the smallest.
    let least = blocks.iter().min_by_key(|block| block::peak(block))?;
    let limit = block::peak(least);
    block::squeezed(shape, least, limit, only).map(|(lists, _)| lists)
}
