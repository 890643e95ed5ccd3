//! Bucket assignment: the table of known results, the invariants of `bucket/assign.rs`, and every error.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::subsequence;
use torchrelay_core::{Buckets, Error, assign_buckets, pieces};

/// What is assigned, as one value that proptest can shrink.
#[derive(Debug, Clone)]
struct Case {
    tensors: Vec<(i64, u8)>,
    limits: Vec<i64>,
    sparse: Option<Vec<bool>>,
    indices: Option<Vec<i64>>,
}

impl Case {
    fn assign(&self) -> Buckets {
        let (sizes, keys): (Vec<_>, Vec<_>) = self.tensors.iter().copied().unzip();
        assign_buckets(&sizes, &keys, &self.limits, self.sparse.as_deref(), self.indices.as_deref()).unwrap()
    }

    fn index(&self, position: usize) -> usize {
        self.indices.as_ref().map_or(position, |indices| usize::try_from(indices[position]).unwrap())
    }

    fn position(&self, index: usize) -> usize {
        (0..self.tensors.len()).find(|&position| self.index(position) == index).unwrap()
    }

    fn is_sparse(&self, index: usize) -> bool {
        self.sparse.as_ref().is_some_and(|sparse| sparse[index])
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let tensors = vec((0i64..60, 0u8..4), 0..40);
    let limits = vec(0i64..150, 1..5);
    (tensors, limits).prop_flat_map(|(tensors, limits)| {
        let n = tensors.len();
        let sparse = proptest::option::of(vec(prop::bool::weighted(0.2), n));
        let names: Vec<_> = (0i64..).take(n).collect();
        let indices = proptest::option::of(Just(names).prop_shuffle());
        (Just(tensors), Just(limits), sparse, indices).prop_map(|(tensors, limits, sparse, indices)| Case {
            tensors,
            limits,
            sparse,
            indices,
        })
    })
}

/// The description, taken literally and key by key: no state is shared between keys, nothing is incremental.
fn model(case: &Case) -> Buckets {
    // Each bucket with when it was closed (or else opened, after all that were closed), to be put in order at the end.
    let mut dated: Vec<((bool, usize), Vec<usize>, i64)> = Vec::new();
    for key in 0..4 {
        let mine: Vec<usize> = (0..case.tensors.len()).filter(|&p| case.tensors[p].1 == key).collect();
        let (sparse, dense): (Vec<usize>, Vec<usize>) =
            mine.into_iter().partition(|&position| case.is_sparse(case.index(position)));
        dated.extend(sparse.into_iter().map(|p| ((false, p), vec![case.index(p)], 0)));
        let mut rest = dense.as_slice();
        let mut made = 0;
        while !rest.is_empty() {
            let limit = case.limits[made.min(case.limits.len() - 1)];
            let bytes = |count: usize| rest[..count].iter().map(|&p| case.tensors[p].0).sum::<i64>();
            let full = (1..=rest.len()).find(|&count| bytes(count) >= limit);
            let (bucket, after) = rest.split_at(full.unwrap_or(rest.len()));
            let date = if full.is_some() {
                (false, *bucket.last().unwrap())
            } else {
                (true, *bucket.first().unwrap())
            };
            dated.push((date, bucket.iter().map(|&p| case.index(p)).collect(), limit));
            (rest, made) = (after, made + 1);
        }
    }
    dated.sort();
    if case.indices.is_none() {
        dated.sort_by_key(|(_, bucket, _)| bucket.iter().min().copied());
    }
    let (indices, limits) = dated.into_iter().map(|(_, bucket, limit)| (bucket, limit)).unzip();
    Buckets { indices, limits }
}

proptest! {
    #[test]
    fn invariant_1_each_index_exactly_once(case in cases()) {
        let mut all: Vec<_> = case.assign().indices.concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..case.tensors.len()).collect::<Vec<_>>());
    }

    #[test]
    fn invariant_2_one_key_per_bucket(case in cases()) {
        for bucket in case.assign().indices {
            let mut keys: Vec<_> = bucket.iter().map(|&index| case.tensors[case.position(index)].1).collect();
            keys.dedup();
            prop_assert_eq!(keys.len(), 1);
        }
    }

    #[test]
    fn invariants_3_and_4_a_closed_bucket_just_reaches_its_limit(case in cases()) {
        let Buckets { indices, limits } = case.assign();
        let size = |&index: &usize| case.tensors[case.position(index)].0;
        for key in 0..4 {
            let mine = indices.iter().zip(&limits).filter(|(bucket, _)| {
                case.tensors[case.position(bucket[0])].1 == key && !case.is_sparse(bucket[0])
            });
            // By when they were filled: the order of a key's buckets is that of their first tensors.
            let mut mine: Vec<_> = mine.collect();
            mine.sort_by_key(|(bucket, _)| case.position(bucket[0]));
            for (nth, (bucket, limit)) in mine.iter().enumerate() {
                let (last, before) = bucket.split_last().unwrap();
                let before: i64 = before.iter().map(size).sum();
                prop_assert_eq!(**limit, case.limits[nth.min(case.limits.len() - 1)]);
                prop_assert!(bucket.len() == 1 || before < **limit, "closed too late");
                prop_assert!(nth + 1 == mine.len() || before + size(last) >= **limit, "closed too early");
            }
        }
    }

    #[test]
    fn invariant_5_sparse_ones_are_alone_with_limit_0(case in cases()) {
        let Buckets { indices, limits } = case.assign();
        for (bucket, limit) in indices.iter().zip(limits) {
            if bucket.iter().any(|&index| case.is_sparse(index)) {
                prop_assert_eq!((bucket.len(), limit), (1, 0));
            }
        }
    }

    #[test]
    fn invariant_6_without_indices_ordered_by_the_smallest(mut case in cases()) {
        case.indices = None;
        let smallest: Vec<_> = case.assign().indices.iter().map(|bucket| bucket.iter().min().copied()).collect();
        prop_assert!(smallest.is_sorted());
    }

    #[test]
    fn equal_to_the_description(case in cases()) {
        prop_assert_eq!(case.assign(), model(&case));
    }

    #[test]
    fn keys_may_be_anything_that_can_be_compared(case in cases()) {
        let (sizes, keys): (Vec<_>, Vec<_>) =
            case.tensors.iter().map(|&(size, key)| (size, format!("device {key}"))).unzip();
        let named = assign_buckets(&sizes, &keys, &case.limits, case.sparse.as_deref(), case.indices.as_deref());
        prop_assert_eq!(named, Ok(case.assign()));
    }

    #[test]
    fn any_numbers_give_a_plan_or_an_error(
        sizes in vec(any::<i64>(), 0..8), limits in vec(any::<i64>(), 0..4),
        indices in proptest::option::of(vec(-2i64..9, 0..8)), sparse in proptest::option::of(vec(any::<bool>(), 0..8)),
    ) {
        let keys = vec![0; sizes.len()];
        if let Ok(buckets) = assign_buckets(&sizes, &keys, &limits, sparse.as_deref(), indices.as_deref()) {
            prop_assert_eq!(buckets.indices.concat().len(), sizes.len());
        }
    }

    #[test]
    fn a_key_is_not_touched_by_the_others(case in cases(), chosen in subsequence(vec![0u8, 1, 2, 3], 2)) {
        let without = Case { indices: None, sparse: None, ..case };
        let kept: Vec<usize> =
            (0..without.tensors.len()).filter(|&p| chosen.contains(&without.tensors[p].1)).collect();
        let alone = Case { tensors: kept.iter().map(|&p| without.tensors[p]).collect(), ..without.clone() };
        let named: Vec<Vec<usize>> =
            alone.assign().indices.iter().map(|bucket| bucket.iter().map(|&p| kept[p]).collect()).collect();
        let all = without.assign().indices;
        let mine: Vec<_> = all.into_iter().filter(|bucket| kept.contains(&bucket[0])).collect();
        prop_assert_eq!(named, mine);
    }
}

