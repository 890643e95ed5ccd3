//! What is searched for, as plain tables: a time and a change of memory for each part of the work of each stage.

use crate::error::{Error, Result};
use crate::schedule::{Costs, PerStage};

/// The work of one stage for one micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stage {
    pub(super) rank: usize,
    /// Of a forward, an input's gradient, the weights' gradients.
    pub(super) time: [f64; 3],
    /// The same at the least, for bounds: a whole backward, or one that overlaps with a forward, may take less.
    pub(super) least: [f64; 3],
    pub(super) memory: [f64; 3],
    /// From this stage to the next, and back; 0 on one rank, and behind the last stage.
    pub(super) way: f64,
}

/// Everything about it.
#[derive(Debug, Clone)]
pub(super) struct Problem {
    pub(super) m: usize,
    pub(super) stages: Vec<Stage>,
    /// The stages of each rank, ascending.
    pub(super) held: Vec<Vec<usize>>,
    /// The most memory that each rank may hold.
    pub(super) limit: Vec<f64>,
}

impl Problem {
    pub(super) fn new(
        ranks: usize,
        m: usize,
        placement: &[usize],
        costs: &Costs,
        limit: Option<&PerStage>,
    ) -> Result<Self> {
        let mut held = vec![Vec::new(); ranks];
        for (stage, &rank) in placement.iter().enumerate() {
            held.get_mut(rank).ok_or(Error::NoSuchRank { stage, rank, ranks })?.push(stage);
        }
        let neighbours = placement.iter().zip(placement.iter().skip(1).map(Some).chain([None]));
        let stage = |(stage, (&rank, next)): (usize, (&usize, Option<&usize>))| {
            let way = match next {
                Some(&next) if next != rank => costs.transfer.of(stage) + costs.latency.of(stage),
                _ => 0.0,
            };
            let time = [costs.forward.of(stage), costs.input_grad.of(stage), costs.weight_grad.of(stage)];
            let whole = costs.backward_of(stage);
            let input_grad = time[1].min(whole);
            let share = costs.overlap.min(1.0);
            let least =
                [time[0], input_grad, (time[1] + time[2]).min(whole) - input_grad].map(|time| time * share);
            let memory = [
                costs.forward_memory.of(stage),
                costs.input_grad_memory.of(stage),
                costs.weight_grad_memory.of(stage),
            ];
            Stage { rank, time, least, memory, way }
        };
        let limit = (0..ranks).map(|rank| limit.map_or(f64::INFINITY, |limit| limit.of(rank))).collect();
        Ok(Self { m, stages: neighbours.enumerate().map(stage).collect(), held, limit })
    }

    pub(super) fn ranks(&self) -> usize {
        self.held.len()
    }

    pub(super) fn stages_of(&self, rank: usize) -> &[usize] {
        self.held.get(rank).map_or(&[], Vec::as_slice)
    }

    /// How much more than the limit is still the limit: sums of the same numbers in another order.
    pub(super) fn slack(&self, rank: usize) -> f64 {
        1e-9 * self.limit.get(rank).copied().unwrap_or(0.0).abs()
    }

    /// Whether every rank has memory for the forwards of all micro-batches of its first stage; `None` if forwards free memory.
    #[allow(clippy::cast_precision_loss)] // at most 2^24
    pub(super) fn holds_all_forwards(&self) -> Option<bool> {
        let mut holds = true;
        for (rank, stages) in self.held.iter().enumerate() {
            let Some(stage) = stages.first().and_then(|&stage| self.stages.get(stage)) else { continue };
            if stage.memory[0] < 0.0 {
                return None;
            }
            holds &= self
                .limit
                .get(rank)
                .is_some_and(|limit| self.m as f64 * stage.memory[0] <= limit + self.slack(rank));
        }
        Some(holds)
    }

    /// The time that a rank works for a step, at the least.
    #[allow(clippy::cast_precision_loss)] // at most 2^24
    pub(super) fn work(&self, rank: usize) -> f64 {
        let of = |&stage: &usize| self.stages.get(stage).map_or(0.0, |stage| stage.least.iter().sum());
        self.stages_of(rank).iter().map(of).sum::<f64>() * self.m as f64
    }
}
