//! Balance: the invariants of `balance/mod.rs` against all divisions there are, and every error.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use std::cmp::Reverse;

use proptest::collection::vec;
use proptest::prelude::*;
use torchrelay_core::{Cost, Error, MAX_CELLS, balance};

/// Every division of so many layers into so many parts.
fn divisions(layers: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 1 {
        return vec![vec![layers]];
    }
    let first_parts = 1..=layers - (parts - 1);
    let with = |first| {
        divisions(layers - first, parts - 1).into_iter().map(move |rest| [vec![first], rest].concat())
    };
    first_parts.flat_map(with).collect()
}

fn sums(costs: &[u128], sizes: &[usize]) -> Vec<u128> {
    let mut costs = costs.iter();
    sizes.iter().map(|&size| costs.by_ref().take(size).sum()).collect()
}

/// What the documentation says, taken literally.
fn model(costs: &[u128], parts: usize) -> Vec<usize> {
    let rank = |sizes: &Vec<usize>| {
        let sums = sums(costs, sizes);
        let squares: u128 = sums.iter().map(|sum| sum * sum).sum();
        let layers: usize = sizes.iter().map(|size| size * size).sum();
        (*sums.iter().max().unwrap(), squares, layers, Reverse(sizes.clone()))
    };
    divisions(costs.len(), parts).into_iter().min_by_key(rank).unwrap()
}

/// The same by trying every cut from every place, part by part: for more layers than have their divisions counted.
fn by_every_cut(costs: &[u64], parts: usize) -> Vec<usize> {
    let layers = costs.len();
    let mut before = vec![0u128];
    for &cost in costs {
        before.push(before[before.len() - 1] + u128::from(cost));
    }
    // For each number of parts, counted from the last one, and each beginning: the smallest largest cost.
    let mut largest = vec![vec![u128::MAX; layers + 1]; parts + 1];
    largest[0][layers] = 0;
    for k in 1..=parts {
        for begin in 0..layers {
            let part = |end: usize| (before[end] - before[begin]).max(largest[k - 1][end]);
            largest[k][begin] = (begin + 1..=layers).map(part).min().unwrap();
        }
    }
    let limit = largest[parts][0];
    let mut best = vec![vec![None; layers + 1]; parts + 1];
    best[0][layers] = Some((0u128, 0, 0));
    for k in 1..=parts {
        for begin in 0..layers {
            let part = |end: usize| {
                let (cost, count) = (before[end] - before[begin], end - begin);
                let (squares, counts, _) = best[k - 1][end]?;
                (cost <= limit).then_some((squares + cost * cost, counts + count * count, Reverse(end)))
            };
            best[k][begin] = (begin + 1..=layers)
                .filter_map(part)
                .min()
                .map(|(squares, counts, end)| (squares, counts, end.0));
        }
    }
    let (mut sizes, mut begin) = (Vec::new(), 0);
    for k in (1..=parts).rev() {
        let (_, _, end) = best[k][begin].unwrap();
        sizes.push(end - begin);
        begin = end;
    }
    sizes
}

/// A model with layers that cost more than the fair share of others: the cuts between the others can be anywhere.
fn skewed() -> impl Strategy<Value = (Vec<u64>, usize)> {
    let most = prop_oneof![Just(1u64), Just(3), Just(50), Just(1_000_000)];
    most.prop_flat_map(|most| {
        let cost = prop_oneof![8 => 0..=most, 1 => Just(0), 1 => Just(most)];
        (
            vec(cost, 20..90),
            vec((any::<prop::sample::Index>(), 1..400u64), 1..4),
            any::<prop::sample::Index>(),
            Just(most),
        )
    })
    .prop_map(|(mut costs, large, parts, most)| {
        for (place, times) in large {
            let place = place.index(costs.len());
            costs[place] = times * most;
        }
        let parts = parts.index(costs.len()) + 1;
        (costs, parts)
    })
}

