//! What has been done so far, and what can be done next.

use super::super::problem::Problem;
use crate::schedule::{Action, Kind};

/// How many stages of a rank fit into a set of its actions.
pub(super) const MOST_STAGES: usize = 21;

const KINDS: [Kind; 3] = [Kind::Forward, Kind::InputGrad, Kind::WeightGrad];

/// A set of a rank's next actions: three for each of its stages.
type Set = u64;

/// What can be done next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Step {
    /// The next micro-batch of this part of this stage.
    Do { stage: usize, part: usize },
    /// What the rank could do now is not what it does next.
    Hold { rank: usize },
}

/// A rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rank {
    /// When it has done all that it has begun.
    pub(super) free: f64,
    pub(super) level: f64,
    /// How long the work takes that is left.
    pub(super) left: f64,
    /// What it does not do next.
    banned: Set,
}

/// A stage.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    /// Forwards, inputs' gradients, weights' gradients.
    pub(super) done: [usize; 3],
    /// When the last of each ended.
    pub(super) ended: [f64; 3],
}

/// What a step changed.
struct Undo {
    rank: usize,
    before: Rank,
    change: Option<(usize, Progress)>,
}

pub(super) struct State<'a> {
    pub(super) problem: &'a Problem,
    pub(super) ranks: Vec<Rank>,
    pub(super) stages: Vec<Progress>,
    /// When the first action of each rank begins, which no decision changes.
    pub(super) starts: Vec<f64>,
    /// When the input, and the gradient, of each pair of stage and micro-batch arrives.
    arrivals: [Vec<f64>; 2],
    /// Whether memory never forbids moving an action to the front.
    movable: Vec<bool>,
    /// Whether weights' gradients free memory.
    weights_free: Vec<bool>,
    done: Vec<Undo>,
    path: Vec<(usize, usize)>,
}

/// An action that a rank can do next.
struct Candidate {
    stage: usize,
    part: usize,
    bit: Set,
    ready: f64,
    start: f64,
    end: f64,
}

impl<'a> State<'a> {
    pub(super) fn new(problem: &'a Problem) -> Self {
        let rank = |rank: usize| Rank { free: 0.0, level: 0.0, left: problem.work(rank), banned: 0 };
        let mut starts = vec![0.0; problem.ranks()];
        let mut time = 0.0;
        for stage in problem.stages.iter().take(problem.ranks()) {
            if let Some(start) = starts.get_mut(stage.rank) {
                *start = time;
            }
            time += stage.time[0] + stage.way;
        }
        let of = |held: &Vec<usize>, fits: &dyn Fn([f64; 3]) -> bool| {
            held.iter().filter_map(|&stage| problem.stages.get(stage)).all(|stage| fits(stage.memory))
        };
        let only_frees = |[_, input, weight]: [f64; 3]| input <= 0.0 && weight <= 0.0;
        let movable = problem
            .held
            .iter()
            .zip(&problem.limit)
            .map(|(held, limit)| *limit == f64::INFINITY || held.len() == 1 && of(held, &only_frees));
        let weights_free = problem.held.iter().map(|held| of(held, &|memory| memory[2] <= 0.0));
        let cells = problem.stages.len() * problem.m;
        Self {
            problem,
            ranks: (0..problem.ranks()).map(rank).collect(),
            stages: vec![Progress::default(); problem.stages.len()],
            starts,
            arrivals: [vec![0.0; cells], vec![0.0; cells]],
            movable: movable.collect(),
            weights_free: weights_free.collect(),
            done: Vec::new(),
            path: Vec::new(),
        }
    }

    pub(super) fn depth(&self) -> usize {
        self.done.len()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.path.len() == 3 * self.problem.stages.len() * self.problem.m
    }

    /// The longest time from a rank's start to where it is free.
    pub(super) fn cost(&self) -> f64 {
        self.ranks.iter().zip(&self.starts).map(|(rank, start)| rank.free - start).fold(0.0, f64::max)
    }

