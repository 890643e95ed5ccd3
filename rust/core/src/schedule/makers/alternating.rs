//! What 1f1b and its kin have in common: forwards to warm up, then a forward and a backward in turn, then the other backwards.

use super::super::action::Kind;
use super::writer::{List, Writer};

/// How a rank alternates.
pub(super) struct Alternating {
    /// Forwards, and backwards, in all: a micro-batch counts once for each stage.
    pub(super) total: usize,
    /// Forwards before the first pair of a forward and a backward; more than `total` means all.
    pub(super) warm_up: usize,
    /// How many in a row are of one stage before the next stage's turn, forward in ascending and backward in descending
    /// order of stages.
    pub(super) round: usize,
    /// How many stages take turns.
    pub(super) chunks: usize,
    /// `None` for whole backwards; else they are split, and weight-gradients start that many backwards late.
    pub(super) lag: Option<usize>,
}

impl Alternating {
    pub(super) fn write(&self, mut writer: Writer) -> List {
        let warm_up = self.warm_up.min(self.total);
        let chunk = |step: usize| step / self.round % self.chunks;
        let forward = |writer: &mut Writer, step| writer.next(Kind::Forward, chunk(step));
        let of_backward = |step| self.chunks - 1 - chunk(step);
        (0..warm_up).for_each(|step| forward(&mut writer, step));
        for step in 0..self.total {
            if warm_up + step < self.total {
                forward(&mut writer, warm_up + step);
            }
            let Some(lag) = self.lag else {
                writer.next(Kind::Backward, of_backward(step));
                continue;
            };
            writer.next(Kind::InputGrad, of_backward(step));
            if let Some(due) = step.checked_sub(lag) {
                writer.next(Kind::WeightGrad, of_backward(due));
            }
        }
        if let Some(lag) = self.lag {
            (self.total.saturating_sub(lag)..self.total)
                .for_each(|due| writer.next(Kind::WeightGrad, of_backward(due)));
        }
        writer.done()
    }
}
