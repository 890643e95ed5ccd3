//! Schedules for given costs, within a memory limit.
//!
//! 1. What is found is valid and within the limit, and no worse than any schedule by name that fits the placement and the
//!    limit.
//! 2. It depends on nothing but the arguments: the effort is counted in actions, not in time.
//! 3. The bound is proven: no schedule within the limit costs less.
//!
//! The search tries rules (see `greedy`), and then changes the rules of single ranks as long as that helps.

mod bound;
mod greedy;
mod problem;

use crate::error::{Error, Result};
use crate::schedule::{Costs, Kind, Maker, PerStage, Schedule, Simulation};
use greedy::{Order, Outcome, Rule, greedy};
use problem::Problem;

/// How many actions are placed in the search for a better rule, unless it is chosen.
const EFFORT: usize = 3_000_000;

/// Schedules of more actions than this are searched by a few rules only, unless the effort is chosen.
const LARGE: usize = 20_000;

/// What a search found.
#[derive(Debug, Clone)]
pub struct Found {
    /// The best schedule.
    pub schedule: Schedule,
    /// The same in time.
    pub simulation: Simulation,
    /// No schedule within the limit has a smaller [`Simulation::cost`].
    pub lower_bound: f64,
}

impl Found {
    /// How far the schedule may be from the best that there is, as a share of the bound: 0 if it is proven to be the best.
    pub fn gap(&self) -> f64 {
        let over = self.simulation.cost() - self.lower_bound;
        if over <= 1e-9 * self.lower_bound { 0.0 } else { over / self.lower_bound }
    }
}

/// Searches for the schedule of least cost (the longest time from the start of a rank's first action to the end of its last;
/// then the least makespan) for `microbatches` through stages that are placed on `placement`'s ranks, with no rank ever
/// holding more than its limit.
///
/// `effort` is how many schedules are tried after the first few (`None`: fewer, the larger they are); `keep_on` is asked before each whether to go on.
///
/// # Errors
/// [`Error::NoSchedule`] if none is found within the limit, and those of [`Schedule::new`] and [`Costs::check`].
pub fn search(
    placement: &[usize],
    microbatches: usize,
    costs: &Costs,
    limit: Option<&PerStage>,
    effort: Option<usize>,
    keep_on: &mut dyn FnMut() -> bool,
) -> Result<Found> {
    // Once told to stop, it is not asked again: an interruption is said once.
    let mut stopped = false;
    let keep_on: &mut dyn FnMut() -> bool = &mut || {
        stopped = stopped || !keep_on();
        !stopped
    };
    let ranks = placement.iter().max().map_or(0, |rank| rank + 1);
    Schedule::new("search", placement, microbatches, true, vec![Vec::new(); ranks])?;
    costs.check(Some(placement.len()))?;
    check_limit(limit, ranks)?;
    let problem = Problem::new(ranks, microbatches, placement, costs, limit)?;
    let actions = 3 * placement.len() * microbatches;
    let is_large = effort.is_none() && actions > LARGE;
    let effort = effort.unwrap_or(if is_large { 0 } else { EFFORT / actions });
    let mut best = Best { problem: &problem, placement, costs, found: None };
    for &maker in Maker::ALL {
        best.try_maker(maker)?;
    }
    let mut tried = Vec::new();
    for rules in portfolio(&problem, is_large) {
        if best.found.is_some() && !keep_on() {
            break;
        }
        if let Some(outcome) = greedy(&problem, &rules, None, f64::INFINITY) {
            tried.push((outcome.cost, rules));
            best.offer(outcome)?;
        }
    }
    tried.sort_by(|a, b| a.0.total_cmp(&b.0));
    let lower_bound = bound::lower_bound(&problem);
    if let Some((cost, rules)) = tried.into_iter().next() {
        let climbed = climb(&problem, rules, cost, lower_bound, effort, keep_on);
        if let Some(outcome) = climbed {
            best.offer(outcome)?;
        }
    }
    if let Some((schedule, simulation)) = best.found.as_ref().filter(|_| effort > 0)
        && let Some(outcome) = reorder(&problem, schedule, simulation.cost(), lower_bound, effort, keep_on)
    {
        best.offer(outcome)?;
    }
    let (schedule, simulation) = best.found.ok_or(Error::NoSchedule)?;
    Ok(Found { schedule, simulation, lower_bound })
}

