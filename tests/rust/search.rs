//! The search: valid, within the limit, no worse than what there is by name, the same every time, and never below its bound.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{Costs, Error, Found, Kind, Maker, PerStage, search};

fn find(placement: &[usize], m: usize, costs: &Costs, limit: Option<&PerStage>) -> Result<Found, Error> {
    search(placement, m, costs, limit, Some(20), &mut || true)
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
        let found = search(&placement, m, &costs, Some(&limit.into()), None, &mut || true).unwrap();
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
    let found = search(&[0, 1, 2], 6, &costs, None, Some(usize::MAX), &mut || false).unwrap();
    assert!(found.schedule.name().parse::<Maker>().is_ok());
    let mut calls = 0;
    let mut keep_on = || {
        calls += 1;
        calls < 40
    };
    let longer = search(&[0, 1, 2], 6, &costs, None, Some(usize::MAX), &mut keep_on).unwrap();
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
