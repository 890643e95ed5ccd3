//! The search: valid, within the limit, no worse than what there is by name, the same every time, and never below its bound.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{Action, Costs, Error, Found, Kind, Links, Maker, PerStage, Schedule, Search, search};

fn find(placement: &[usize], m: usize, costs: &Costs, limit: Option<&PerStage>) -> Result<Found, Error> {
    search(placement, m, costs, limit, Search { effort: Some(20), exact: false }, &mut |_| true)
}

fn v(p: usize) -> Vec<usize> {
    (0..p).chain((0..p).rev()).collect()
}

/// The largest of a rank's peaks over its limit.
fn fits(peaks: &[f64], limit: f64) -> bool {
    peaks.iter().all(|&peak| peak <= limit * (1.0 + 1e-9))
}

fn problem() -> impl Strategy<Value = (Vec<usize>, usize, Costs)> {
    (1usize..5, 1usize..9, any::<bool>()).prop_flat_map(|(p, m, in_a_v)| {
        let placement: Vec<_> = if in_a_v { v(p) } else { (0..p).collect() };
        let stages = placement.len();
        let times = move || proptest::collection::vec((1u32..9).prop_map(f64::from), stages);
        let transfer = (0u32..4).prop_map(f64::from);
        let whole = (prop::option::of(times()), prop::sample::select(&[0.5, 1.0]));
        (Just(placement), Just(m), times(), times(), times(), transfer, whole).prop_map(
            |(placement, m, forward, input_grad, weight_grad, transfer, (backward, overlap))| {
                let costs = Costs {
                    backward: backward.map(PerStage::from),
                    overlap,
                    forward: forward.into(),
                    input_grad: input_grad.into(),
                    weight_grad: weight_grad.into(),
                    transfer: transfer.into(),
                    forward_memory: 2.0.into(),
                    input_grad_memory: (-1.0).into(),
                    weight_grad_memory: (-1.0).into(),
                    ..Costs::default()
                };
                (placement, m, costs)
            },
        )
    })
}

proptest! {
    #[test]
    fn what_is_found_keeps_its_promises((placement, m, costs) in problem(), room in 1u32..4) {
        let p = placement.iter().max().unwrap() + 1;
        let per_rank = placement.len() / p;
        // From the least with which anything can be done.
        let limit = f64::from(u32::try_from(2 * per_rank).unwrap() * room);
        let found = find(&placement, m, &costs, Some(&limit.into())).unwrap();
        prop_assert_eq!(found.schedule.verify(), Ok(()));
        let simulation = found.schedule.simulate(&costs).unwrap();
        prop_assert_eq!(&simulation, &found.simulation);
        prop_assert!(fits(simulation.peak_memory(), limit));
        prop_assert!(found.lower_bound <= simulation.cost() * (1.0 + 1e-9), "{} {}", found.lower_bound, simulation.cost());
        prop_assert!(found.gap() >= 0.0);
        for &maker in Maker::ALL {
            let Ok(other) = maker.make(p, m, Some(per_rank)) else { continue };
            if other.placement().eq(placement.iter().copied()) {
                let other = other.simulate(&costs).unwrap();
                let better = other.cost() < simulation.cost() * (1.0 - 1e-9);
                prop_assert!(!better || !fits(other.peak_memory(), limit), "{} is better", maker);
            }
        }
        let again = find(&placement, m, &costs, Some(&limit.into())).unwrap();
        prop_assert_eq!(again.schedule, found.schedule);
    }

    #[test]
    fn no_limit_is_no_worse_than_a_limit((placement, m, costs) in problem()) {
        let found = find(&placement, m, &costs, None).unwrap();
        prop_assert_eq!(found.schedule.verify(), Ok(()));
        prop_assert!(found.lower_bound <= found.simulation.cost() * (1.0 + 1e-9));
    }
}

#[test]
fn optima_that_an_integer_program_proved_are_found() {
    for (p, m, limit, optimum) in [(3usize, 6, 10.0, 93.0), (4, 6, 8.0, 111.0)] {
        let costs = Costs {
            forward_memory: 2.0.into(),
            input_grad_memory: (-1.0).into(),
            weight_grad_memory: (-1.0).into(),
            ..Costs::new(5.0, 6.0, 4.0).unwrap()
        };
        let placement: Vec<_> = (0..p).collect();
        let found =
            search(&placement, m, &costs, Some(&limit.into()), Search::default(), &mut |_| true).unwrap();
        assert!((found.simulation.cost() - optimum).abs() < 1e-9, "{}", found.simulation.cost());
        assert!(found.lower_bound <= optimum);
    }
}

#[test]
fn a_limit_that_nothing_fits_is_said() {
    let error = find(&[0, 1], 4, &Costs::default(), Some(&0.5.into())).unwrap_err();
    assert_eq!(error, Error::NoSchedule);
    assert!(find(&[0, 1], 4, &Costs::default(), Some(&1.0.into())).is_ok());
    assert!(find(&[0, 1, 1, 0], 4, &Costs::default(), Some(&1.0.into())).is_err());
    assert!(find(&[0, 1, 1, 0], 4, &Costs::default(), Some(&2.0.into())).is_ok());
}

