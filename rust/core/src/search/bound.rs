//! How good a schedule can be at best.
//!
//! The cost of a schedule is the longest time from the start of a rank's first action to the end of its last. On each rank:
//!
//! 1. All its work lies in that time.
//! 2. Before its first input's gradient it can do nothing but forwards, as many as its memory holds; and that gradient is
//!    not there before its first micro-batch has gone on to the last stage and come back.
//! 3. Each micro-batch takes memory from its forward until its gradient has been to the last stage and back; all of them
//!    together cannot take more than the limit for the whole time.

use super::problem::{Problem, Stage};

/// No schedule within the limits costs less.
pub(super) fn lower_bound(problem: &Problem) -> f64 {
    (0..problem.ranks()).map(|rank| of_rank(problem, rank)).fold(0.0, f64::max)
}

fn of_rank(problem: &Problem, rank: usize) -> f64 {
    let work = problem.work(rank);
    let held = problem.stages_of(rank);
    let Some((&first, &last)) = held.first().zip(held.last()) else { return 0.0 };
    // From the start of its first forward to where the gradient of its last stage can be there at the earliest.
    let on_the_way = |stages: &[Stage], part: usize| -> f64 {
        stages.iter().filter_map(|stage| stage.least.get(part)).sum()
    };
    let from_first = problem.stages.get(first..).unwrap_or_default();
    let behind_last = problem.stages.get(last + 1..).unwrap_or_default();
    let ways = |from: usize| -> f64 { problem.stages.iter().skip(from).map(|stage| stage.way).sum() };
    let there = on_the_way(from_first, 0) + ways(first) + on_the_way(behind_last, 1) + ways(last);
    let waits = (there - most_forwards(problem, rank, held)).max(0.0);
    (work + waits).max(of_memory(problem, rank))
}

/// Invariant 3 of a rank; 0 where memory is not taken by forwards and freed by backwards.
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

/// The most time that forwards can fill before the rank's first input's gradient.
#[allow(clippy::cast_precision_loss)] // at most 2^24
fn most_forwards(problem: &Problem, rank: usize, held: &[usize]) -> f64 {
    let limit = problem.limit.get(rank).copied().unwrap_or(f64::INFINITY) + problem.slack(rank);
    let all =
        |&stage: &usize| problem.stages.get(stage).map_or(0.0, |stage| stage.time[0]) * problem.m as f64;
    let most: f64 = held.iter().map(all).sum();
    // However they are mixed, they fill no more time than the memory has room for at the best rate.
    let parts: Vec<_> = held.iter().filter_map(|&stage| problem.stages.get(stage)).collect();
    if parts.iter().any(|stage| stage.memory[0] <= 0.0) || !limit.is_finite() {
        return most;
    }
    if let [only] = parts.as_slice() {
        return most.min((limit / only.memory[0]).floor() * only.time[0]);
    }
    let rate = parts.iter().map(|stage| stage.time[0] / stage.memory[0]).fold(0.0, f64::max);
    most.min(limit * rate)
}