#[test]
fn known_results() {
    type Row<'a> =
        (&'a [(i64, &'a str)], &'a [i64], Option<usize>, Option<&'a [i64]>, &'a [&'a [usize]], &'a [i64]);
    let mixed = [(200, "f32"), (200, "f64")].repeat(3);
    let tens = [(40, "f32"); 5];
    let table: [Row; 8] = [
        (
            &[(400, "f32"), (800, "f32"), (400, "f32"), (200, "f32")],
            &[400],
            None,
            None,
            &[&[0], &[1], &[2], &[3]],
            &[400; 4],
        ),
        (&mixed, &[400], None, None, &[&[0, 2], &[1, 3], &[4], &[5]], &[400; 4]),
        (&tens[..4], &[40, 80], None, None, &[&[0], &[1, 2], &[3]], &[40, 80, 80]),
        (&mixed, &[200, 400], None, None, &[&[0], &[1], &[2, 4], &[3, 5]], &[200, 200, 400, 400]),
        (&[(0, "f32"), (40, "f32"), (0, "f32")], &[40], None, None, &[&[0, 1], &[2]], &[40, 40]),
        (&tens, &[80], Some(1), None, &[&[0, 2], &[1], &[3, 4]], &[80, 0, 80]),
        (&tens, &[80], Some(1), Some(&[4, 3, 2, 1, 0]), &[&[4, 3], &[1], &[2, 0]], &[80, 0, 80]),
        (&[], &[80], None, None, &[], &[]),
    ];
    for (tensors, limits, sparse, indices, buckets, bucket_limits) in table {
        let (sizes, keys): (Vec<_>, Vec<_>) = tensors.iter().copied().unzip();
        let sparse = sparse.map(|index| (0..tensors.len()).map(|i| i == index).collect::<Vec<_>>());
        let found = assign_buckets(&sizes, &keys, limits, sparse.as_deref(), indices).unwrap();
        assert_eq!(found.indices, buckets, "{tensors:?} {limits:?}");
        assert_eq!(found.limits, bucket_limits, "{tensors:?} {limits:?}");
    }
}