/// Costs, many of them equal or zero, and a number of parts that fits.
fn cases(largest: u64) -> impl Strategy<Value = (Vec<u64>, usize)> {
    let cost = prop_oneof![2 => Just(0), 3 => 0..4u64, 5 => 0..=largest];
    vec(cost, 1..11).prop_flat_map(|costs| (Just(costs.clone()), 1..=costs.len()))
}

fn wide(costs: &[u64]) -> Vec<u128> {
    costs.iter().map(|&cost| u128::from(cost)).collect()
}

#[allow(clippy::cast_precision_loss)] // small numbers
fn floats(costs: &[u64], factor: f64) -> Vec<f64> {
    costs.iter().map(|&cost| cost as f64 * factor).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn invariants_1_to_4_against_all_divisions((costs, parts) in cases(40)) {
        let sizes = balance(&costs, parts).unwrap();
        prop_assert_eq!(sizes.iter().sum::<usize>(), costs.len());
        prop_assert!(sizes.len() == parts && !sizes.contains(&0));
        prop_assert_eq!(sizes, model(&wide(&costs), parts));
    }

    #[test]
    fn the_scale_makes_no_difference((costs, parts) in cases(40), exponent in -1074i32..1000) {
        // The smallest factors leave the numbers without a leading one, the largest let sums pass the largest float.
        let scaled = floats(&costs, 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2));
        prop_assert_eq!(balance(&scaled, parts), balance(&costs, parts));
    }

    #[test]
    fn invariant_2_for_integers_of_64_bits((costs, parts) in cases(u64::MAX)) {
        let (costs, sizes) = (wide(&costs), balance(&costs, parts).unwrap());
        let best = model(&costs.iter().map(|cost| cost / 16).collect::<Vec<_>>(), parts); // so that squares fit
        prop_assert!(sums(&costs, &sizes).iter().max() <= sums(&costs, &best).iter().max());
        let least = divisions(costs.len(), parts).iter().map(|sizes| *sums(&costs, sizes).iter().max().unwrap()).min();
        prop_assert_eq!(sums(&costs, &sizes).into_iter().max(), least);
    }

    #[test]
    fn invariant_2_for_magnitudes_that_floats_cannot_add((costs, parts) in cases(3), far in 1usize..8) {
        // Each cost is followed by one that is smaller by more than a float can hold beside it; as integers, both count.
        let far = i32::try_from(far).unwrap() * 10 + 50;
        let mixed: Vec<f64> = costs.iter().zip(0..).map(|(&cost, i)| {
            floats(&[cost], 2f64.powi(if i % 2 == 0 { far } else { -far }))[0]
        }).collect();
        // In units of 2^-far they have up to 260 bits: compare as (large, small) pairs, whose sums never carry.
        let pairs: Vec<(u64, u64)> =
            costs.iter().zip(0..).map(|(&cost, i)| if i % 2 == 0 { (cost, 0) } else { (0, cost) }).collect();
        let largest = |sizes: &Vec<usize>| {
            let mut pairs = pairs.iter();
            let part = |&size: &usize| pairs.by_ref().take(size).fold((0, 0), |sum, pair| (sum.0 + pair.0, sum.1 + pair.1));
            sizes.iter().map(part).max().unwrap()
        };
        let least = divisions(costs.len(), parts).iter().map(largest).min().unwrap();
        prop_assert_eq!(largest(&balance(&mixed, parts).unwrap()), least);
    }

    #[test]
    fn skewed_ones_are_divided_as_if_every_cut_was_tried((costs, parts) in skewed()) {
        prop_assert_eq!(balance(&costs, parts).unwrap(), by_every_cut(&costs, parts));
    }

    #[test]
    fn large_ones_are_as_good_as_bisection_finds(costs in vec(0u64..1000, 200..400), parts in 1usize..60) {
        let sizes = balance(&costs, parts).unwrap();
        let most = sums(&wide(&costs), &sizes).into_iter().max().unwrap();
        // One less is not enough for as many parts.
        let (mut needed, mut sum) = (1, 0);
        for &cost in &costs {
            sum += u128::from(cost);
            if sum >= most {
                (needed, sum) = (needed + 1, u128::from(cost));
            }
        }
        prop_assert!(needed > parts || wide(&costs).contains(&most));
    }
}

