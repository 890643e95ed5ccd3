//! DualPipe-V: stages in a V as in ZB-V, at least two micro-batches for each rank. In the steady state a forward of one
//! stage and a backward of the other are computed together, so that the transfers of one hide behind the other.
//!
//! ```text
//! time       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16          1 rank with 2 stages each, 3 micro-batches
//! rank 0 | 0F0 1F0 0F1 1B0 1B0 1F1 0B0 0B0 0F2 1B1 1B1 1F2 0B1 0B1 1B2 1B2 0I2 0W2
//! ```
//!
//! Eight phases: F0 alone; F0 and F1; I1, W1 and F1; the steady state, F0 with B1 and F1 with B0; B1, then F1 with B0; B1
//! and B0, of which the second half is split; W and B0; the weight-gradients that are left.
//!
//! From the schedule that was published with "DeepSeek-V3 Technical Report" (2024).

use std::collections::VecDeque;

use super::super::action::Kind;
use super::{List, Maker, Shape, Writer};
use crate::error::{Error, Result};

/// There must be a micro-batch for every stage.
pub(super) fn check(shape: Shape) -> Result<()> {
    let least = 2 * shape.p;
    if shape.m >= least {
        return Ok(());
    }
    Err(Error::NotPermitted {
        maker: Maker::DualpipeV,
        rule: format!("at least as many micro-batches as stages ({least})"),
        what: "micro-batches",
        given: shape.m,
        nearest: vec![least],
    })
}

pub(super) fn list(shape: Shape, rank: usize, writer: Writer) -> List {
    use Kind::Forward;
    let Shape { p, m, .. } = shape;
    let mut phases = Phases { writer, postponed: VecDeque::new() };
    let (before, behind) = (p - 1 - rank, rank + 1);
    for _ in 0..2 * before {
        phases.writer.next(Forward, 0);
    }
    for _ in 0..behind {
        phases.writer.next(Forward, 0);
        phases.writer.next(Forward, 1);
    }
    for _ in 0..before {
        phases.backward(1, true);
        phases.weight_grad();
        phases.writer.next(Forward, 1);
    }
    for step in 0..m - 2 * p + behind {
        // The last rank's first backward is of the micro-batch that it has just finished: nothing to overlap with.
        if step == 0 && rank + 1 == p {
            phases.writer.next(Forward, 0);
            phases.backward(1, false);
        } else {
            phases.writer.pair(0, 1);
        }
        phases.writer.pair(1, 0);
    }
    for _ in 0..before {
        phases.backward(1, false);
        phases.writer.pair(1, 0);
    }
    // Splitting starts half way, at the first or the second of a step's two backwards as the rank is odd or even.
    let mut split = false;
    for step in 0..behind {
        let half_way = step == behind / 2;
        split |= half_way && rank % 2 == 1;
        phases.backward(1, split);
        split |= half_way;
        phases.backward(0, split);
    }
    for _ in 0..before {
        phases.weight_grad();
        phases.backward(0, split);
    }
    for _ in 0..behind {
        phases.weight_grad();
    }
    phases.writer.done()
}

struct Phases {
    writer: Writer,
    /// The chunks of input-gradients without their weight-gradient, the earliest first.
    postponed: VecDeque<usize>,
}

impl Phases {
    fn backward(&mut self, chunk: usize, split: bool) {
        if split {
            self.writer.next(Kind::InputGrad, chunk);
            self.postponed.push_back(chunk);
        } else {
            self.writer.next(Kind::Backward, chunk);
        }
    }

    fn weight_grad(&mut self) {
        if let Some(chunk) = self.postponed.pop_front() {
            self.writer.next(Kind::WeightGrad, chunk);
        }
    }
}