#[test]
fn leftovers_come_in_the_order_they_were_opened_in_not_their_keys() {
    // Key a is met first, but its last bucket is opened after b's.
    let buckets = assign_buckets(&[80, 10, 10], &["a", "b", "a"], &[80], None, Some(&[2, 1, 0])).unwrap();
    assert_eq!(buckets.indices, [vec![2], vec![1], vec![0]]);
}

#[test]
fn errors_name_the_position() {
    type Row<'a> = (&'a [i64], &'a [i64], Option<&'a [bool]>, Option<&'a [i64]>, Error, &'a str);
    let table: [Row; 12] = [
        (&[1], &[], None, None, Error::NoLimits, "at least one limit"),
        (&[], &[], None, None, Error::NoLimits, "at least one limit"),
        (&[1], &[4, -1], None, None, Error::NegativeLimit { position: 1, value: -1 }, "position 1 is -1"),
        (&[1, -3], &[4], None, None, Error::NegativeSize { position: 1, value: -3 }, "position 1 is -3"),
        (
            &[1, 1],
            &[4],
            Some(&[false]),
            None,
            Error::LengthsDiffer { what: "the list of expected sparse gradients", length: 1, expected: 2 },
            "the tensor at position 1 has none",
        ),
        (
            &[1],
            &[4],
            None,
            Some(&[0, 1]),
            Error::LengthsDiffer { what: "the list of tensor indices", length: 2, expected: 1 },
            "the entry at position 1 has no tensor",
        ),
        (
            &[1, 1],
            &[4],
            None,
            Some(&[0, 2]),
            Error::IndexOutOfRange { position: 1, index: 2, count: 2 },
            "position 1 is 2",
        ),
        (&[1], &[4], None, Some(&[-1]), Error::IndexOutOfRange { position: 0, index: -1, count: 1 }, "is -1"),
        (
            &[1; 3],
            &[4],
            None,
            Some(&[1, 0, 1]),
            Error::DuplicateIndex { position: 2, first: 0, index: 1 },
            "position 2 stands at position 0",
        ),
        (
            &[i64::MAX - 1, 1, 1],
            &[i64::MAX],
            None,
            None,
            // The second fills the bucket exactly; the third opens another one.
            Error::NoLimits,
            "",
        ),
        (
            &[i64::MAX - 1, 2],
            &[i64::MAX],
            None,
            None,
            Error::SumOverflow { position: 1 },
            "with the tensor at position 1",
        ),
        (
            &[7, i64::MIN],
            &[4],
            None,
            None,
            Error::NegativeSize { position: 1, value: i64::MIN },
            "position 1",
        ),
    ];
    for (sizes, limits, sparse, indices, error, part) in table {
        let found = assign_buckets(sizes, &vec![(); sizes.len()], limits, sparse, indices);
        if part.is_empty() {
            assert!(found.is_ok(), "{found:?}");
            continue;
        }
        assert_eq!(found, Err(error.clone()));
        assert!(error.to_string().contains(part), "{error}");
    }
    let keys_differ = assign_buckets(&[1, 2], &[0], &[4], None, None);
    assert_eq!(keys_differ, Err(Error::LengthsDiffer { what: "the list of keys", length: 1, expected: 2 }));
}

proptest! {
    /// Both invariants of the pieces of a bucket.
    #[test]
    fn pieces_are_what_they_promise(sizes in prop::collection::vec(0i64..100, 0..40), large in 1i64..120, together in 1i64..300) {
        let found = pieces(&sizes, large, together).unwrap();
        prop_assert_eq!(found.concat(), (0..sizes.len()).collect::<Vec<_>>());
        let closes = |part: &[usize]| {
            let bytes = part.iter().map(|&position| sizes[position]).sum::<i64>();
            bytes >= together || part.last().is_some_and(|&position| sizes[position] >= large)
        };
        for piece in &found {
            prop_assert!(!piece.is_empty());
            prop_assert!((1..piece.len()).all(|members| !closes(&piece[..members])));
        }
        prop_assert!(found.iter().rev().skip(1).all(|piece| closes(piece)));
    }
}

#[test]
fn a_negative_size_is_in_no_piece() {
    assert_eq!(pieces(&[1, -1], 1, 1), Err(Error::NegativeSize { position: 1, value: -1 }));
}
