//! A rank's list while it is written: each kind of each stage takes its micro-batches in order.

use super::super::action::{Action, Kind};

/// Where a stage of the rank has got to.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    stage: u16,
    forwards: u32,
    backwards: u32,
    weight_grads: u32,
}

/// The list, and where each of the rank's stages (its chunks, counted from 0 in ascending order) has got to.
#[derive(Debug)]
pub(super) struct Writer {
    chunks: Vec<Chunk>,
    actions: Vec<Action>,
    overlaps: Vec<usize>,
}

impl Writer {
    /// An empty list for a rank that holds these stages.
    pub(super) fn new(stages: impl Iterator<Item = usize>) -> Self {
        // Always fits, being within the limit.
        let narrow = |stage| u16::try_from(stage).unwrap_or(u16::MAX);
        let chunk = |stage| Chunk { stage: narrow(stage), forwards: 0, backwards: 0, weight_grads: 0 };
        Self { chunks: stages.map(chunk).collect(), actions: Vec::new(), overlaps: Vec::new() }
    }

    /// Writes the next micro-batch of this kind on a chunk; a whole backward and an input-gradient count as one kind.
    pub(super) fn next(&mut self, kind: Kind, chunk: usize) {
        let Some(at) = self.chunks.get_mut(chunk) else { return };
        let count = match kind {
            Kind::Forward => &mut at.forwards,
            Kind::WeightGrad => &mut at.weight_grads,
            _ => &mut at.backwards,
        };
        self.actions.push(Action::known(kind, at.stage, *count));
        *count += 1;
        if kind == Kind::Backward {
            at.weight_grads += 1;
        }
    }

    /// Writes an action of a micro-batch out of order; such a list uses no other method.
    pub(super) fn of(&mut self, kind: Kind, chunk: usize, microbatch: u32) {
        if let Some(at) = self.chunks.get(chunk) {
            self.actions.push(Action::known(kind, at.stage, microbatch));
        }
    }

    /// Writes the next forward of a chunk and the next whole backward of another, which overlap.
    pub(super) fn pair(&mut self, forward: usize, backward: usize) {
        self.overlaps.push(self.actions.len());
        self.next(Kind::Forward, forward);
        self.next(Kind::Backward, backward);
    }

    /// How many forwards a chunk has.
    pub(super) fn forwards(&self, chunk: usize) -> usize {
        self.chunks.get(chunk).map_or(0, |at| at.forwards as usize)
    }

    /// How many input-gradients still lack their weight-gradient.
    pub(super) fn postponed(&self, chunk: usize) -> usize {
        self.chunks.get(chunk).map_or(0, |at| (at.backwards - at.weight_grads) as usize)
    }

    /// The list.
    pub(super) fn done(self) -> List {
        List { actions: self.actions, overlaps: self.overlaps }
    }
}

/// What a rank does, and where in it the pairs that overlap begin.
#[derive(Debug)]
pub(super) struct List {
    pub(super) actions: Vec<Action>,
    pub(super) overlaps: Vec<usize>,
}
