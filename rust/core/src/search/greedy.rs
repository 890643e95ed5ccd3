//! A schedule by rules: in the order of time, every rank that is free chooses what to do next.
//!
//! 1. An input's gradient that can be computed, or a forward for which there is memory; which of the two first, if both can
//!    be, is a matter of the rule.
//! 2. If there is neither: weights' gradients, unless what is on its way arrives so soon that they would delay it.
//! 3. If there is memory for nothing else: weights' gradients at once.
//!
//! A forward leaves enough memory for the later stages of the same rank, so that one micro-batch can always go on. All
//! decisions are made from what has begun before, and ties are broken by rank: the same rules, the same schedule.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::problem::Problem;
use crate::schedule::{Action, Kind};

/// How a rank chooses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rule {
    /// How many forwards of its first stage may lack their input's gradient at a time.
    pub(super) ahead: usize,
    /// Whether forwards and backwards take turns; else a backward goes first.
    pub(super) in_turn: bool,
    /// Weights' gradients are begun if nothing is known to arrive within this share of the time that they take.
    pub(super) patience: f64,
    /// A forward that would delay a gradient that is known to arrive is begun only if that is not there for this share of the
    /// time that the forward takes.
    pub(super) eager: f64,
    /// How many weights' gradients are postponed at most.
    pub(super) lag: usize,
    /// The share of the memory that is kept from a rank's first stage, for its other stages.
    pub(super) kept: f64,
    /// How long the rank may have nothing to do: beyond that it waits for nothing that it could do something else before.
    pub(super) spare: f64,
}

/// A stage's progress.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    /// Forwards, input's gradients, weights' gradients.
    done: [usize; 3],
    /// How many inputs, and gradients, are known to arrive, or have arrived.
    known: [usize; 2],
}

struct Rank {
    free: f64,
    level: f64,
    first_level: f64,
    /// The earliest wake-up that is in the queue.
    wake: f64,
    /// How long it has had nothing to do since it began.
    idle: f64,
    was_forward: bool,
    actions: Vec<Action>,
    /// How far it has come in its order.
    position: usize,
}

/// A time that can be compared.
#[derive(PartialEq, Clone, Copy)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// What a rank decided.
enum Choice {
    Do(Kind, usize),
    WaitUntil(f64),
    Wait,
}

/// What a rank can do at a time: of each kind a stage, where it matters with the micro-batch.
#[derive(Default)]
struct Open {
    forward: Option<usize>,
    backward: Option<(usize, usize)>,
    weights: Option<(usize, usize)>,
    /// How many weights' gradients are due.
    postponed: usize,
    /// When the next input or gradient arrives that is on its way.
    soonest: f64,
    /// When the next gradient does.
    next_gradient: f64,
    /// Whether something could be done, were there memory.
    short_of_memory: bool,
}

/// Forwards and input's gradients of a rank, in order: of which stage, and whether a forward.
pub(super) type Order = Vec<(usize, bool)>;

struct Greedy<'a> {
    problem: &'a Problem,
    rules: &'a [Rule],
    /// In which order forwards and input's gradients are done, if that is not left to the rules.
    orders: Option<&'a [Order]>,
    progress: Vec<Progress>,
    /// When the input, and the gradient, of each pair of stage and micro-batch arrives.
    arrivals: [Vec<f64>; 2],
    ranks: Vec<Rank>,
    queue: BinaryHeap<Reverse<(Time, usize)>>,
}

/// A schedule, and the longest time from the start of a rank's first action to the end of its last.
pub(super) struct Outcome {
    pub(super) actions: Vec<Vec<Action>>,
    pub(super) cost: f64,
}

/// Makes a schedule by these rules, one per rank; `None` if they end where nothing can go on, or beyond `give_up`.
pub(super) fn greedy(
    problem: &Problem,
    rules: &[Rule],
    orders: Option<&[Order]>,
    give_up: f64,
) -> Option<Outcome> {
    let cells = problem.stages.len() * problem.m;
    let rank = |rank: usize| Rank {
        free: 0.0,
        level: 0.0,
        first_level: 0.0,
        wake: f64::INFINITY,
        idle: 0.0,
        was_forward: false,
        position: 0,
        actions: Vec::with_capacity(problem.stages_of(rank).len() * problem.m * 3),
    };
    let mut run = Greedy {
        problem,
        rules,
        orders,
        progress: vec![Progress::default(); problem.stages.len()],
        arrivals: [vec![0.0; cells], vec![0.0; cells]],
        ranks: (0..problem.ranks()).map(rank).collect(),
        queue: BinaryHeap::new(),
    };
    run.progress.first_mut()?.known[0] = problem.m;
    run.progress.last_mut()?.known[1] = problem.m;
    run.run(give_up)
}

