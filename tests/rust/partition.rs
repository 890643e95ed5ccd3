//! Splits: the invariants of `partition.rs`, and every problem.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::collection::vec;
use proptest::prelude::*;
use torchrelay_core::{Error, Member, MemberKind, Problem, verify_partition};

fn names(count: usize) -> Vec<String> {
    (0..count).map(|layer| layer.to_string()).collect()
}

fn devices(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn members(rows: &[(u64, usize, &str)]) -> Vec<Member> {
    let member =
        |&(identity, layer, path): &(u64, usize, &str)| Member { identity, layer, path: path.to_owned() };
    rows.iter().map(member).collect()
}

fn problems(result: Result<Vec<(usize, usize)>, Error>) -> Vec<Problem> {
    match result {
        Err(Error::Partition { problems }) => problems,
        Err(other) => panic!("{other}"),
        Ok(_) => Vec::new(),
    }
}

proptest! {
    #[test]
    fn invariant_1_every_layer_once_in_order(balance in vec(1i64..6, 0..8)) {
        let layers = usize::try_from(balance.iter().sum::<i64>()).unwrap();
        let cpus = vec!["cpu".to_owned(); balance.len()];
        let bounds = verify_partition(&names(layers), Some(&balance), &cpus, &[], &[]).unwrap();
        let lengths: Vec<_> = bounds.iter().map(|(start, stop)| i64::try_from(stop - start).unwrap()).collect();
        prop_assert_eq!(lengths, balance);
        let all: Vec<_> = bounds.into_iter().flat_map(|(start, stop)| start..stop).collect();
        prop_assert_eq!(all, (0..layers).collect::<Vec<_>>());
    }

    #[test]
    fn invariant_3_shared_on_one_device_only(
        balance in vec(1usize..4, 1..5), places in vec(0u8..3, 4), first in 0usize..12, second in 0usize..12,
    ) {
        let layers: usize = balance.iter().sum();
        let (first, second) = (first % layers, second % layers);
        let devices: Vec<_> = places.iter().map(|place| format!("cuda:{place}")).collect();
        let owner: Vec<_> = balance.iter().enumerate().flat_map(|(j, &count)| vec![j; count]).collect();
        let shared = members(&[(7, first, "first.weight"), (7, second, "second.weight")]);
        let wide: Vec<_> = balance.iter().map(|&count| i64::try_from(count).unwrap()).collect();
        let result = verify_partition(&names(layers), Some(&wide), &devices, &[], &shared);
        prop_assert_eq!(result.is_ok(), devices[owner[first]] == devices[owner[second]]);
    }

    #[test]
    fn an_example_in_an_error_is_always_one_that_works(layers in 0usize..30, balance in vec(-2i64..9, 0..6)) {
        let cpus = vec!["cpu".to_owned(); 30];
        let found = problems(verify_partition(&names(layers), Some(&balance), &cpus, &[], &[]))
            .into_iter()
            .chain(problems(verify_partition(&names(layers), None, &cpus, &[], &[])));
        for problem in found {
            if let Problem::WrongSum { example, .. } | Problem::NoBalance { example, .. } = problem {
                let example: Vec<_> = example.into_iter().map(|count| i64::try_from(count).unwrap()).collect();
                prop_assert!(verify_partition(&names(layers), Some(&example), &cpus, &[], &[]).is_ok());
            }
        }
    }
}

#[test]
fn all_problems_are_in_one_error() {
    let parameters = members(&[(1, 0, "0.weight"), (1, 2, "2.weight")]);
    let found = verify_partition(&names(3), Some(&[1, 0, -1]), &devices("cpu"), &[], &parameters);
    let expected = [
        Problem::NotPositive { position: 1, value: 0 },
        Problem::NotPositive { position: 2, value: -1 },
        Problem::WrongSum { sum: 0, layers: 3, left_out: Some("0".to_owned()), example: vec![1, 1, 1] },
        Problem::TooFewDevices { devices: 1, partitions: 3 },
    ];
    let message = found.clone().unwrap_err().to_string();
    assert_eq!(problems(found), expected);
    assert_eq!(message.lines().count(), 5);
    for part in ["4 reasons", "position 1 is 0", "position 2 is -1", "[1, 1, 1] would fit", "from '0' on"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn sharing_across_devices_names_both_places_and_the_remedy() {
    let modules =
        members(&[(1, 0, "emb"), (2, 1, "mid"), (3, 2, "head"), (4, 2, "head.tied"), (4, 0, "emb.tied")]);
    let parameters = members(&[
        (5, 0, "emb.tied.weight"),
        (5, 2, "head.tied.weight"),
        (6, 0, "emb.bias"),
        (6, 1, "mid.bias"),
    ]);
    let layers = ["emb", "mid", "head"].map(str::to_owned);
    let split = |places: &str, balance: &[i64]| {
        verify_partition(&layers, Some(balance), &devices(places), &modules, &parameters)
    };
    let found = split("cuda:0 cuda:0 cuda:1", &[1, 1, 1]);
    let message = found.clone().unwrap_err().to_string();
    // The weight is shared only as a part of the module, and is not told again.
    assert!(matches!(&problems(found)[..], [Problem::Shared { kind: MemberKind::Module, .. }]), "{message}");
    for part in ["'head.tied' (partition 2 on cuda:1)", "'emb.tied' (partition 0 on cuda:0)", "on one device"]
    {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(problems(split("cuda:0 cuda:1 cuda:2", &[1, 1, 1])).len(), 2);
    assert_eq!(problems(split("cpu cpu cpu", &[1, 1, 1])), []);
    assert_eq!(problems(split("cuda:0 cuda:1", &[3])), []);
}

#[test]
fn a_layer_that_occurs_twice_is_one_problem_with_all_that_is_in_it() {
    let modules = members(&[(1, 0, "0"), (2, 0, "0.lin"), (1, 1, "1"), (2, 1, "1.lin")]);
    let parameters = members(&[(3, 0, "0.lin.weight"), (3, 1, "1.lin.weight")]);
    let found = verify_partition(&names(2), Some(&[1, 1]), &devices("cpu meta"), &modules, &parameters);
    assert_eq!(problems(found).len(), 1);
}

#[test]
fn no_balance_recommends_the_automatic_one() {
    let error = verify_partition(&names(5), None, &devices("cpu cpu"), &[], &[]).unwrap_err();
    for part in ["balance_by_time", "balance_by_size", "[3, 2]"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn sums_that_do_not_fit_in_64_bits_are_wrong_sums() {
    for balance in [[i64::MAX, i64::MAX], [i64::MIN, i64::MIN]] {
        let found = problems(verify_partition(&names(2), Some(&balance), &devices("cpu cpu"), &[], &[]));
        assert!(found.iter().any(|problem| matches!(problem, Problem::WrongSum { .. })), "{found:?}");
    }
}

#[test]
fn an_empty_module_has_an_empty_split() {
    assert_eq!(verify_partition(&[], Some(&[]), &[], &[], &[]), Ok(vec![]));
}

#[test]
fn members_of_layers_that_do_not_exist_are_no_panic() {
    let parameters = members(&[(1, 0, "0.weight"), (1, usize::MAX, "9.weight")]);
    assert_eq!(verify_partition(&names(1), Some(&[1]), &devices("cpu"), &[], &parameters), Ok(vec![(0, 1)]));
}
