//! Rules to begin with, and better ones near them.

use super::greedy::{Outcome, Rule, greedy};
use super::problem::Problem;
use super::random::Random;
use super::watch::Watch;

/// How far ahead of its gradients a rank runs.
#[derive(Clone, Copy)]
enum Ahead {
    /// As far as its memory goes.
    Memory,
    /// As far as the way to the last rank and back.
    ThereAndBack,
    /// As far as the way to the last rank.
    There,
}

/// Patience, eagerness, whether in turn, how far ahead.
type Choice = (f64, f64, bool, Ahead);

/// Rules to begin with, in this order where there is time for few.
const FEW: [Choice; 5] = [
    (0.0, 1.0, true, Ahead::Memory),
    (1.0, 0.0, true, Ahead::Memory),
    (0.0, 0.6, true, Ahead::Memory),
    (0.0, 0.0, true, Ahead::ThereAndBack),
    (1.0, 0.0, false, Ahead::There),
];

/// Rules to begin with, the same for all ranks but for their place in the pipeline.
pub(super) fn portfolio(problem: &Problem, is_large: bool) -> Vec<Vec<Rule>> {
    let all_rules = || {
        let patience_and_eagerness = [1.0, 0.5, 0.0]
            .into_iter()
            .flat_map(|patience| [0.0, 0.4, 0.6, 0.8, 1.0].map(|eager| (patience, eager)));
        patience_and_eagerness.flat_map(|(patience, eager)| {
            [true, false].into_iter().flat_map(move |in_turn| {
                let ahead = [Ahead::Memory, Ahead::ThereAndBack, Ahead::There];
                ahead.map(move |ahead| (patience, eager, in_turn, ahead))
            })
        })
    };
    let chosen: Vec<_> = if is_large { FEW.to_vec() } else { all_rules().collect() };
    of_all_ranks(problem, &chosen, |_| f64::INFINITY)
}

/// Rules for a schedule of that cost: a rank waits for what arrives soon only as long as it can afford it. So those that have
/// time hold up nobody, and those that have none do what they can.
pub(super) fn sparing(problem: &Problem, cost: f64, is_large: bool) -> Vec<Vec<Rule>> {
    let shares: &[f64] = if is_large { &[1.0] } else { &[1.0, 0.9, 0.8, 0.6] };
    let orders: &[(bool, Ahead)] = if is_large {
        &[(true, Ahead::Memory)]
    } else {
        &[
            (true, Ahead::Memory),
            (true, Ahead::ThereAndBack),
            (false, Ahead::Memory),
            (false, Ahead::ThereAndBack),
        ]
    };
    let chosen: Vec<_> = orders.iter().map(|&(in_turn, ahead)| (1.0, 1.0, in_turn, ahead)).collect();
    let of_share = |share: &f64| of_all_ranks(problem, &chosen, |rank| share * (cost - problem.work(rank)));
    shares.iter().flat_map(of_share).collect()
}

fn of_all_ranks(problem: &Problem, chosen: &[Choice], spare: impl Fn(usize) -> f64) -> Vec<Vec<Rule>> {
    let p = problem.ranks();
    let many = problem.stages.len() > p;
    let kept: &[f64] = if many { &[0.0, 0.5, 1.0] } else { &[0.0] };
    let rules = |kept: f64, (patience, eager, in_turn, ahead): Choice| {
        let rule = |rank: usize| {
            let distance = p - rank;
            #[allow(clippy::cast_precision_loss)]
            let kept = kept * (rank as f64 / p as f64 / 2.0);
            let ahead = match ahead {
                Ahead::Memory => usize::MAX,
                Ahead::ThereAndBack if many => 2 * p,
                Ahead::ThereAndBack => 2 * distance - 1,
                Ahead::There if many => 2 * distance,
                Ahead::There => distance,
            };
            Rule { ahead, in_turn, patience, eager, lag: usize::MAX, kept, spare: spare(rank) }
        };
        (0..p).map(rule).collect()
    };
    chosen
        .iter()
        .flat_map(|&choice| kept.iter().map(move |&kept| (kept, choice)))
        .map(|(kept, choice)| rules(kept, choice))
        .collect()
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
            match random.below(7) {
                0 => rule.ahead = 1 + random.below(2 * problem.stages.len()),
                1 => rule.in_turn = !rule.in_turn,
                2 => rule.patience = random.tenths(13),
                3 => rule.eager = random.tenths(11),
                4 => rule.lag = random.below(2 * problem.ranks() + 1),
                5 => rule.spare = random.tenths(13) * (cost - problem.work(rank)),
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