impl Greedy<'_> {
    fn run(mut self, give_up: f64) -> Option<Outcome> {
        let total = 3 * self.problem.stages.len() * self.problem.m;
        let mut done = 0;
        let mut first_start = vec![f64::INFINITY; self.ranks.len()];
        let mut cost = 0.0f64;
        for rank in 0..self.ranks.len() {
            self.wake(rank, 0.0);
        }
        while let Some(Reverse((Time(now), index))) = self.queue.pop() {
            let rank = self.ranks.get_mut(index)?;
            if rank.wake > now || rank.free > now {
                continue; // woken for something that has been seen to
            }
            rank.wake = f64::INFINITY;
            match self.choose(index, now)? {
                Choice::Do(kind, stage) => {
                    let start = first_start.get_mut(index)?;
                    *start = start.min(now);
                    let end = self.perform(index, kind, stage, now)?;
                    cost = cost.max(end - *start);
                    if cost >= give_up {
                        return None;
                    }
                    done += 1;
                    self.wake(index, end);
                }
                Choice::WaitUntil(time) => self.wake(index, time),
                Choice::Wait => {}
            }
        }
        let actions = self.ranks.into_iter().map(|rank| rank.actions).collect();
        (done == total).then_some(Outcome { actions, cost })
    }

    fn wake(&mut self, rank: usize, time: f64) {
        if let Some(entry) = self.ranks.get_mut(rank).filter(|entry| time < entry.wake) {
            entry.wake = time.max(entry.free);
            self.queue.push(Reverse((Time(entry.wake), rank)));
        }
    }

    fn choose(&self, index: usize, now: f64) -> Option<Choice> {
        let rule = self.rules.get(index)?;
        let open = self.look(index, now)?;
        if let Some((stage, _)) = open.weights.filter(|_| open.postponed > rule.lag) {
            return Some(Choice::Do(Kind::WeightGrad, stage));
        }
        let rank = self.ranks.get(index)?;
        let forward_first = rule.in_turn && !rank.was_forward;
        let begun = if rank.actions.is_empty() { now } else { rank.free };
        let can_wait = |until: f64| rank.idle + (until - begun) <= rule.spare;
        // Without orders a gradient may be worth waiting for.
        let may_wait = rule.eager > 0.0 && self.orders.is_none() && open.next_gradient.is_finite();
        if let (Some(stage), None, true) = (open.forward, open.backward, may_wait) {
            let takes = self.problem.stages.get(stage)?.time[0];
            let until = open.next_gradient - now;
            if until < takes && until < rule.eager * takes && can_wait(open.next_gradient) {
                return Some(match open.weights {
                    Some((stage, _)) if until >= rule.patience * self.problem.stages.get(stage)?.time[2] => {
                        Choice::Do(Kind::WeightGrad, stage)
                    }
                    _ => Choice::WaitUntil(open.next_gradient),
                });
            }
        }
        let choice = match (open.forward, open.backward) {
            (Some(stage), None) => Choice::Do(Kind::Forward, stage),
            (Some(stage), Some(_)) if forward_first => Choice::Do(Kind::Forward, stage),
            (_, Some((stage, _))) => Choice::Do(Kind::InputGrad, stage),
            (None, None) => match open.weights {
                Some((stage, _)) => {
                    let takes = self.problem.stages.get(stage)?.time[2];
                    let is_worth_it = open.soonest - now < rule.patience * takes && can_wait(open.soonest);
                    if open.short_of_memory || !is_worth_it {
                        Choice::Do(Kind::WeightGrad, stage)
                    } else {
                        Choice::WaitUntil(open.soonest)
                    }
                }
                None if open.soonest.is_finite() => Choice::WaitUntil(open.soonest),
                None => Choice::Wait,
            },
        };
        Some(choice)
    }

    /// What a rank can do now.
    fn look(&self, index: usize, now: f64) -> Option<Open> {
        let (problem, rule, rank) = (self.problem, self.rules.get(index)?, self.ranks.get(index)?);
        let m = problem.m;
        let limit = problem.limit.get(index)? + problem.slack(index);
        let next = match self.orders {
            None => None,
            Some(orders) => Some(orders.get(index)?.get(rank.position).copied()),
        };
        let held = problem.stages_of(index);
        let mut open = Open { soonest: f64::INFINITY, next_gradient: f64::INFINITY, ..Open::default() };
        // Memory that the rank's later stages need for a micro-batch.
        let mut behind = 0.0;
        for &stage in held.iter().rev() {
            let (at, costs) = (self.progress.get(stage)?, problem.stages.get(stage)?);
            let [f, i, w] = at.done;
            let may = |forward: bool| next.is_none_or(|next| next == Some((stage, forward)));
            if may(true) && f < m && f < at.known[0] && open.forward.is_none() {
                let there = if stage == 0 { 0.0 } else { *self.arrivals[0].get(stage * m + f)? };
                let is_first = held.first() == Some(&stage);
                let (level, adds) = (rank.level, costs.memory[0]);
                let fits = if next.is_some() {
                    level + adds <= limit
                } else {
                    let keeps = is_first && held.len() > 1 && limit.is_finite();
                    level + adds + behind <= limit
                        && (!keeps || rank.first_level + adds <= limit - rule.kept * limit)
                };
                if next.is_none() && is_first && f - i >= rule.ahead {
                    // Enough for now.
                } else if !fits {
                    open.short_of_memory |= there <= now;
                } else if there <= now {
                    open.forward = Some(stage);
                } else {
                    open.soonest = open.soonest.min(there);
                }
            }
            if may(false) && i < f && i < at.known[1] {
                let there = if stage + 1 == problem.stages.len() {
                    0.0
                } else {
                    *self.arrivals[1].get(stage * m + i)?
                };
                if rank.level + costs.memory[1] > limit {
                    open.short_of_memory = true;
                } else if there > now {
                    open.soonest = open.soonest.min(there);
                    open.next_gradient = open.next_gradient.min(there);
                } else if open.backward.is_none_or(|(_, other)| i < other) {
                    open.backward = Some((stage, i));
                }
            }
            if w < i {
                open.postponed += i - w;
                if open.weights.is_none_or(|(_, other)| w < other) {
                    open.weights = Some((stage, w));
                }
            }
            behind += costs.memory[0].max(0.0);
        }
        Some(open)
    }

    /// Does it, and returns when it ends.
    fn perform(&mut self, index: usize, kind: Kind, stage: usize, now: f64) -> Option<f64> {
        let (m, last) = (self.problem.m, self.problem.stages.len() - 1);
        let part = match kind {
            Kind::Forward => 0,
            Kind::InputGrad => 1,
            _ => 2,
        };
        let costs = *self.problem.stages.get(stage)?;
        let at = self.progress.get_mut(stage)?;
        let microbatch = *at.done.get(part)?;
        *at.done.get_mut(part)? += 1;
        let end = now + costs.time.get(part)?;
        let effect = costs.memory.get(part)?;
        let rank = self.ranks.get_mut(index)?;
        if !rank.actions.is_empty() {
            rank.idle += now - rank.free;
        }
        rank.free = end;
        rank.level += effect;
        if self.problem.stages_of(index).first() == Some(&stage) {
            rank.first_level += effect;
        }
        if part < 2 {
            rank.was_forward = part == 0;
            rank.position += 1;
        }
        rank.actions.push(Action::new(kind, stage, Some(microbatch)).ok()?);
        let (target, table) = match part {
            0 if stage < last => (stage + 1, 0),
            1 if stage > 0 => (stage - 1, 1),
            _ => return Some(end),
        };
        let way = if table == 0 { costs.way } else { self.problem.stages.get(target)?.way };
        *self.arrivals.get_mut(table)?.get_mut(target * m + microbatch)? = end + way;
        *self.progress.get_mut(target)?.known.get_mut(table)? = microbatch + 1;
        let other = self.problem.stages.get(target)?.rank;
        // Whoever waits is to think again now that it is known when this arrives.
        self.wake(other, end + way);
        Some(end)
    }
}