#[test]
fn each_rank_has_its_own_limit() {
    let limit = PerStage::Each(vec![2.0, 1.0, 5.0]);
    let found = find(&[0, 1, 2], 6, &Costs::default(), Some(&limit)).unwrap();
    let peaks = found.simulation.peak_memory();
    assert!(peaks[0] <= 2.0 && peaks[1] <= 1.0 && peaks[2] <= 5.0, "{peaks:?}");
}

#[test]
fn a_search_that_is_stopped_has_what_there_is_by_name() {
    let costs = Costs::new(3.0, 2.0, 1.0).unwrap();
    let endless = Search { effort: Some(usize::MAX), exact: false };
    let found = search(&[0, 1, 2], 6, &costs, None, endless, &mut |_| false).unwrap();
    assert!(found.schedule.name().parse::<Maker>().is_ok());
    let mut calls = 0;
    let mut keep_on = |_| {
        calls += 1;
        calls < 40
    };
    let longer = search(&[0, 1, 2], 6, &costs, None, endless, &mut keep_on).unwrap();
    assert!(longer.simulation.cost() <= found.simulation.cost());
}

#[test]
fn any_placement_can_be_searched() {
    for placement in [vec![0, 0, 1, 1], vec![1, 0, 0, 1, 1, 0], vec![0, 1, 2, 0, 1, 2], vec![0, 0, 0]] {
        let found = find(&placement, 5, &Costs::default(), None).unwrap();
        assert_eq!(found.schedule.verify(), Ok(()), "{placement:?}");
        let count = |kind| {
            let ranks = 0..found.schedule.ranks();
            let actions = ranks.flat_map(|rank| found.schedule.actions(rank).unwrap().to_vec());
            actions.filter(|action| action.kind() == kind).count()
        };
        assert_eq!(count(Kind::Forward), 5 * placement.len());
    }
}

// ---------------------------------------------------------------------------------------------------- the proof

fn prove(placement: &[usize], m: usize, costs: &Costs, limit: Option<&PerStage>) -> Result<Found, Error> {
    search(placement, m, costs, limit, Search { effort: Some(0), exact: true }, &mut |_| true)
}

/// All orders in which a rank can do the work of its stages, micro-batches in order, within its memory.
fn words(stages: &[usize], m: usize, costs: &Costs, limit: f64) -> Vec<Vec<Action>> {
    const KINDS: [Kind; 3] = [Kind::Forward, Kind::InputGrad, Kind::WeightGrad];
    let (mut complete, mut open) = (Vec::new(), vec![(vec![[0usize; 3]; stages.len()], Vec::new(), 0.0)]);
    while let Some((done, word, level)) = open.pop() {
        if done.iter().all(|&done| done == [m; 3]) {
            complete.push(word);
            continue;
        }
        for (k, &stage) in stages.iter().enumerate() {
            let effects = [&costs.forward_memory, &costs.input_grad_memory, &costs.weight_grad_memory];
            for part in 0..3 {
                let most = if part == 0 { m } else { done[k][part - 1] };
                let level = level + effects[part].of(stage);
                if done[k][part] == most || level > limit {
                    continue;
                }
                let (mut done, mut word) = (done.clone(), word.clone());
                word.push(Action::new(KINDS[part], stage, Some(done[k][part])).unwrap());
                done[k][part] += 1;
                open.push((done, word, level));
            }
        }
    }
    complete
}

/// The least cost of all schedules that there are, on one rank or two; infinite if there is none.
fn least_cost(placement: &[usize], m: usize, costs: &Costs, limit: f64) -> f64 {
    let ranks = placement.iter().max().unwrap() + 1;
    let of = |rank: usize| -> Vec<Vec<Action>> {
        let stages: Vec<_> = (0..placement.len()).filter(|&stage| placement[stage] == rank).collect();
        words(&stages, m, costs, limit)
    };
    let second = if ranks == 2 { of(1) } else { vec![Vec::new()] };
    let mut least = f64::INFINITY;
    for first in of(0) {
        for second in &second {
            let lists = [first.clone(), second.clone()].into_iter().take(ranks).collect();
            let schedule = Schedule::new("one of all", placement, m, true, lists).unwrap();
            if let Ok(simulation) = schedule.simulate(costs) {
                least = least.min(simulation.cost());
            }
        }
    }
    least
}

