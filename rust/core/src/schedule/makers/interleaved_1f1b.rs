//! Interleaved 1f1b: as 1f1b, with `v` stages on each rank, stage `s` on rank `s % p`. Micro-batches go in rounds, each
//! through all stages of a rank before the next round. The bubble shrinks by `v`, for `v` times as many transfers.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9          2 ranks with 2 stages each, 2 micro-batches
//! rank 0 | 0F0 0F1 2F0 2F1   . 2B0   . 2B1 0B0 0B1
//! rank 1 |   . 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1   .
//! ```

use super::alternating::Alternating;
use super::{List, Maker, Shape, Writer};
use crate::error::{Error, Result};
use crate::limits::MAX_CELLS;

/// Micro-batches in a round: as many as there are ranks, or somewhat more where that does not divide them.
pub(super) const fn round(shape: Shape) -> usize {
    shape.m / rounds(shape.m, shape.p)
}

const fn rounds(m: usize, p: usize) -> usize {
    if m < p { 1 } else { m / p }
}

/// Rounds must be equal.
pub(super) fn check(maker: Maker, shape: Shape) -> Result<()> {
    let Shape { p, m: given, .. } = shape;
    let permitted = |&m: &usize| m.is_multiple_of(rounds(m, p));
    if permitted(&given) {
        return Ok(());
    }
    let rounds = rounds(given, p);
    let nearest =
        [(1..given).rev().find(permitted), (given + 1..=MAX_CELLS).find(permitted)].into_iter().flatten();
    Err(Error::NotPermitted {
        maker,
        rule: format!("{rounds} equal rounds of micro-batches, each of at least as many as the {p} ranks"),
        what: "micro-batches",
        given,
        nearest: nearest.collect(),
    })
}

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    let round = round(shape);
    let warm_up = (shape.v - 1) * round + 2 * (shape.p - 1 - rank);
    let alternating = Alternating { total: shape.v * shape.m, warm_up, round, chunks: shape.v, lag: None };
    alternating.write(writer)
}
