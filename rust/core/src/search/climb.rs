//! Rules to begin with, and better ones near them.

use super::greedy::{Outcome, Rule, greedy};
use super::problem::Problem;
use super::random::Random;
use super::watch::Watch;

/// Rules to begin with, the same for all ranks but for their place in the pipeline.
pub(super) fn portfolio(problem: &Problem, is_large: bool) -> Vec<Vec<Rule>> {
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
pub(super) fn climb(
    problem: &Problem,
    mut rules: Vec<Rule>,
    mut cost: f64,
    lower_bound: f64,
    effort: usize,
    watch: &mut Watch<'_>,
) -> Option<Outcome> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut best = None;
    for _ in 0..effort {
        if cost <= lower_bound || !watch.keep_on(cost) {
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