    /// When the input (0) or the gradient (1) of a micro-batch arrives at a stage, if that is known.
    pub(super) fn arrival(&self, stage: usize, way: usize, microbatch: usize) -> Option<f64> {
        let last = self.stages.len() - 1;
        let from = match way {
            0 => stage.checked_sub(1),
            _ => (stage < last).then_some(stage + 1),
        };
        let Some(from) = from else {
            // Of the last stage's gradients the forward is the source.
            let ready = way == 0 || self.stages.get(stage)?.done[0] > microbatch;
            return ready.then_some(0.0);
        };
        if *self.stages.get(from)?.done.get(way)? <= microbatch {
            return None;
        }
        self.arrivals.get(way)?.get(stage * self.problem.m + microbatch).copied()
    }

    /// What a rank can do next, all that is known and within its memory.
    fn candidates(&self, rank: usize, each: &mut dyn FnMut(Candidate)) {
        let Some(at) = self.ranks.get(rank) else { return };
        let limit = self.problem.limit.get(rank).copied().unwrap_or(f64::INFINITY) + self.problem.slack(rank);
        for (k, &stage) in self.problem.stages_of(rank).iter().enumerate() {
            let (Some(progress), Some(costs)) = (self.stages.get(stage), self.problem.stages.get(stage))
            else {
                continue;
            };
            let [f, i, w] = progress.done;
            let left = [f < self.problem.m, i < f, w < i];
            for (part, _) in left.into_iter().enumerate().filter(|&(_, left)| left) {
                let bit = 1 << (3 * k + part);
                let (effect, time) = (costs.memory.get(part), costs.time.get(part));
                let (Some(effect), Some(time)) = (effect, time) else { continue };
                if at.banned & bit != 0 || *effect > 0.0 && at.level + effect > limit {
                    continue;
                }
                let ready = match part {
                    0 => self.arrival(stage, 0, f),
                    1 => self.arrival(stage, 1, i),
                    _ => Some(0.0),
                };
                let Some(ready) = ready else { continue };
                let start = at.free.max(ready);
                each(Candidate { stage, part, bit, ready, start, end: start + time });
            }
        }
    }

    /// What is to be tried next, the most promising last.
    pub(super) fn steps(&self, steps: &mut Vec<Step>) {
        let mut first: Option<(f64, usize)> = None;
        for rank in 0..self.ranks.len() {
            self.candidates(rank, &mut |candidate| {
                if first.is_none_or(|(end, _)| candidate.end < end) {
                    first = Some((candidate.end, rank));
                }
            });
        }
        let Some((end, rank)) = first else { return };
        let movable = self.movable.get(rank).copied().unwrap_or(false);
        let mut open: Vec<Candidate> = Vec::new();
        self.candidates(rank, &mut |candidate| {
            // What ends first is among them even where it takes no time.
            if !movable || candidate.start < end || candidate.end <= end {
                open.push(candidate);
            }
        });
        if !movable {
            steps.push(Step::Hold { rank });
        }
        // A gradient before a forward before a weights' gradient, of what begins at one time.
        let order = |part: usize| [1, 0, 2].get(part).copied().unwrap_or(3);
        open.sort_by(|a, b| b.start.total_cmp(&a.start).then(order(b.part).cmp(&order(a.part))));
        steps.extend(open.iter().map(|candidate| Step::Do { stage: candidate.stage, part: candidate.part }));
    }

    pub(super) fn go(&mut self, step: Step) {
        match step {
            Step::Do { stage, part } => self.perform(stage, part),
            Step::Hold { rank } => {
                let mut known = 0;
                self.candidates(rank, &mut |candidate| known |= candidate.bit);
                let Some(at) = self.ranks.get_mut(rank) else { return };
                self.done.push(Undo { rank, before: *at, change: None });
                at.banned |= known;
            }
        }
    }

