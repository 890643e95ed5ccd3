//! Schedules for given costs, within a memory limit.
//!
//! 1. What is found is valid and within the limit, and no worse than any schedule by name that fits the placement and the
//!    limit.
//! 2. It depends on nothing but the arguments: the effort is counted in actions, not in time.
//! 3. The bound is proven: no schedule within the limit costs less.
//!
//! The search tries rules (see `greedy`), and then changes the rules of single ranks as long as that helps.

mod bound;
mod climb;
mod exact;
mod greedy;
mod problem;
mod random;
mod reorder;
mod watch;

pub use watch::Progress;

use crate::error::{Error, Result};
use crate::schedule::{Costs, Maker, PerStage, Schedule, Simulation, is_limit};
use climb::{climb, portfolio, sparing};
use greedy::{Outcome, greedy};
use problem::Problem;
use reorder::reorder;
use watch::Watch;

/// How many actions are placed in the search for a better rule, unless it is chosen.
const EFFORT: usize = 3_000_000;

/// Schedules of more actions than this are searched by a few rules only, unless the effort is chosen.
const LARGE: usize = 20_000;

/// The first target of a proof, as a share of the way from the bound to the best that is known.
const FIRST_STEP: f64 = 0.125;

/// Costs that differ by less than this share are the same.
const ROUNDING: f64 = 1e-9;

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
        if over <= ROUNDING * self.lower_bound { 0.0 } else { over / self.lower_bound }
    }
}

/// What can be chosen about a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Search {
    /// How many schedules are tried after the first few; `None`: fewer, the larger they are.
    pub effort: Option<usize>,
    /// Whether to go on until the schedule is proven to be the best: its cost the least that there is, without
    /// recomputations. That may take for ever, but for small ones.
    pub exact: bool,
}

/// Searches for the schedule of least cost (the longest time from the start of a rank's first action to the end of its last;
/// then the least makespan) for `microbatches` through stages that are placed on `placement`'s ranks, with no rank ever
/// holding more than its limit.
///
/// `watch` is told from time to time how far the search has come, and says whether to go on.
///
/// # Errors
/// [`Error::NoSchedule`] if none is found within the limit, and those of [`Schedule::new`] and [`Costs::check`].
pub fn search(
    placement: &[usize],
    microbatches: usize,
    costs: &Costs,
    limit: Option<&PerStage>,
    options: Search,
    watch: &mut dyn FnMut(Progress) -> bool,
) -> Result<Found> {
    let ranks = placement.iter().max().map_or(0, |rank| rank + 1);
    Schedule::new("search", placement, microbatches, true, vec![Vec::new(); ranks])?;
    costs.check(Some(placement.len()))?;
    check_limit(limit, ranks)?;
    let problem = Problem::new(ranks, microbatches, placement, costs, limit)?;
    let mut watch = Watch::new(watch, bound::lower_bound(&problem));
    let mut best = Best { problem: &problem, placement, costs, found: None };
    by_rules(&problem, options.effort, &mut best, &mut watch)?;
    if options.exact && exact::applies(&problem, costs) {
        by_proof(&problem, &mut best, &mut watch)?;
    }
    let bound = watch.progress().lower_bound;
    let (schedule, simulation) = best.found.ok_or(Error::NoSchedule)?;
    // Where they differ by rounding only, they are the same.
    let is_reached = simulation.cost() <= bound * (1.0 + ROUNDING);
    let lower_bound = if is_reached { simulation.cost() } else { bound };
    Ok(Found { schedule, simulation, lower_bound })
}

/// The best that a number of tries finds.
fn by_rules(
    problem: &Problem,
    effort: Option<usize>,
    best: &mut Best<'_>,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let actions = 3 * problem.stages.len() * problem.m;
    let is_large = effort.is_none() && actions > LARGE;
    let effort = effort.unwrap_or(if is_large { 0 } else { EFFORT / actions });
    for &maker in Maker::ALL {
        best.try_maker(maker)?;
    }
    let mut tried = Vec::new();
    let bound = watch.progress().lower_bound;
    for round in 0..3 {
        let rules = match round {
            0 => sparing(problem, bound, is_large),
            1 => portfolio(problem, is_large),
            _ => sparing(problem, best.cost(), is_large),
        };
        for rules in rules {
            let is_best = best.cost() <= bound * (1.0 + ROUNDING / 2.0);
            if best.found.is_some() && (is_best || !watch.keep_on(best.cost())) {
                break;
            }
            if let Some(outcome) = greedy(problem, &rules, None, f64::INFINITY) {
                tried.push((outcome.cost, rules));
                best.offer(outcome)?;
            }
        }
    }
    tried.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let Some((cost, rules)) = tried.into_iter().next() {
        let climbed = climb(problem, rules, cost, bound, effort, watch);
        if let Some(outcome) = climbed {
            best.offer(outcome)?;
        }
    }
    if let Some((schedule, simulation)) = best.found.as_ref().filter(|_| effort > 0)
        && let Some(outcome) = reorder(problem, schedule, simulation.cost(), bound, effort, watch)
    {
        best.offer(outcome)?;
    }
    Ok(())
}

/// Raises the bound, and finds what is better, until nothing can be.
fn by_proof(problem: &Problem, best: &mut Best<'_>, watch: &mut Watch<'_>) -> Result<()> {
    watch.prove(exact::root_bound(problem));
    // Targets near the bound are quickly refuted; each step is twice the one before.
    let mut step = (best.cost() - watch.progress().lower_bound) * FIRST_STEP;
    loop {
        let (cost, bound) = (best.cost(), watch.progress().lower_bound);
        // Half of it, so that what ends here counts as proven.
        if cost <= bound * (1.0 + ROUNDING / 2.0) || !watch.keep_on(cost) {
            return Ok(());
        }
        let target = if cost.is_finite() { cost.min(bound + step) } else { cost };
        step *= 2.0;
        let verdict = exact::prove(problem, target, &mut || watch.keep_on(cost));
        match verdict {
            exact::Verdict::None => watch.prove(target),
            exact::Verdict::Best(outcome) => {
                watch.prove(outcome.cost);
                best.offer(outcome)?;
            }
            exact::Verdict::Stopped(outcome) => {
                return outcome.map_or(Ok(()), |outcome| best.offer(outcome));
            }
        }
    }
}

fn check_limit(limit: Option<&PerStage>, ranks: usize) -> Result<()> {
    match limit {
        Some(PerStage::Each(limits)) if limits.len() != ranks => {
            Err(Error::LimitsDiffer { given: limits.len(), ranks })
        }
        Some(limit) => (0..ranks)
            .map(|rank| limit.of(rank))
            .find(|&limit| !is_limit(limit))
            .map_or(Ok(()), |value| Err(Error::BadLimit { value })),
        None => Ok(()),
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
    /// Infinite before there is a schedule.
    fn cost(&self) -> f64 {
        self.found.as_ref().map_or(f64::INFINITY, |(_, simulation)| simulation.cost())
    }

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
