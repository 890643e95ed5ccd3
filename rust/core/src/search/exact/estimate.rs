//! What a state can come to at best.
//!
//! Of each stage is estimated when its next forward ends, its next gradient arrives, its last forward and its last gradient
//! end, at the earliest; each from the same of the stage before it. Between now and its next gradient a rank can fill its
//! time with nothing but forwards for which it has memory, and weights' gradients.

use super::super::bound::Ends;
use super::super::problem::Problem;
use super::state::State;

pub(super) struct Estimate<'a> {
    problem: &'a Problem,
    /// For each rank, what gradients can be left when its last forward ends.
    behind: Vec<f64>,
    /// Of each stage, when its next forward ends, its next gradient arrives, its last forward and gradient end.
    next_forward: Vec<f64>,
    next_arrival: Vec<f64>,
    last_forward: Vec<f64>,
    last_gradient: Vec<f64>,
    /// For each rank, how long it has nothing to do before its next gradient, and whether forwards remain then.
    gaps: Vec<(f64, bool)>,
}

impl<'a> Estimate<'a> {
    pub(super) fn new(problem: &'a Problem, ends: &[Ends<'_>]) -> Self {
        let behind = |ends: &Ends<'_>| ends.most_behind(problem) + ends.closing;
        let stages = vec![0.0; problem.stages.len()];
        Self {
            problem,
            behind: ends.iter().map(behind).collect(),
            next_forward: stages.clone(),
            next_arrival: stages.clone(),
            last_forward: stages.clone(),
            last_gradient: stages,
            gaps: vec![(0.0, false); problem.ranks()],
        }
    }

    /// No completion of the state costs less.
    pub(super) fn of(&mut self, state: &State<'_>) -> f64 {
        self.look_ahead(state);
        self.find_gaps(state);
        self.look_to_the_end(state);
        let mut cost = 0.0f64;
        for (rank, (at, start)) in state.ranks.iter().zip(&state.starts).enumerate() {
            let (gap, _) = self.gaps.get(rank).copied().unwrap_or_default();
            let mut end = at.free + at.left + gap;
            for &stage in self.problem.stages_of(rank) {
                let (Some(costs), Some(gradient)) =
                    (self.problem.stages.get(stage), self.last_gradient.get(stage))
                else {
                    continue;
                };
                let weights = if state.stages.get(stage).is_some_and(|at| at.done[2] < self.problem.m) {
                    costs.time[2]
                } else {
                    0.0
                };
                end = end.max(gradient + weights);
            }
            cost = cost.max(end - start);
        }
        cost
    }

    fn look_ahead(&mut self, state: &State<'_>) {
        let m = self.problem.m;
        let stages = self.problem.stages.len();
        let mut before = 0.0; // when the next forward of the stage before arrives
        for (stage, costs) in self.problem.stages.iter().enumerate() {
            let (Some(at), Some(rank)) = (state.stages.get(stage), state.ranks.get(costs.rank)) else {
                return;
            };
            let ready =
                if at.done[0] < m { state.arrival(stage, 0, at.done[0]).unwrap_or(before) } else { 0.0 };
            let end = ready.max(rank.free) + costs.time[0];
            before = end + costs.way;
            if let Some(entry) = self.next_forward.get_mut(stage) {
                *entry = end;
            }
        }
        let mut behind = 0.0; // when the next gradient of the stage behind ends
        for (stage, costs) in self.problem.stages.iter().enumerate().rev() {
            let (Some(at), Some(rank)) = (state.stages.get(stage), state.ranks.get(costs.rank)) else {
                return;
            };
            let arrival = if at.done[1] == m {
                f64::INFINITY
            } else if stage + 1 == stages {
                let forward = self.next_forward.get(stage).copied().unwrap_or_default();
                state.arrival(stage, 1, at.done[1]).unwrap_or(forward)
            } else {
                state.arrival(stage, 1, at.done[1]).unwrap_or(behind + costs.way)
            };
            behind = arrival.max(rank.free) + costs.time[1];
            if let Some(entry) = self.next_arrival.get_mut(stage) {
                *entry = arrival;
            }
        }
    }

    #[allow(clippy::cast_precision_loss)] // at most 2^24
    fn find_gaps(&mut self, state: &State<'_>) {
        let problem = self.problem;
        for (rank, (at, gap)) in state.ranks.iter().zip(&mut self.gaps).enumerate() {
            let held = problem.stages_of(rank);
            let limit = problem.limit.get(rank).copied().unwrap_or(f64::INFINITY) + problem.slack(rank);
            let (mut gradient, mut forward) = (f64::INFINITY, f64::INFINITY);
            let (mut weights, mut forwards, mut level, mut rate) = (0.0, 0.0, at.level, 0.0f64);
            for &stage in held {
                let (Some(costs), Some(progress)) = (problem.stages.get(stage), state.stages.get(stage))
                else {
                    continue;
                };
                let [f, i, w] = progress.done;
                gradient = gradient.min(self.next_arrival.get(stage).copied().unwrap_or_default());
                weights += (i - w) as f64 * costs.time[2];
                level += (i - w) as f64 * costs.memory[2].min(0.0);
                if f < problem.m {
                    let end = self.next_forward.get(stage).copied().unwrap_or_default();
                    forward = forward.min(end - costs.time[0]);
                    forwards += (problem.m - f) as f64 * costs.time[0];
                    let fits = if costs.memory[0] <= 0.0 || !limit.is_finite() {
                        f64::INFINITY
                    } else {
                        costs.time[0] / costs.memory[0]
                    };
                    rate = rate.max(fits);
                }
            }
            *gap = (0.0, forwards > 0.0);
            if !gradient.is_finite() || gradient <= at.free {
                continue;
            }
            let mut most = forwards;
            if rate.is_finite() && forwards > 0.0 {
                let room = (limit - level).max(0.0);
                most = most.min(match held {
                    [only] => problem
                        .stages
                        .get(*only)
                        .map_or(most, |costs| (room / costs.memory[0]).floor() * costs.time[0]),
                    _ => room * rate,
                });
            }
            let in_time = (gradient - forward.max(at.free)).max(0.0);
            let idle = gradient - at.free - weights - most.min(in_time);
            *gap = (idle.max(0.0), most < forwards);
        }
    }

    #[allow(clippy::cast_precision_loss)] // at most 2^24
    fn look_to_the_end(&mut self, state: &State<'_>) {
        let m = self.problem.m;
        let mut before = 0.0; // when the last forward of the stage before arrives
        for (stage, costs) in self.problem.stages.iter().enumerate() {
            let (Some(at), Some(rank)) = (state.stages.get(stage), state.ranks.get(costs.rank)) else {
                return;
            };
            let left = m - at.done[0];
            let end = if left == 0 {
                at.ended[0]
            } else {
                let next = self.next_forward.get(stage).copied().unwrap_or_default();
                let end = (before + costs.time[0]).max(next + (left - 1) as f64 * costs.time[0]);
                if self.problem.stages_of(costs.rank).last() == Some(&stage) {
                    let (gap, comes_first) = self.gaps.get(costs.rank).copied().unwrap_or_default();
                    let gap = if comes_first { gap } else { 0.0 };
                    let behind = self.behind.get(costs.rank).copied().unwrap_or(f64::INFINITY);
                    end.max(rank.free + gap + rank.left - behind)
                } else {
                    end
                }
            };
            before = end + costs.way;
            if let Some(entry) = self.last_forward.get_mut(stage) {
                *entry = end;
            }
        }
        let mut behind = 0.0; // when the last gradient of the stage behind ends
        let stages = self.problem.stages.len();
        for (stage, costs) in self.problem.stages.iter().enumerate().rev() {
            let (Some(at), Some(rank)) = (state.stages.get(stage), state.ranks.get(costs.rank)) else {
                return;
            };
            let left = m - at.done[1];
            let end = if left == 0 {
                at.ended[1]
            } else {
                let ready = if stage + 1 == stages {
                    self.last_forward.get(stage).copied().unwrap_or_default()
                } else {
                    behind + costs.way
                };
                let next = self.next_arrival.get(stage).copied().unwrap_or_default().max(rank.free);
                (ready + costs.time[1]).max(next + left as f64 * costs.time[1])
            };
            behind = end;
            if let Some(entry) = self.last_gradient.get_mut(stage) {
                *entry = end;
            }
        }
    }
}
