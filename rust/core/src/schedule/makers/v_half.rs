//! V-Half: stages in a V, with a building block of about half the memory of 1f1b, `p / 2 + 1` micro-batches' activations.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18          2 ranks with 2 stages each, 3 micro-batches
//! rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2   .
//! rank 1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
//! ```

use super::super::action::Action;
use super::{Shape, block};

/// With more ranks, and no fewer micro-batches, the best block is that of fewer ranks in the same place of its period: to
/// squeeze all of them takes long, and makes no difference there.
const MANY: usize = 24;

/// All ranks' lists, or `only` one's.
pub(super) fn lists(shape: Shape, only: Option<usize>) -> Option<Vec<Vec<Action>>> {
    let Shape { p, m, .. } = shape;
    let offsets = [1, 2, 1, 2];
    let few = if p > MANY && m >= p { MANY - block::PERIOD + p % block::PERIOD } else { p };
    let best = best(Shape { p: few, ..shape }, offsets)?;
    let block = block::blocks(p, offsets).into_iter().nth(best)?;
    block::squeezed(shape, &block, limit(p), only).map(|(lists, _)| lists)
}

/// Which of the blocks has the least bubble, which few micro-batches show already.
fn best(shape: Shape, offsets: block::Offsets) -> Option<usize> {
    let few = Shape { m: shape.m.min(shape.p + 2), ..shape };
    let blocks = block::blocks(shape.p, offsets);
    let cost = |block: &_| block::squeezed(few, block, limit(shape.p), Some(0)).map(|(_, cost)| cost);
    let costs = blocks.iter().enumerate().filter_map(|(place, block)| Some((cost(block)?, place)));
    costs.min_by_key(|&(cost, _)| cost).map(|(_, place)| place)
}

fn limit(p: usize) -> usize {
    p + 2
}
