//! How good a schedule can be at best.
//!
//! The cost of a schedule is the longest time from the start of a rank's first action to the end of its last. On each rank:
//!
//! 1. All its work lies in that time.
//! 2. Head: before its first input's gradient it can do nothing but forwards, as many as its memory holds; and that
//!    gradient is not there before its first micro-batch has gone on to the last stage and come back.
//! 3. Tail: behind its last forward it can do nothing but gradients, of as many micro-batches as its memory holds; and the
//!    last of them is not there before that forward's output has gone on to the last stage and come back.
//! 4. Each micro-batch takes memory from its forward until its gradient has been to the last stage and back; all of them
//!    together cannot take more than the limit for the whole time.
//!
//! ```text
//! rank 0 | F0 F1 F2 F3 ~~~~~ I0 W0 F4 I1 W1 ... F9 I6 W6 I7 W7 I8 W8 ~~~ I9 W9          ~ idle: head, and tail
//! ```
//!
//! Head and tail are two gaps unless all forwards come before the first gradient.

use super::problem::{Problem, Stage};

/// No schedule within the limits costs less.
pub(super) fn lower_bound(problem: &Problem) -> f64 {
    (0..problem.ranks()).map(|rank| of_rank(problem, rank)).fold(0.0, f64::max)
}

fn of_rank(problem: &Problem, rank: usize) -> f64 {
    let Some(ends) = Ends::of(problem, rank) else { return 0.0 };
    let work = problem.work(rank);
    let forwards = ends.all_forwards(problem);
    let apart = work + ends.head_gap(problem) + ends.tail_gap(problem);
    // All forwards come first only where there is memory for all.
    let together = if ends.holds_all(problem) {
        let head = ends.there.max(forwards) + (work - forwards);
        head.max(forwards + ends.back + ends.closing)
    } else {
        f64::INFINITY
    };
    apart.min(together).max(of_memory(problem, rank))
}

/// What lies between a rank's forwards and gradients.
pub(super) struct Ends<'a> {
    held: &'a [usize],
    limit: f64,
    /// From the start of its first forward to where the gradient of its last stage can be there at the earliest.
    there: f64,
    /// From the end of its last forward to where the gradient of its first stage can be there at the earliest.
    pub(super) back: f64,
    /// What follows that gradient's arrival: the first stage's whole backward.
    pub(super) closing: f64,
}

impl<'a> Ends<'a> {
    pub(super) fn of(problem: &'a Problem, rank: usize) -> Option<Self> {
        let held = problem.stages_of(rank);
        let (&first, &last) = held.first().zip(held.last())?;
        let sum = |from: usize, part: usize| -> f64 {
            problem.stages.iter().skip(from).filter_map(|stage| stage.least.get(part)).sum()
        };
        let ways = |from: usize| -> f64 { problem.stages.iter().skip(from).map(|stage| stage.way).sum() };
        let [_, input, weight] = problem.stages.get(first)?.least;
        Some(Self {
            held,
            limit: problem.limit.get(rank).copied().unwrap_or(f64::INFINITY) + problem.slack(rank),
            there: sum(first, 0) + ways(first) + sum(last + 1, 1) + ways(last),
            back: sum(last + 1, 0) + ways(last) + sum(first + 1, 1) + ways(first),
            closing: input + weight,
        })
    }

