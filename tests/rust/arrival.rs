//! Buckets by arrival and the check of given ones. Numbers are those of the invariants of `bucket/arrival.rs`.

#![allow(clippy::indexing_slicing, clippy::unwrap_used)] // what fails here shall fail the test

use proptest::collection::vec;
use proptest::prelude::*;
use torchrelay_core::{
    Error, agreed_order, assign_buckets, buckets_by_arrival, reduction_end, verify_buckets,
};

#[derive(Debug, Clone)]
struct Case {
    sizes: Vec<i64>,
    keys: Vec<u8>,
    sparse: Vec<bool>,
    limits: Vec<i64>,
    arrival: Vec<i64>,
}

fn cases() -> impl Strategy<Value = Case> {
    (vec((0i64..60, 0u8..3, prop::bool::weighted(0.2)), 0..30), vec(0i64..150, 1..4)).prop_flat_map(
        |(tensors, limits)| {
            let names: Vec<_> = (0i64..).take(tensors.len()).collect();
            Just(names).prop_shuffle().prop_map(move |arrival| Case {
                sizes: tensors.iter().map(|tensor| tensor.0).collect(),
                keys: tensors.iter().map(|tensor| tensor.1).collect(),
                sparse: tensors.iter().map(|tensor| tensor.2).collect(),
                limits: limits.clone(),
                arrival,
            })
        },
    )
}

proptest! {
    /// Invariants 2 and 3.
    #[test]
    fn buckets_can_be_carried_out_and_are_in_the_order_of_their_last_gradient(case in cases()) {
        let Case { sizes, keys, sparse, limits, arrival } = &case;
        let found = buckets_by_arrival(sizes, keys, limits, Some(sparse), arrival).unwrap();
        verify_buckets(keys, sparse, &found.indices).unwrap();
        let place = |index: usize| arrival.iter().position(|&name| usize::try_from(name) == Ok(index)).unwrap();
        let ready: Vec<_> =
            found.indices.iter().map(|members| members.iter().map(|&member| place(member)).max()).collect();
        prop_assert!(ready.is_sorted());
        for (members, &limit) in found.indices.iter().zip(&found.limits) {
            let bytes = |members: &[usize]| members.iter().map(|&member| sizes[member]).sum::<i64>();
            let without_the_last = &members[..members.len() - 1];
            prop_assert!(sparse[members[0]] || without_the_last.is_empty() || bytes(without_the_last) < limit);
        }
    }

    /// The first plan, made before anything has arrived, is that of an arrival in the reverse order of definition.
    #[test]
    fn the_reverse_order_of_definition_gives_the_first_plan(case in cases()) {
        let Case { sizes, keys, limits, .. } = &case;
        let arrival: Vec<i64> = (0..).take(sizes.len()).collect::<Vec<_>>().into_iter().rev().collect();
        let found = buckets_by_arrival(sizes, keys, limits, None, &arrival).unwrap();
        let first = assign_buckets(sizes, keys, limits, None, None).unwrap();
        prop_assert_eq!(found.indices, first.indices.into_iter().rev().collect::<Vec<_>>());
    }

    /// Invariant 4, and that every parameter is there once.
    #[test]
    fn the_agreed_order_is_a_permutation_by_the_latest_position(latest in vec(-1i64..20, 0..30)) {
        let order = agreed_order(&latest);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..latest.len()).collect::<Vec<_>>());
        for pair in order.windows(2) {
            let (one, two) = (latest[pair[0]], latest[pair[1]]);
            let in_order = if two < 0 { one >= 0 || pair[0] > pair[1] } else { (0..=two).contains(&one) };
            prop_assert!(in_order, "{:?}", order);
        }
    }
}

#[test]
fn the_slowest_rank_counts_and_what_never_came_is_last() {
    assert_eq!(agreed_order(&[-1, 3, 0, -1, 1]), [2, 4, 1, 3, 0]);
}

#[test]
fn an_order_of_arrival_that_is_none() {
    let with = |arrival: &[i64]| buckets_by_arrival(&[1, 1], &[0, 0], &[9], None, arrival).unwrap_err();
    assert!(matches!(with(&[0]), Error::LengthsDiffer { length: 1, expected: 2, .. }));
    assert!(matches!(with(&[2, 0]), Error::IndexOutOfRange { position: 0, index: 2, count: 2 }));
    assert!(matches!(with(&[-1, 0]), Error::IndexOutOfRange { position: 0, index: -1, count: 2 }));
    assert!(matches!(with(&[1, 1]), Error::DuplicateIndex { index: 1, .. }));
}

#[test]
fn buckets_that_cannot_be_carried_out() {
    let verify = |buckets: &[Vec<usize>]| verify_buckets(&[0, 0, 1], &[false, true, false], buckets);
    assert_eq!(verify(&[vec![2], vec![1], vec![0]]), Ok(()));
    assert_eq!(verify(&[vec![2], vec![], vec![1], vec![0]]), Err(Error::EmptyBucket { bucket: 1 }));
    assert_eq!(verify(&[vec![1], vec![0, 2]]), Err(Error::MixedBucket { bucket: 1, first: 0, other: 2 }));
    assert_eq!(verify(&[vec![2], vec![0, 1]]), Err(Error::SparseNotAlone { bucket: 1, index: 1 }));
    for (buckets, index) in [(vec![vec![0], vec![1]], 2), (vec![vec![0], vec![0]], 0), (vec![vec![3]], 3)] {
        assert_eq!(verify(&buckets), Err(Error::NotAPartition { what: "buckets", index }));
    }
}

#[test]
fn a_bucket_waits_for_its_gradients_and_for_the_link() {
    let end = |ready: &[f64]| reduction_end(&[10, 40, 5], ready, 1.0, 0.1).unwrap();
    assert!((end(&[1.0, 2.0, 9.0]) - 10.5).abs() < 1e-9);
    assert!((end(&[1.0, 2.0, 2.0]) - 9.5).abs() < 1e-9); // 1, then 2 + 5 + 1.5 without a pause
    assert!((end(&[0.0; 3]) - 8.5).abs() < 1e-9);
    assert!(matches!(
        reduction_end(&[1], &[], 0.0, 0.0),
        Err(Error::LengthsDiffer { length: 0, expected: 1, .. })
    ));
    assert!(matches!(
        reduction_end(&[-1], &[0.0], 0.0, 0.0),
        Err(Error::NegativeSize { position: 0, value: -1 })
    ));
}