    fn perform(&mut self, stage: usize, part: usize) {
        let Some(&costs) = self.problem.stages.get(stage) else { return };
        let rank = costs.rank;
        let Some(&at) = self.ranks.get(rank) else { return };
        // Behind a weights' gradient does not come what could have gone first (unless its memory would not have been there).
        let mut banned = 0;
        let mut start = at.free;
        // What takes no time goes first anyway (invariant 2 of the proof).
        let swaps = part == 2 && costs.time[2] > 0.0 && self.weights_free.get(rank) == Some(&true);
        self.candidates(rank, &mut |candidate| {
            if candidate.stage == stage && candidate.part == part {
                start = candidate.start;
            }
            if swaps && candidate.part < 2 && candidate.ready <= at.free {
                banned |= candidate.bit;
            }
        });
        if swaps {
            banned |= at.banned;
        }
        let Some(progress) = self.stages.get_mut(stage) else { return };
        self.done.push(Undo { rank, before: at, change: Some((stage, *progress)) });
        self.path.push((stage, part));
        let (Some(time), Some(effect)) = (costs.time.get(part), costs.memory.get(part)) else { return };
        let end = start + time;
        let mut microbatch = 0;
        if let (Some(done), Some(ended)) = (progress.done.get_mut(part), progress.ended.get_mut(part)) {
            microbatch = *done;
            *done += 1;
            *ended = end;
        }
        if let Some(at) = self.ranks.get_mut(rank) {
            *at = Rank { free: end, level: at.level + effect, left: at.left - time, banned };
        }
        let to = match part {
            0 => stage.checked_add(1),
            1 => stage.checked_sub(1),
            _ => None,
        };
        let Some(to) = to.filter(|&to| to < self.stages.len()) else { return };
        let way =
            if part == 0 { Some(costs.way) } else { self.problem.stages.get(to).map(|stage| stage.way) };
        let entry = self.arrivals.get_mut(part).and_then(|row| row.get_mut(to * self.problem.m + microbatch));
        if let (Some(entry), Some(way)) = (entry, way) {
            *entry = end + way;
        }
    }

    /// Goes back to where so many steps had been done.
    pub(super) fn back(&mut self, depth: usize) {
        while self.done.len() > depth {
            let Some(undo) = self.done.pop() else { return };
            if let Some(rank) = self.ranks.get_mut(undo.rank) {
                *rank = undo.before;
            }
            if let Some((stage, before)) = undo.change {
                self.path.pop();
                if let Some(progress) = self.stages.get_mut(stage) {
                    *progress = before;
                }
            }
        }
    }

    /// What has been done, as a list for each rank.
    pub(super) fn lists(&self) -> Vec<Vec<Action>> {
        let mut lists = vec![Vec::new(); self.ranks.len()];
        let mut counts = vec![[0usize; 3]; self.stages.len()];
        for &(stage, part) in &self.path {
            let Some(count) = counts.get_mut(stage).and_then(|counts| counts.get_mut(part)) else { continue };
            let action = KINDS.get(part).and_then(|&kind| Action::new(kind, stage, Some(*count)).ok());
            *count += 1;
            let list = self.problem.stages.get(stage).and_then(|costs| lists.get_mut(costs.rank));
            if let (Some(list), Some(action)) = (list, action) {
                list.push(action);
            }
        }
        lists
    }

    /// Which state this is, whenever it was reached.
    pub(super) fn what(&self, key: &mut Vec<u64>) {
        key.clear();
        let narrow = |count: usize| count as u64;
        // Three counts of sixteen bits each.
        key.extend(self.stages.iter().map(|stage| {
            let [f, i, w] = stage.done;
            narrow(f) << 32 | narrow(i) << 16 | narrow(w)
        }));
        key.extend(self.ranks.iter().map(|rank| rank.banned));
    }

    /// When it was reached: whatever decides how soon the rest can be done.
    pub(super) fn when(&self, times: &mut Vec<f64>) {
        times.clear();
        times.extend(self.ranks.iter().map(|rank| rank.free));
        let m = self.problem.m;
        for (stage, costs) in self.problem.stages.iter().enumerate() {
            let Some(free) = self.ranks.get(costs.rank).map(|rank| rank.free) else { continue };
            let done =
                |stage: usize, part: usize| self.stages.get(stage).and_then(|at| at.done.get(part)).copied();
            let mut on_the_way = |way: usize, from: Option<usize>| {
                let (Some(sent), Some(taken)) = (from.and_then(|from| done(from, way)), done(stage, way))
                else {
                    return;
                };
                let row = self.arrivals.get(way).and_then(|row| row.get(stage * m + taken..stage * m + sent));
                times.extend(row.unwrap_or_default().iter().map(|&arrival| arrival.max(free)));
            };
            on_the_way(0, stage.checked_sub(1));
            on_the_way(1, Some(stage + 1));
        }
    }
}
