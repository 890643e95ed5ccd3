//! Better orders near one that is known.

use super::greedy::{Order, Outcome, Rule, greedy};
use super::problem::Problem;
use super::random::Random;
use super::watch::Watch;
use crate::schedule::{Kind, Schedule};

/// Takes the order of a schedule's forwards and input's gradients, places the weights' gradients anew, and changes the order
/// as long as that does no harm.
pub(super) fn reorder(
    problem: &Problem,
    schedule: &Schedule,
    mut cost: f64,
    lower_bound: f64,
    effort: usize,
    watch: &mut Watch<'_>,
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
    let rule = |patience| Rule {
        ahead: usize::MAX,
        in_turn: false,
        patience,
        eager: 0.0,
        lag: usize::MAX,
        kept: 0.0,
        spare: f64::INFINITY,
    };
    let mut rules = vec![rule(1.0); problem.ranks()];
    let mut best = None;
    let mut start = f64::INFINITY;
    for patience in [1.0, 0.75, 0.5, 0.25, 0.0] {
        if !watch.keep_on(cost) {
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
        if cost <= lower_bound || !watch.keep_on(cost) {
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