/// A placement, small enough to go through all schedules, and how many micro-batches.
fn tiny() -> impl Strategy<Value = (Vec<usize>, usize, Costs, f64)> {
    let placements: &[(&[usize], usize)] = &[
        (&[0, 1], 1),
        (&[0, 1], 2),
        (&[0, 1], 3),
        (&[0, 1, 1, 0], 1),
        (&[0, 1, 0, 1], 1),
        (&[0, 0], 2),
        (&[0, 1, 1], 1),
    ];
    prop::sample::select(placements).prop_flat_map(|(placement, m)| {
        let stages = placement.len();
        let numbers = move |from: i32, to: i32| {
            prop::collection::vec((from..to).prop_map(f64::from), stages).prop_map(PerStage::from)
        };
        let memory = (numbers(0, 4), numbers(-3, 2), numbers(-3, 2));
        let transfer = (0u32..4).prop_map(f64::from);
        let limit = prop_oneof![Just(f64::INFINITY), (1u32..12).prop_map(f64::from)];
        let costs = (numbers(0, 6), numbers(0, 6), numbers(0, 6), transfer, memory).prop_map(
            |(forward, input_grad, weight_grad, transfer, memory)| Costs {
                forward,
                input_grad,
                weight_grad,
                transfer: transfer.into(),
                forward_memory: memory.0,
                input_grad_memory: memory.1,
                weight_grad_memory: memory.2,
                ..Costs::default()
            },
        );
        (Just(placement.to_vec()), Just(m), costs, limit)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn what_is_proven_is_the_least_cost_of_all_schedules((placement, m, costs, limit) in tiny()) {
        let least = least_cost(&placement, m, &costs, limit);
        match prove(&placement, m, &costs, Some(&limit.into())) {
            Err(error) => {
                prop_assert_eq!(error, Error::NoSchedule);
                prop_assert!(least.is_infinite(), "{least}");
            }
            Ok(found) => {
                prop_assert!((found.simulation.cost() - least).abs() < 1e-6, "{} {least}", found.simulation.cost());
                prop_assert!(found.gap() <= 0.0, "{}", found.gap());
            }
        }
    }

    #[test]
    fn a_bound_without_a_proof_is_no_more_than_the_least_cost((placement, m, costs, limit) in tiny()) {
        let least = least_cost(&placement, m, &costs, limit);
        if let Ok(found) = find(&placement, m, &costs, Some(&limit.into())) {
            prop_assert!(found.lower_bound <= least * (1.0 + 1e-9), "{} {least}", found.lower_bound);
        }
    }
}

#[test]
fn optima_of_an_integer_program_are_proven() {
    for (p, m, limit, optimum) in
        [(3usize, 6, 10.0, 93.0), (4, 6, 8.0, 111.0), (4, 12, 16.0, 181.0), (8, 32, 16.0, 529.0)]
    {
        let costs = Costs {
            forward_memory: 2.0.into(),
            input_grad_memory: (-1.0).into(),
            weight_grad_memory: (-1.0).into(),
            ..Costs::new(5.0, 6.0, 4.0).unwrap()
        };
        let placement: Vec<_> = (0..p).collect();
        let exact = Search { effort: None, exact: true };
        let found = search(&placement, m, &costs, Some(&limit.into()), exact, &mut |_| true).unwrap();
        assert!((found.simulation.cost() - optimum).abs() < 1e-9, "{}", found.simulation.cost());
        assert!(found.gap() <= 0.0, "{p} {m}: {}", found.gap());
    }
}

#[test]
fn a_proof_that_is_stopped_keeps_what_is_known() {
    let draw = |k: usize| [1.3, 0.6, 0.9, 1.1, 0.7, 1.4, 0.8, 1.2][k % 8];
    let per_stage =
        |shift: usize| PerStage::from((0..8).map(|stage| draw(3 * stage + shift)).collect::<Vec<_>>());
    let costs = Costs {
        forward: per_stage(0),
        input_grad: per_stage(1),
        weight_grad: per_stage(5),
        ..Costs::default()
    };
    let placement: Vec<_> = (0..8).collect();
    let mut heard = Vec::new();
    let mut watch = |progress| {
        heard.push(progress);
        heard.len() < 300
    };
    let exact = Search { effort: Some(50), exact: true };
    let found = search(&placement, 24, &costs, Some(&8.0.into()), exact, &mut watch).unwrap();
    assert_eq!(found.schedule.verify(), Ok(()));
    assert!(fits(found.simulation.peak_memory(), 8.0));
    assert!(found.lower_bound < found.simulation.cost());
    assert_eq!(heard.len(), 300, "asked again after it said no, or never stopped");
    for pair in heard.windows(2) {
        assert!(pair[1].cost <= pair[0].cost && pair[1].lower_bound >= pair[0].lower_bound, "{pair:?}");
    }
    let last = heard.last().unwrap();
    assert!(found.simulation.cost() <= last.cost && last.lower_bound <= found.lower_bound);
}

#[test]
fn where_all_schedules_cannot_be_gone_through_the_bound_stands() {
    let whole = Costs { backward: Some(1.5.into()), ..Costs::default() };
    let blocking = Costs { links: Links::Blocking, transfer: 1.0.into(), ..Costs::default() };
    for costs in [whole, blocking] {
        let found = prove(&[0, 1, 2], 5, &costs, Some(&3.0.into())).unwrap();
        let quick = find(&[0, 1, 2], 5, &costs, Some(&3.0.into())).unwrap();
        assert!((found.lower_bound - quick.lower_bound).abs() < 1e-9);
        assert!(found.lower_bound <= quick.simulation.cost());
    }
    // No rank knows when its first action begins, if its first stage waits for a rank's second.
    let found = prove(&[0, 0, 1], 3, &Costs::default(), None).unwrap();
    assert!(found.lower_bound <= found.simulation.cost());
}
