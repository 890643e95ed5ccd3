//! When each action of a schedule would begin and end, for given costs, if transfers took no time.

use super::Schedule;
use super::action::{Action, Kind};
use super::walk::walk;
use crate::error::{Error, Result};

/// The time that a rank takes for one micro-batch, all its stages together, in any unit. Its stages share it equally.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    forward: f64,
    input_grad: f64,
    weight_grad: f64,
}

impl Costs {
    /// The times of a forward and of the two parts of a backward; a whole backward takes both, a recomputation takes a
    /// forward.
    ///
    /// # Errors
    /// [`Error::BadCost`] for a time that is negative, infinite or not a number.
    pub fn new(forward: f64, input_grad: f64, weight_grad: f64) -> Result<Self> {
        for (what, value) in [("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad)]
        {
            if !value.is_finite() || value < 0.0 {
                return Err(Error::BadCost { what, value });
            }
        }
        Ok(Self { forward, input_grad, weight_grad })
    }

    /// The time of a forward.
    pub fn forward(&self) -> f64 {
        self.forward
    }

    /// The time of an input's gradient.
    pub fn input_grad(&self) -> f64 {
        self.input_grad
    }

    /// The time of the weights' gradients.
    pub fn weight_grad(&self) -> f64 {
        self.weight_grad
    }

    fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Forward | Kind::Recompute => self.forward,
            Kind::Backward => self.input_grad + self.weight_grad,
            Kind::InputGrad => self.input_grad,
            Kind::WeightGrad => self.weight_grad,
            _ => 0.0,
        }
    }
}

impl Default for Costs {
    /// One unit of time each.
    fn default() -> Self {
        Self { forward: 1.0, input_grad: 1.0, weight_grad: 1.0 }
    }
}

/// An action in time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What is done.
    pub action: Action,
    /// When it begins; the first action of all begins at 0.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// A schedule in time.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    spans: Vec<Vec<Span>>,
    work: f64,
}

impl Simulation {
    /// What a rank does and when, in order; `None` if there is no such rank.
    pub fn spans(&self, rank: usize) -> Option<&[Span]> {
        self.spans.get(rank).map(Vec::as_slice)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.spans.len()
    }

    /// When the last action of all ends.
    pub fn makespan(&self) -> f64 {
        self.spans.iter().filter_map(|spans| spans.last()).fold(0.0, |latest, span| latest.max(span.end))
    }

    /// The share of time that is not the work of a step without recomputation: (cost - m(F+I+W)) / cost, where the cost is
    /// the longest time from the start of a rank's first action to the end of its last. 0 if nothing costs anything.
    pub fn bubble_rate(&self) -> f64 {
        let busy = |spans: &Vec<Span>| Some(spans.last()?.end - spans.first()?.start);
        let cost = self.spans.iter().filter_map(busy).fold(0.0, f64::max);
        if cost > 0.0 { (cost - self.work) / cost } else { 0.0 }
    }
}

impl Schedule {
    /// The schedule in time: every rank begins an action as soon as it is free and what the action needs is there.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`].
    pub fn simulate(&self, costs: &Costs) -> Result<Simulation> {
        let mut stages_held = vec![0.0f64; self.ranks()];
        for &rank in &self.placement {
            if let Some(held) = stages_held.get_mut(usize::from(rank)) {
                *held += 1.0;
            }
        }
        let share = |rank: usize| stages_held.get(rank).copied().unwrap_or(1.0);
        let spans = self.in_time(|rank, _, kind| costs.of(kind) / share(rank))?;
        let work = costs.forward + if self.backward { costs.input_grad + costs.weight_grad } else { 0.0 };
        #[allow(clippy::cast_precision_loss)] // at most 2^24
        Ok(Simulation { spans, work: work * self.microbatches as f64 })
    }

    /// The schedule in time if every action took as long as given, say as long as it was measured to take: for each rank
    /// a duration for each of its actions, in order. The work of the step is that of the rank that has most of it.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`]; [`Error::DurationsDiffer`] if there is not one duration for each action;
    /// [`Error::BadCost`] for one that is negative, infinite or not a number.
    pub fn replay(&self, durations: &[Vec<f64>]) -> Result<Simulation> {
        let lengths = |rank: usize| {
            let given = durations.get(rank).map_or(0, Vec::len);
            let actions = self.actions(rank).map_or(0, <[Action]>::len);
            (given != actions).then_some(Error::DurationsDiffer { rank, given, actions })
        };
        if let Some(error) = (0..self.ranks().max(durations.len())).find_map(lengths) {
            return Err(error);
        }
        if let Some(&value) = durations.iter().flatten().find(|value| !value.is_finite() || **value < 0.0) {
            return Err(Error::BadCost { what: "of an action", value });
        }
        let of = |rank: usize, position: usize| {
            durations.get(rank).and_then(|list| list.get(position)).copied().unwrap_or(0.0)
        };
        let spans = self.in_time(|rank, position, _| of(rank, position))?;
        let work_of = |(rank, actions): (usize, &Vec<Action>)| -> f64 {
            let is_work = |(_, action): &(usize, &Action)| action.kind() != Kind::Recompute;
            actions.iter().enumerate().filter(is_work).map(|(position, _)| of(rank, position)).sum()
        };
        let work = self.actions.iter().enumerate().map(work_of).fold(0.0, f64::max);
        Ok(Simulation { spans, work })
    }

    /// The actions of every rank in time, given how long each takes: the rank's `position`-th action, of a kind.
    pub(super) fn in_time(&self, duration: impl Fn(usize, usize, Kind) -> f64) -> Result<Vec<Vec<Span>>> {
        self.verify_lists()?;
        let (m, cells) = (self.microbatches, self.stages() * self.microbatches);
        let (mut outputs, mut input_grads) = (vec![0.0f64; cells], vec![0.0f64; cells]);
        let mut spans: Vec<Vec<Span>> =
            self.actions.iter().map(|actions| Vec::with_capacity(actions.len())).collect();
        walk(self, |rank, action| {
            let cell = self.cell(action).unwrap_or_default();
            let needed = match action.kind() {
                Kind::Forward => cell.checked_sub(m).and_then(|before| outputs.get(before)),
                // Beyond the last stage there is nothing, and the rank's own forward has ended.
                Kind::Backward | Kind::InputGrad => input_grads.get(cell + m),
                _ => None,
            };
            let Some(spans) = spans.get_mut(rank) else { return };
            let free = spans.last().map_or(0.0, |span| span.end);
            let start = needed.map_or(free, |&there| free.max(there));
            let end = start + duration(rank, spans.len(), action.kind());
            spans.push(Span { action, start, end });
            let table = match action.kind() {
                Kind::Forward => &mut outputs,
                Kind::Backward | Kind::InputGrad => &mut input_grads,
                _ => return,
            };
            if let Some(entry) = table.get_mut(cell) {
                *entry = end;
            }
        })
        .map_err(|cycle| Error::Deadlock { cycle })?;
        Ok(spans)
    }
}
