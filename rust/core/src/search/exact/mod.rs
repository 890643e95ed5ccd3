//! The proof that nothing better exists: all schedules that matter, one decision after the other.
//!
//! The question asked is always the same: is there a schedule that costs less than a target? It begins near the bound and
//! comes near to the best that is known; every "no" is a better bound, and the last one a proof.
//!
//! 1. Micro-batches are alike, so each stage takes them in order, for every part of the work: a schedule is, for each rank,
//!    a word over its stages' forwards, inputs' and weights' gradients.
//! 2. Actions are placed at the earliest time. Next is always a rank on which some action could end before any other
//!    action of any rank: in some best schedule that rank does next an action that begins before then (else the other
//!    could go first for free). Where memory forbids moving an action to the front (several stages on a rank, or
//!    gradients that take memory), the rank may also do any other, or keep all it can do now for later.
//! 3. A weights' gradient does not stand before an action that could have gone first: changed places, the other ends
//!    earlier.
//! 4. Of two states in which the same has been done, one that is nowhere later makes the other superfluous.
//! 5. A state is given up when `estimate` says that it cannot be completed below the target.
//!
//! Invariants 2 and 3 hold together with 4 since they speak of what is still to be done: by induction over the actions
//! that are left, a state that is left out has another of no greater cost that is not.

mod estimate;
mod memo;
mod state;

use super::bound::Ends;
use super::greedy::Outcome;
use super::problem::Problem;
use crate::schedule::Costs;
use crate::schedule::Links;
use estimate::Estimate;
use memo::Memo;
use state::{State, Step};

/// Costs that differ by less than this share are the same.
const ROUNDING: f64 = 1e-9;

/// How many states are looked at between two questions whether to go on.
const STRIDE: u32 = 512;

/// What the proof came to.
pub(super) enum Verdict {
    /// No schedule costs less than the target.
    None,
    /// This one does, and none costs less than it.
    Best(Outcome),
    /// It was ended early; a schedule that costs less than the target, if one had been found.
    Stopped(Option<Outcome>),
}

/// Whether all schedules can be gone through: those in which a whole backward, two actions that overlap, and transfers that
/// hold others up make no difference, or only a bad one; and in which the first of all actions of each rank is known.
pub(super) fn applies(problem: &Problem, costs: &Costs) -> bool {
    let whole_is_shorter = (0..problem.stages.len())
        .any(|stage| costs.backward_of(stage) < costs.input_grad.of(stage) + costs.weight_grad.of(stage));
    let p = problem.ranks();
    let firsts: std::collections::HashSet<_> =
        problem.stages.iter().take(p).map(|stage| stage.rank).collect();
    costs.links == Links::Parallel
        && !whole_is_shorter
        && costs.overlap >= 1.0
        && firsts.len() == p
        && problem.held.iter().all(|held| held.len() <= state::MOST_STAGES)
        && u16::try_from(problem.m).is_ok()
}

/// Whether a schedule costs less than `target`, and the best of those that do. `keep_on` is asked from time to time.
pub(super) fn prove(problem: &Problem, target: f64, keep_on: &mut dyn FnMut() -> bool) -> Verdict {
    let ends: Vec<_> = (0..problem.ranks()).filter_map(|rank| Ends::of(problem, rank)).collect();
    let mut proof = Proof {
        target: below(target),
        state: State::new(problem),
        estimate: Estimate::new(problem, &ends),
        memo: Memo::default(),
        best: None,
    };
    let finished = proof.run(keep_on);
    match (finished, proof.best) {
        (false, best) => Verdict::Stopped(best),
        (true, Some(best)) => Verdict::Best(best),
        (true, None) => Verdict::None,
    }
}

/// No schedule costs less than this.
pub(super) fn root_bound(problem: &Problem) -> f64 {
    let ends: Vec<_> = (0..problem.ranks()).filter_map(|rank| Ends::of(problem, rank)).collect();
    Estimate::new(problem, &ends).of(&State::new(problem))
}

fn below(cost: f64) -> f64 {
    cost * (1.0 - ROUNDING)
}

struct Proof<'a> {
    target: f64,
    state: State<'a>,
    estimate: Estimate<'a>,
    memo: Memo,
    best: Option<Outcome>,
}

/// The choices that are left at a state.
struct Open {
    /// How many steps had been done.
    depth: usize,
    steps: Vec<Step>,
}

impl Proof<'_> {
    /// Whether everything has been gone through.
    fn run(&mut self, keep_on: &mut dyn FnMut() -> bool) -> bool {
        let mut stack: Vec<Open> = Vec::new();
        let mut asked = 0u32;
        let mut steps = Vec::new();
        loop {
            asked += 1;
            if asked.is_multiple_of(STRIDE) && !keep_on() {
                return false;
            }
            steps.clear();
            self.look(&mut steps);
            match steps.pop() {
                Some(step) => {
                    if !steps.is_empty() {
                        stack.push(Open { depth: self.state.depth(), steps: std::mem::take(&mut steps) });
                    }
                    self.state.go(step);
                }
                None => loop {
                    let Some(open) = stack.last_mut() else { return true };
                    self.state.back(open.depth);
                    let step = open.steps.pop();
                    if open.steps.is_empty() {
                        stack.pop();
                    }
                    if let Some(step) = step {
                        self.state.go(step);
                        break;
                    }
                },
            }
        }
    }

    /// What can be done next, the most promising last; nothing if this state leads to nothing better.
    fn look(&mut self, steps: &mut Vec<Step>) {
        if self.estimate.of(&self.state) >= self.target {
            return;
        }
        if self.state.is_complete() {
            let cost = self.state.cost();
            if cost < self.target {
                self.target = below(cost);
                self.best = Some(Outcome { actions: self.state.lists(), cost });
            }
            return;
        }
        self.state.steps(steps);
        if steps.len() > 1 && !self.memo.admits(&self.state) {
            steps.clear();
        }
    }
}