#[test]
fn ties_go_towards_even() {
    let table: [(&[u64], usize, &[usize]); 10] = [
        (&[1, 1, 1, 1], 2, &[2, 2]),
        (&[1, 1, 1, 1, 1], 2, &[3, 2]),
        (&[1, 1, 1, 1, 10], 3, &[2, 2, 1]),
        (&[10, 1, 1, 1, 1], 3, &[1, 2, 2]),
        (&[1, 1, 10, 1, 1], 3, &[2, 1, 2]),
        (&[0, 0, 0, 0], 2, &[2, 2]),
        (&[0, 0, 3, 0], 3, &[2, 1, 1]),
        (&[0, 0, 0, 7], 4, &[1, 1, 1, 1]),
        (&[5], 1, &[1]),
        (&[10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 5, &[1, 4, 4, 3, 3]),
    ];
    for (costs, parts, expected) in table {
        assert_eq!(balance(costs, parts).unwrap(), expected, "{costs:?} into {parts}");
    }
}

#[test]
fn equal_layers_are_divided_evenly_however_many() {
    for (layers, parts) in [(10_000, 256), (1 << 16, 7), (999, 998)] {
        let sizes = balance(&vec![0.1; layers], parts).unwrap();
        assert!(
            sizes.is_sorted_by(|a, b| a >= b) && sizes[0] - sizes[parts - 1] <= 1,
            "{layers} into {parts}"
        );
    }
}

#[test]
fn integers_and_floats_may_be_mixed() {
    assert_eq!(balance(&[Cost::Whole(2), Cost::Real(1.0), Cost::Real(1.0)], 2).unwrap(), [1, 2]);
    assert_eq!(balance(&[Cost::Real(0.5), Cost::Real(0.5), Cost::Whole(1)], 2).unwrap(), [2, 1]);
    // As floats these would all be equal.
    let costs = [
        Cost::Whole((1 << 53) + 1),
        Cost::Real(9_007_199_254_740_992.0),
        Cost::Whole(1 << 53),
        Cost::Real(0.5),
    ];
    assert_eq!(balance(&costs, 3).unwrap(), [1, 1, 2]);
    let costs = [Cost::Whole(1 << 53), Cost::Real(0.5), Cost::Whole((1 << 53) + 1), Cost::Real(0.0)];
    assert_eq!(balance(&costs, 2).unwrap(), [2, 2]);
}

#[test]
fn errors_say_what_is_wrong_and_what_would_fit() {
    let message = |costs: &[f64], parts| balance(costs, parts).unwrap_err().to_string();
    assert_eq!(balance(&[1.0], 0), Err(Error::NotPositive { what: "the number of parts", value: 0 }));
    assert_eq!(balance(&[1u64, 1], 3), Err(Error::TooManyParts { parts: 3, layers: 2 }));
    assert!(message(&[1.0, 2.0], 3).ends_with("at most 2 parts would fit"));
    assert!(message(&[], 1).contains("0 layers"));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, -f64::MIN_POSITIVE] {
        assert!(message(&[0.0, 1.0, bad, bad], 2).contains("position 2"), "{bad}");
    }
    assert!(matches!(balance(&vec![0u64; MAX_CELLS + 1], 1), Err(Error::TooLarge { .. })));
    assert!(matches!(balance(&vec![0u64; 100_000], 1000), Err(Error::TooLarge { .. })));
}

#[test]
fn minus_zero_is_zero() {
    assert_eq!(balance(&[-0.0, 1.0, -0.0], 2).unwrap(), balance(&[0.0, 1.0, 0.0], 2).unwrap());
}