fn check_limit(limit: Option<&PerStage>, ranks: usize) -> Result<()> {
    match limit {
        Some(PerStage::Each(limits)) if limits.len() != ranks => {
            Err(Error::LimitsDiffer { given: limits.len(), ranks })
        }
        Some(limit) if (0..ranks).any(|rank| limit.of(rank).is_nan()) => {
            Err(Error::BadMemory { what: "memory_limit", value: f64::NAN })
        }
        _ => Ok(()),
    }
}

/// The best so far.
struct Best<'a> {
    problem: &'a Problem,
    placement: &'a [usize],
    costs: &'a Costs,
    found: Option<(Schedule, Simulation)>,
}

impl Best<'_> {
    fn try_maker(&mut self, maker: Maker) -> Result<()> {
        let (p, m) = (self.problem.ranks(), self.problem.m);
        let stages = self.placement.len();
        if !stages.is_multiple_of(p) {
            return Ok(());
        }
        // With one stage on each rank these are other makers' schedules under other names.
        let doubled = [Maker::LoopedBfs, Maker::InterleavedZb];
        // These keep all forwards' activations, those of a rank's first stage at the least.
        let keeps_all = [Maker::Gpipe, Maker::LoopedBfs].contains(&maker)
            && self.problem.holds_all_forwards() == Some(false);
        if stages == p && doubled.contains(&maker) || keeps_all {
            return Ok(());
        }
        // Most are for another number of stages, or for other numbers of micro-batches.
        let Ok(schedule) = maker.make(p, m, Some(stages / p)) else { return Ok(()) };
        if schedule.placement().eq(self.placement.iter().copied()) {
            self.judge(schedule)?;
        }
        Ok(())
    }

    fn offer(&mut self, outcome: Outcome) -> Result<()> {
        let Outcome { actions, .. } = outcome;
        self.judge(Schedule::new("search", self.placement, self.problem.m, true, actions)?)
    }

    fn judge(&mut self, schedule: Schedule) -> Result<()> {
        let simulation = schedule.simulate(self.costs)?;
        let too_much = |(rank, &peak): (usize, &f64)| {
            self.problem.limit.get(rank).is_some_and(|limit| peak > limit + self.problem.slack(rank))
        };
        if simulation.peak_memory().iter().enumerate().any(too_much) {
            return Ok(());
        }
        let better = self.found.as_ref().is_none_or(|(_, best)| {
            let order = simulation.cost().total_cmp(&best.cost());
            order.then(simulation.makespan().total_cmp(&best.makespan())).is_lt()
        });
        if better {
            self.found = Some((schedule, simulation));
        }
        Ok(())
    }
}

/// Rules to begin with, the same for all ranks but for their place in the pipeline.
fn portfolio(problem: &Problem, is_large: bool) -> Vec<Vec<Rule>> {
    let p = problem.ranks();
    let stages = problem.stages.len();
    let many = stages > p;
    let mut all = Vec::new();
    let kept: &[f64] = if many { &[0.0, 0.5, 1.0] } else { &[0.0] };
    let patiences: &[f64] = if is_large { &[1.0] } else { &[1.0, 0.5, 0.0] };
    for &patience in patiences {
        for &in_turn in &[true, false] {
            for &kept in kept {
                for ahead in 0..3 {
                    let rule = |rank: usize| {
                        let distance = p - rank;
                        #[allow(clippy::cast_precision_loss)]
                        let share = rank as f64 / p as f64 / 2.0;
                        Rule {
                            ahead: match ahead {
                                0 => usize::MAX,
                                1 if many => 2 * p,
                                1 => 2 * distance - 1,
                                _ if many => 2 * distance,
                                _ => distance,
                            },
                            in_turn,
                            patience,
                            lag: usize::MAX,
                            kept: kept * share,
                        }
                    };
                    all.push((0..p).map(rule).collect());
                }
            }
        }
    }
    all
}

/// Changes the rules of single ranks as long as that helps.
fn climb(
    problem: &Problem,
    mut rules: Vec<Rule>,
    mut cost: f64,
    lower_bound: f64,
    effort: usize,
    keep_on: &mut dyn FnMut() -> bool,
) -> Option<Outcome> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut best = None;
    for _ in 0..effort {
        if cost <= lower_bound || !keep_on() {
            break;
        }
        let mut changed = rules.clone();
        for _ in 0..=random.below(2) {
            let rank = random.below(rules.len());
            let Some(rule) = changed.get_mut(rank) else { continue };
            match random.below(5) {
                0 => rule.ahead = 1 + random.below(2 * problem.stages.len()),
                1 => rule.in_turn = !rule.in_turn,
                2 => rule.patience = random.tenths(13),
                3 => rule.lag = random.below(2 * problem.ranks() + 1),
                _ => rule.kept = random.tenths(10),
            }
        }
        if let Some(outcome) = greedy(problem, &changed, None, cost * (1.0 + 1e-12))
            && outcome.cost <= cost
        {
            (rules, cost) = (changed, outcome.cost);
            best = Some(outcome);
        }
    }
    best
}

