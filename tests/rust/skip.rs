//! Skip connections: the invariants of `skip.rs`, and every problem.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::collection::vec;
use proptest::prelude::*;
use torchrelay_core::{Error, Skip, SkipProblem, SkipRole, SkipUse, verify_skips};

fn names(count: usize) -> Vec<String> {
    (0..count).map(|skip| format!("'{}'", char::from(b'a' + u8::try_from(skip).unwrap()))).collect()
}

/// Layers in order, each given as its stashes and pops: `+a` and `-a`.
fn uses(layers: &[&str]) -> Vec<SkipUse> {
    let mut found = Vec::new();
    for (layer, text) in layers.iter().enumerate() {
        for word in text.split_whitespace() {
            let role = if word.starts_with('+') { SkipRole::Stash } else { SkipRole::Pop };
            let skip = usize::from(word.as_bytes()[1] - b'a');
            found.push(SkipUse { skip, role, layer, order: layer, path: layer.to_string() });
        }
    }
    found
}

fn problems(result: Result<Vec<Skip>, Error>) -> Vec<SkipProblem> {
    match result {
        Err(Error::Skips { problems }) => problems,
        Err(other) => panic!("{other}"),
        Ok(_) => Vec::new(),
    }
}

fn text(value: &str) -> String {
    value.to_owned()
}

/// Partitions of the given lengths.
fn partitions(lengths: &[usize]) -> Vec<(usize, usize)> {
    let mut stop = 0;
    let next = |length| {
        let start = stop;
        stop += length;
        (start, stop)
    };
    lengths.iter().map(next).collect()
}

/// Sound skips: for each the layer that stashes it and the distance to the one that pops it.
fn sound(skips: &[(usize, usize)]) -> Vec<SkipUse> {
    let each = |(skip, &(layer, distance)): (usize, &(usize, usize))| {
        [(SkipRole::Stash, layer), (SkipRole::Pop, layer + distance)].map(|(role, layer)| SkipUse {
            skip,
            role,
            layer,
            order: layer,
            path: layer.to_string(),
        })
    };
    skips.iter().enumerate().flat_map(each).collect()
}

proptest! {
    #[test]
    fn invariants_1_to_3_of_sound_skips(
        lengths in vec(1usize..5, 1..6), wanted in vec((0usize..20, 1usize..20), 0..8), shuffle in any::<u64>(),
    ) {
        let layers: usize = lengths.iter().sum();
        let wanted: Vec<_> = wanted.into_iter().filter(|&(layer, distance)| layer + distance < layers).collect();
        let partitions = partitions(&lengths);
        let mut uses = sound(&wanted);
        let length = uses.len().max(1);
        uses.rotate_left(usize::try_from(shuffle % length as u64).unwrap());
        let skips = verify_skips(&names(wanted.len()), &uses, &partitions).unwrap();
        let mut seen: Vec<_> = skips.iter().map(|skip| skip.skip).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..wanted.len()).collect::<Vec<_>>()); // invariant 1
        for skip in &skips {
            let (layer, distance) = wanted[skip.skip];
            for (partition, layer) in [(skip.source, layer), (skip.target, layer + distance)] {
                prop_assert!((partitions[partition].0..partitions[partition].1).contains(&layer));
            }
            prop_assert!(skip.source <= skip.target); // invariant 2
            prop_assert_eq!((&skip.stash, &skip.pop), (&layer.to_string(), &(layer + distance).to_string()));
        }
        prop_assert!(skips.iter().map(|skip| wanted[skip.skip].0).is_sorted()); // invariant 3
    }

    #[test]
    fn one_more_or_one_less_use_is_always_found(
        wanted in vec((0usize..8, 1usize..8), 1..6), which in any::<u64>(), adds in any::<bool>(),
    ) {
        let mut uses = sound(&wanted);
        let place = usize::try_from(which % uses.len() as u64).unwrap();
        let skip = uses[place].skip;
        if adds {
            let again = SkipUse { layer: 15, order: 15, path: text("15"), ..uses[place].clone() };
            uses.push(again);
        } else {
            uses.remove(place);
        }
        let found = problems(verify_skips(&names(wanted.len()), &uses, &[(0, 16)]));
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let starts_as_it_should = found[0].to_string().starts_with(&format!("skip {} ", names(wanted.len())[skip]));
        prop_assert!(starts_as_it_should);
    }

    #[test]
    fn no_uses_whatever_are_a_panic(
        all in vec((0usize..4, any::<bool>(), 0usize..6, 0usize..6), 0..12), lengths in vec(0usize..3, 0..4),
    ) {
        let uses: Vec<_> = all
            .into_iter()
            .map(|(skip, pops, layer, order)| {
                let role = if pops { SkipRole::Pop } else { SkipRole::Stash };
                SkipUse { skip, role, layer, order, path: order.to_string() }
            })
            .collect();
        if let Ok(skips) = verify_skips(&names(3), &uses, &partitions(&lengths)) {
            prop_assert_eq!(skips.len() * 2, uses.len());
        }
    }
}