    fn parts<'p>(&self, problem: &'p Problem) -> impl Iterator<Item = &'p Stage> {
        self.held.iter().filter_map(|&stage| problem.stages.get(stage))
    }

    #[allow(clippy::cast_precision_loss)] // at most 2^24
    fn all_forwards(&self, problem: &Problem) -> f64 {
        self.parts(problem).map(|stage| stage.least[0]).sum::<f64>() * problem.m as f64
    }

    /// Whether all forwards could come before the first gradient.
    #[allow(clippy::cast_precision_loss)] // at most 2^24
    fn holds_all(&self, problem: &Problem) -> bool {
        self.parts(problem).any(|stage| stage.memory[0] < 0.0)
            || self.parts(problem).map(|stage| stage.memory[0]).sum::<f64>() * problem.m as f64 <= self.limit
    }

    /// What is idle before the first gradient at the least.
    fn head_gap(&self, problem: &Problem) -> f64 {
        (self.there - self.most_forwards(problem)).max(0.0)
    }

    /// The most time that forwards can fill before the rank's first input's gradient.
    #[allow(clippy::cast_precision_loss)] // at most 2^24
    fn most_forwards(&self, problem: &Problem) -> f64 {
        // However they are mixed, they fill no more time than the memory has room for at the best rate. (What they take
        // is the time that they take at most: one that overlaps with a backward comes later.)
        let parts: Vec<_> = self.parts(problem).collect();
        let most = parts.iter().map(|stage| stage.time[0]).sum::<f64>() * problem.m as f64;
        if parts.iter().any(|stage| stage.memory[0] <= 0.0) || !self.limit.is_finite() {
            return most;
        }
        if let [only] = parts.as_slice() {
            return most.min((self.limit / only.memory[0]).floor() * only.time[0]);
        }
        let rate = parts.iter().map(|stage| stage.time[0] / stage.memory[0]).fold(0.0, f64::max);
        most.min(self.limit * rate)
    }

    /// What is idle behind the last forward at the least.
    fn tail_gap(&self, problem: &Problem) -> f64 {
        (self.back - self.most_behind(problem)).max(0.0)
    }

    /// The most time that gradients can fill between the rank's last forward and its last input's gradient.
    #[allow(clippy::cast_precision_loss)] // at most 2^24
    pub(super) fn most_behind(&self, problem: &Problem) -> f64 {
        let m = problem.m as f64;
        let closing = self.held.first().and_then(|&first| problem.stages.get(first));
        let closing = closing.map_or(0.0, |stage| stage.time[1] + stage.time[2]);
        let parts: Vec<_> = self.parts(problem).collect();
        let most = parts.iter().map(|stage| stage.time[1] + stage.time[2]).sum::<f64>() * m;
        let frees = |stage: &&Stage| stage.memory[1] <= 0.0 && stage.memory[2] < 0.0;
        if !parts.iter().all(frees) || !self.limit.is_finite() {
            return most - closing;
        }
        // What would be held if everything were done, and so what the gradients that are left may free.
        let room = self.limit - parts.iter().map(|stage| stage.memory.iter().sum::<f64>()).sum::<f64>() * m;
        let behind = if let [only] = parts.as_slice() {
            of_one_stage(only, problem.m, room)
        } else {
            of_stages(&parts, m, room)
        };
        most.min(behind) - closing
    }
}

/// The most time of input's and weights' gradients that free no more than `room`, of which there are no more input's than
/// weights' gradients, and one at the least.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most 2^24
fn of_one_stage(stage: &Stage, m: usize, room: f64) -> f64 {
    let [_, input, weight] = stage.time;
    let [_, input_frees, weight_frees] = stage.memory.map(|effect| -effect);
    let mut most = 0.0f64;
    for inputs in 1..=m {
        let weights = ((room - inputs as f64 * input_frees) / weight_frees).floor();
        if weights < inputs as f64 {
            break;
        }
        most = most.max(inputs as f64 * input + weights.min(m as f64) * weight);
    }
    most
}

/// The same for several stages, whatever the parts of actions.
fn of_stages(parts: &[&Stage], m: f64, room: f64) -> f64 {
    // Of each stage, whole backwards and weights' gradients alone: time, and what they free.
    let mut kinds: Vec<(f64, f64)> = Vec::with_capacity(2 * parts.len());
    for stage in parts {
        let ([_, input, weight], [_, input_memory, weight_memory]) = (stage.time, stage.memory);
        kinds.push((input + weight, -input_memory - weight_memory));
        kinds.push((weight, -weight_memory));
    }
    // All free something.
    kinds.sort_by(|a, b| (b.0 / b.1).total_cmp(&(a.0 / a.1)));
    let (mut left, mut most) = (room.max(0.0), 0.0);
    for (time, frees) in kinds {
        let count = (left / frees).min(m);
        most += count * time;
        left -= count * frees;
    }
    most
}

/// Invariant 4 of a rank; 0 where memory is not taken by forwards and freed by backwards.
#[allow(clippy::cast_precision_loss)] // at most 2^24
fn of_memory(problem: &Problem, rank: usize) -> f64 {
    let limit = problem.limit.get(rank).copied().unwrap_or(f64::INFINITY) + problem.slack(rank);
    let held = problem.stages_of(rank);
    let takes = |stage: &Stage| {
        let [forward, input, weight] = stage.memory;
        forward >= 0.0 && forward + input >= 0.0 && forward + input + weight >= 0.0
    };
    if limit <= 0.0 || !held.iter().all(|&stage| problem.stages.get(stage).is_some_and(takes)) {
        return 0.0;
    }
    // Memory times time of one micro-batch on one of the rank's stages.
    let area = |&index: &usize| {
        let Some(stage) = problem.stages.get(index) else { return 0.0 };
        let behind = problem.stages.get(index + 1..).unwrap_or_default();
        let there_and_back: f64 =
            behind.iter().map(|stage| stage.least[0] + stage.least[1] + 2.0 * stage.way).sum();
        let until_gradient = stage.least[0] + 2.0 * stage.way + there_and_back + stage.least[1];
        stage.memory[0] * until_gradient + (stage.memory[0] + stage.memory[1]) * stage.least[2]
    };
    held.iter().map(area).sum::<f64>() * problem.m as f64 / limit
}