/// Takes the order of a schedule's forwards and input's gradients, places the weights' gradients anew, and changes the order
/// as long as that does no harm.
fn reorder(
    problem: &Problem,
    schedule: &Schedule,
    mut cost: f64,
    lower_bound: f64,
    effort: usize,
    keep_on: &mut dyn FnMut() -> bool,
) -> Option<Outcome> {
    let order = |rank| -> Order {
        let actions = schedule.actions(rank).unwrap_or_default().iter();
        let ordered = actions.filter_map(|action| match action.kind() {
            Kind::Forward => Some((action.stage(), true)),
            Kind::Backward | Kind::InputGrad => Some((action.stage(), false)),
            _ => None,
        });
        ordered.collect()
    };
    let mut orders: Vec<_> = (0..problem.ranks()).map(order).collect();
    let rule = |patience| Rule { ahead: usize::MAX, in_turn: false, patience, lag: usize::MAX, kept: 0.0 };
    let mut rules = vec![rule(1.0); problem.ranks()];
    let mut best = None;
    let mut start = f64::INFINITY;
    for patience in [1.0, 0.75, 0.5, 0.25, 0.0] {
        if !keep_on() {
            return best;
        }
        let uniform = vec![rule(patience); problem.ranks()];
        if let Some(outcome) = greedy(problem, &uniform, Some(&orders), start) {
            start = outcome.cost;
            rules = uniform;
            if outcome.cost < cost {
                cost = outcome.cost;
                best = Some(outcome);
            }
        }
    }
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut current = start;
    for _ in 0..effort {
        if cost <= lower_bound || !keep_on() {
            break;
        }
        let rank = random.below(orders.len());
        let Some(change) = Change::of(&mut random, &mut rules, &mut orders, rank) else { continue };
        match greedy(problem, &rules, Some(&orders), current * (1.0 + 1e-12)) {
            Some(outcome) => {
                current = outcome.cost;
                if outcome.cost < cost {
                    cost = outcome.cost;
                    best = Some(outcome);
                }
            }
            None => change.undo(&mut rules, &mut orders, rank),
        }
    }
    best
}

/// What was changed about a rank.
enum Change {
    /// Its patience, which was this before.
    Patience(f64),
    /// Its order: what stood first in this range stands last.
    Moved(std::ops::RangeInclusive<usize>),
}

impl Change {
    /// Changes one thing; `None` if nothing was changed.
    fn of(random: &mut Random, rules: &mut [Rule], orders: &mut [Order], rank: usize) -> Option<Self> {
        let near_the_end = 4 * orders.len();
        let (rule, order) = (rules.get_mut(rank)?, orders.get_mut(rank)?);
        if random.below(4) == 0 {
            let before = rule.patience;
            rule.patience = random.tenths(13);
            return Some(Self::Patience(before));
        }
        // The beginning and the end matter most.
        let edge = near_the_end.min(order.len());
        let from = match random.below(3) {
            0 => random.below(edge),
            1 => order.len().checked_sub(1 + random.below(edge))?,
            _ => random.below(order.len()),
        };
        let range = from..=(from + 1 + random.below(3)).min(order.len().checked_sub(1)?);
        let moved = order.get_mut(range.clone()).filter(|moved| moved.first() != moved.last())?;
        moved.rotate_left(1);
        Some(Self::Moved(range))
    }

    fn undo(self, rules: &mut [Rule], orders: &mut [Order], rank: usize) {
        match self {
            Self::Patience(before) => {
                rules.iter_mut().skip(rank).take(1).for_each(|rule| rule.patience = before);
            }
            Self::Moved(range) => {
                if let Some(moved) = orders.get_mut(rank).and_then(|order| order.get_mut(range)) {
                    moved.rotate_right(1);
                }
            }
        }
    }
}

/// Numbers that look random and are always the same.
struct Random(u64);

impl Random {
    #[allow(clippy::cast_possible_truncation)] // less than `limit`
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    /// Less than so many tenths.
    fn tenths(&mut self, limit: u8) -> f64 {
        f64::from(u8::try_from(self.below(limit.into())).unwrap_or(0)) / 10.0
    }
}