#[test]
fn each_problem_by_its_layers() {
    let (name, at) = (|| text("'a'"), |layer: &str| text(layer));
    let table: &[(&[&str], &[SkipProblem])] = &[
        (&["+a", "", "-a"], &[]),
        (&["+a", "-a +b", "-b"], &[]),
        (&[""], &[]),
        (&["", "+a"], &[SkipProblem::NeverPopped { name: name(), stash: at("1") }]),
        (&["", "-a"], &[SkipProblem::NeverStashed { name: name(), pop: at("1") }]),
        (&["-a", "+a"], &[SkipProblem::PoppedFirst { name: name(), pop: at("0"), stash: at("1") }]),
        (&["+a", "+a", "-a"], &[SkipProblem::StashedOften { name: name(), paths: vec![at("0"), at("1")] }]),
        (&["+a", "-a", "-a"], &[SkipProblem::PoppedOften { name: name(), paths: vec![at("1"), at("2")] }]),
        (&["+a -a"], &[SkipProblem::Both { name: name(), path: at("0") }]),
        (
            &["-a", "-a"],
            &[
                SkipProblem::PoppedOften { name: name(), paths: vec![at("0"), at("1")] },
                SkipProblem::NeverStashed { name: name(), pop: at("0") },
                SkipProblem::NeverStashed { name: name(), pop: at("1") },
            ],
        ),
    ];
    for (layers, expected) in table {
        let found = problems(verify_skips(&names(2), &uses(layers), &[(0, layers.len())]));
        assert_eq!(&found, expected, "{layers:?}");
    }
}

#[test]
fn all_problems_are_in_one_error() {
    let uses = uses(&["+a", "-b", "+c", "+c -d", "-c +d"]);
    let message = verify_skips(&names(4), &uses, &[(0, 5)]).unwrap_err().to_string();
    assert_eq!(
        message,
        "the skip connections do not fit together, for 4 reasons:\n\
         - skip 'a' is stashed by '0', but never popped\n\
         - skip 'b' is popped by '1', but never stashed\n\
         - skip 'c' is stashed by '2' and '3'; isolate them in namespaces\n\
         - skip 'd' is popped by '3' before it is stashed by '4'"
    );
}

#[test]
fn modules_whose_order_is_not_known_may_stash_and_pop() {
    let inside = |role, path: &str| SkipUse { skip: 0, role, layer: 0, order: 0, path: text(path) };
    let uses = [inside(SkipRole::Pop, "0.up"), inside(SkipRole::Stash, "0.down")];
    let skips = verify_skips(&names(1), &uses, &[(0, 1)]).unwrap();
    assert_eq!((skips[0].stash.as_str(), skips[0].pop.as_str()), ("0.down", "0.up"));
}

#[test]
fn places_that_do_not_exist_are_errors() {
    let at = |skip, layer| SkipUse { skip, role: SkipRole::Stash, layer, order: 0, path: text("0") };
    for (uses, part) in
        [(at(1, 0), "skip 1, but there are only 1"), (at(0, 2), "layer 2, but there are only 2")]
    {
        let message = verify_skips(&names(1), &[uses], &[(0, 1), (1, 2)]).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
