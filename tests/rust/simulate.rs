//! Simulation: closed formulas, figures that were published, and an independent simulator that tries again and again.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such
#![allow(clippy::float_cmp)] // the same sums, or small integers

use std::collections::HashMap;

use proptest::prelude::*;
use torchrelay_core::{
    Action, Cause, Costs, Entry, Error, Kind, Links, Maker, PerStage, Schedule, Simulation,
};

fn make(maker: Maker, p: usize, m: usize) -> Schedule {
    maker.make(p, m, None).unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * a.abs().max(1.0)
}

fn times(f: u32, i: u32, w: u32) -> Costs {
    Costs::new(f.into(), i.into(), w.into()).unwrap()
}

/// The greatest of a rank's peaks.
fn peak(simulation: &Simulation) -> f64 {
    simulation.peak_memory().iter().copied().fold(0.0, f64::max)
}

/// One number for each of so many stages, or one for all.
fn per_stage(stages: usize, from: i32, to: i32) -> impl Strategy<Value = PerStage> {
    let each = proptest::collection::vec((from..=to).prop_map(f64::from), stages).prop_map(PerStage::Each);
    prop_oneof![each, (from..=to).prop_map(|value| f64::from(value).into())]
}

fn costs(stages: usize) -> impl Strategy<Value = Costs> {
    let time = move || per_stage(stages, 0, 9);
    let parts = (time(), time(), time(), prop::option::of(time()), prop::option::of(time()));
    let memory = (per_stage(stages, -3, 5), per_stage(stages, -5, 3), per_stage(stages, -5, 3));
    let links = prop::sample::select(&[Links::Parallel, Links::Serial, Links::Blocking]);
    let overlap = prop::sample::select(&[0.5, 1.0]);
    (parts, (time(), time(), links, overlap), memory).prop_map(
        |(parts, (transfer, latency, links, overlap), memory)| Costs {
            forward: parts.0,
            input_grad: parts.1,
            weight_grad: parts.2,
            backward: parts.3,
            recompute: parts.4,
            overlap,
            transfer,
            latency,
            links,
            forward_memory: memory.0,
            input_grad_memory: memory.1,
            weight_grad_memory: memory.2,
        },
    )
}

fn made_and_costs() -> impl Strategy<Value = (Schedule, Costs)> {
    (prop::sample::select(Maker::ALL), 1usize..5, 1usize..9).prop_flat_map(|(maker, p, m)| {
        let schedule = maker.make(p, m, None).unwrap_or_else(|_| maker.make(p, m * p * 2, None).unwrap());
        let stages = schedule.stages();
        (Just(schedule), costs(stages))
    })
}

/// When each action begins and ends, found by looking again and again for an entry that can be timed.
fn slowly(schedule: &Schedule, costs: &Costs) -> HashMap<Action, (f64, f64)> {
    let mut done: HashMap<Action, (f64, f64)> = HashMap::new();
    let mut arrivals: HashMap<Action, f64> = HashMap::new();
    let mut links: HashMap<(usize, usize), f64> = HashMap::new();
    let lists: Vec<Vec<Entry>> = (0..schedule.ranks()).map(|rank| schedule.entries(rank).collect()).collect();
    let mut heads = vec![0; schedule.ranks()];
    let mut free = vec![0.0f64; schedule.ranks()];
    let time = |action: Action| {
        let stage = action.stage();
        match action.kind() {
            Kind::Forward => costs.forward.of(stage),
            Kind::InputGrad => costs.input_grad.of(stage),
            Kind::WeightGrad => costs.weight_grad.of(stage),
            Kind::Backward => match &costs.backward {
                Some(backward) => backward.of(stage),
                None => costs.input_grad.of(stage) + costs.weight_grad.of(stage),
            },
            _ => costs.recompute.as_ref().unwrap_or(&costs.forward).of(stage),
        }
    };
    loop {
        let before = done.len();
        for rank in 0..schedule.ranks() {
            let Some(&entry) = lists[rank].get(heads[rank]) else { continue };
            let there = |action: Action| {
                let (stage, i) = (action.stage(), action.microbatch());
                let arrival = |kinds: &[Kind], stage| {
                    kinds
                        .iter()
                        .find_map(|&kind| arrivals.get(&Action::new(kind, stage, i).unwrap()))
                        .copied()
                };
                match action.kind() {
                    Kind::Forward if stage > 0 => arrival(&[Kind::Forward], stage - 1),
                    Kind::Backward | Kind::InputGrad if stage + 1 < schedule.stages() => {
                        arrival(&[Kind::Backward, Kind::InputGrad], stage + 1)
                    }
                    _ => Some(0.0),
                }
            };
            let Some(needed) = entry.actions().map(there).collect::<Option<Vec<_>>>() else { continue };
            let start = needed.into_iter().fold(free[rank], f64::max);
            let alone: f64 = entry.actions().map(time).sum();
            let end = start + if matches!(entry, Entry::Overlap(..)) { alone * costs.overlap } else { alone };
            free[rank] = end;
            heads[rank] += 1;
            for action in entry.actions() {
                done.insert(action, (start, end));
                let stage = action.stage();
                let (other, boundary) = match action.kind() {
                    Kind::Forward => (stage + 1, stage),
                    Kind::Backward | Kind::InputGrad if stage > 0 => (stage - 1, stage - 1),
                    _ => continue,
                };
                let Some(other) = schedule.rank_of(other) else { continue };
                if other == rank {
                    arrivals.insert(action, end);
                    continue;
                }
                let link = links.entry((rank, other)).or_default();
                let begin = if costs.links == Links::Serial { link.max(end) } else { end };
                *link = begin + costs.transfer.of(boundary);
                if costs.links == Links::Blocking {
                    free[rank] = free[rank].max(*link);
                }
                arrivals.insert(action, *link + costs.latency.of(boundary));
            }
        }
        if done.len() == before {
            return done;
        }
    }
}

proptest! {
    #[test]
    fn times_are_those_of_the_slow_simulator((schedule, costs) in made_and_costs()) {
        let simulation = schedule.simulate(&costs).unwrap();
        let expected = slowly(&schedule, &costs);
        for rank in 0..schedule.ranks() {
            let spans = simulation.spans(rank).unwrap();
            prop_assert_eq!(spans.iter().map(|span| span.action).collect::<Vec<_>>(), schedule.actions(rank).unwrap());
            for span in spans {
                prop_assert_eq!((span.start, span.end), expected[&span.action], "{:?}", span.action);
            }
        }
    }

    #[test]
    fn memory_is_the_sum_of_what_was_done((schedule, costs) in made_and_costs()) {
        let simulation = schedule.simulate(&costs).unwrap();
        for rank in 0..schedule.ranks() {
            let (mut level, mut most) = (0.0f64, 0.0f64);
            for action in schedule.actions(rank).unwrap() {
                let stage = action.stage();
                let (f, i, w) = (
                    costs.forward_memory.of(stage),
                    costs.input_grad_memory.of(stage),
                    costs.weight_grad_memory.of(stage),
                );
                let effects = match action.kind() {
                    Kind::Forward => [f, 0.0],
                    Kind::InputGrad => [i, 0.0],
                    Kind::WeightGrad => [w, 0.0],
                    _ => [i, w],
                };
                for effect in effects {
                    level += effect;
                    most = most.max(level);
                }
            }
            prop_assert!(close(simulation.peak_memory()[rank], most));
            let curve = simulation.memory(rank).unwrap();
            prop_assert!(curve.is_sorted_by(|a, b| a.0 <= b.0));
            prop_assert!(close(curve.last().unwrap().1, level));
            prop_assert!(close(curve.iter().map(|point| point.1).fold(0.0, f64::max), most));
        }
    }

    #[test]
    fn a_rank_is_busy_or_idle_for_a_reason((schedule, costs) in made_and_costs()) {
        let simulation = schedule.simulate(&costs).unwrap();
        for rank in 0..schedule.ranks() {
            let idle = simulation.idle(rank).unwrap();
            prop_assert!(idle.is_sorted_by(|a, b| a.end <= b.start));
            let sum: f64 = idle.iter().map(|idle| idle.end - idle.start).sum();
            prop_assert!(close(sum, simulation.bubble()[rank]), "{} {:?}", sum, simulation.bubble());
            for idle in idle {
                match idle.cause {
                    Cause::Waits(action) | Cause::Transfer(action) => {
                        let other = schedule.rank_of(action.stage()).unwrap();
                        prop_assert!(other != rank);
                        let spans = simulation.spans(other).unwrap();
                        let ended = spans.iter().find(|span| span.action == action).unwrap().end;
                        prop_assert_eq!(ended >= idle.end, matches!(idle.cause, Cause::Waits(_)), "{:?}", idle);
                    }
                    Cause::Sends(action) => {
                        prop_assert_eq!(costs.links, Links::Blocking);
                        prop_assert_eq!(schedule.rank_of(action.stage()), Some(rank));
                    }
                    Cause::Done => prop_assert_eq!(idle.end, simulation.makespan()),
                }
            }
        }
    }

    #[test]
    fn the_critical_path_is_as_long_as_the_step((schedule, costs) in made_and_costs()) {
        let simulation = schedule.simulate(&costs).unwrap();
        let path = simulation.critical_path();
        prop_assert_eq!(path[0].1.start, 0.0);
        prop_assert_eq!(path.last().unwrap().1.end, simulation.makespan());
        for pair in path.windows(2) {
            let ((rank, before), (next_rank, after)) = (pair[0], pair[1]);
            if rank == next_rank && before.start == after.start && before.end > before.start {
                prop_assert!(before.end == after.end); // the two overlap
            } else if rank == next_rank && costs.links != Links::Blocking {
                prop_assert_eq!(before.end, after.start);
            } else if rank != next_rank && costs.links != Links::Serial {
                let stage = before.action.stage().min(after.action.stage());
                let way = costs.transfer.of(stage) + costs.latency.of(stage);
                prop_assert!(close(before.end + way, after.start));
            }
        }
    }

    #[test]
    fn dualpipe_v_has_the_bubble_of_its_formula(p in 1u32..9, rounds in 2u32..4, w in 1u32..4, i in 0u32..6) {
        // Each time is of one of a rank's two stages; a forward takes as long as an input's gradient.
        let (f, i) = (i + w, i + w);
        let m = 2 * p * rounds;
        let costs = times(f, i, w);
        let simulation = make(Maker::DualpipeV, p as usize, m as usize).simulate(&costs).unwrap();
        let both = f64::from(f + i + w);
        let bubble = simulation.cost() - simulation.work()[0];
        prop_assert!(close(bubble, f64::from(p - 1) * (both + f64::from(i + w) - 3.0 * f64::from(w))), "{}", bubble);
    }

    #[test]
    fn bubbles_are_those_of_the_formulas(p in 1u32..9, rounds in 2u32..5, w in 1u32..6, f in 0u32..4, i in 0u32..4) {
        // Where weights' gradients take no longer than the rest; that is what the formulas are for.
        let (f, i) = (f + w, i + w);
        let m = rounds * p;
        let (p1, all) = (p - 1, f + i + w);
        let whole = 2 * p1 * all; // in units of half a stage for those that divide by two stages
        let table = [
            (Maker::Gpipe, whole),
            (Maker::OneFOneB, whole),
            (Maker::Interleaved1F1B, whole),
            (Maker::LoopedBfs, whole),
            (Maker::ZbH1, 2 * p1 * (f + i - w)),
            (Maker::InterleavedZb, 2 * p1 * (f + i - w)),
        ];
        for (maker, twice_bubble) in table {
            let simulation = make(maker, p as usize, m as usize).simulate(&times(f, i, w)).unwrap();
            let v = if matches!(maker, Maker::Interleaved1F1B | Maker::LoopedBfs | Maker::InterleavedZb) { 2 } else { 1 };
            let bubble = simulation.cost() - f64::from(m * all * v);
            prop_assert!(close(2.0 * bubble, f64::from(twice_bubble)), "{} {} {}", maker, bubble, twice_bubble);
        }
    }
}

#[test]
fn v_half_and_v_min_are_as_published() {
    // 8 ranks, 32 micro-batches, all parts of the work equal.
    for (maker, rate, memory) in [(Maker::VHalf, 0.0813, 10.0), (Maker::VMin, 0.1233, 8.0)] {
        let simulation = make(maker, 8, 32).simulate(&times(1000, 1000, 1000)).unwrap();
        assert!((simulation.bubble_rate() - rate).abs() < 0.00005, "{maker}: {}", simulation.bubble_rate());
        assert!(close(peak(&simulation), memory), "{maker}: {}", peak(&simulation));
    }
}

#[test]
fn v_half_and_v_min_keep_their_memory_whatever_the_size() {
    for p in 1..34usize {
        for m in [1, 2, p, 2 * p + 1, 3 * p] {
            // In units of the activations of one of a rank's two stages.
            for (maker, most) in [(Maker::VHalf, p + 2), (Maker::VMin, (2 * p + 8) / 3)] {
                let simulation = make(maker, p, m).simulate(&Costs::default()).unwrap();
                let most = f64::from(u32::try_from(most).unwrap());
                assert!(peak(&simulation) <= most, "{maker} {p} {m}: {} > {most}", peak(&simulation));
            }
        }
    }
}

#[test]
fn memory_is_that_of_the_table() {
    for p in 1..9usize {
        let m = 4 * p;
        // In units of a micro-batch's activations on one stage; a rank with two stages has two for each micro-batch.
        let peak_of = |maker| peak(&make(maker, p, m).simulate(&Costs::default()).unwrap());
        let float = |value: usize| f64::from(u32::try_from(value).unwrap());
        assert!(close(peak_of(Maker::Gpipe), float(m)));
        assert!(close(peak_of(Maker::LoopedBfs), float(2 * m)));
        assert!(close(peak_of(Maker::OneFOneB), float(p)));
        assert!(close(peak_of(Maker::Interleaved1F1B), float(2 * p + p - 1)), "{p}");
        assert!(close(peak_of(Maker::ZbH1), float(p)));
        assert!(close(peak_of(Maker::ZbH2), float(2 * p - 1)));
        assert!(close(peak_of(Maker::ZbV), float(2 * p)));
        assert!(close(peak_of(Maker::DualpipeV), float(2 * p + 1)));
        let each = make(Maker::OneFOneB, p, m).simulate(&Costs::default()).unwrap();
        assert_eq!(each.peak_memory(), (0..p).map(|rank| float(p - rank)).collect::<Vec<_>>());
    }
}

#[test]
fn recomputation_costs_time_and_keeps_no_activations_before() {
    let actions = "0F0 0F1 0R1 0B1 0R0 0B0".split(' ').map(|text| text.parse().unwrap()).collect();
    let schedule = Schedule::new("by hand", &[0], 2, true, vec![actions]).unwrap();
    let simulation = schedule.simulate(&Costs { recompute: Some(3.0.into()), ..times(2, 1, 1) }).unwrap();
    assert!(close(simulation.makespan(), 14.0));
    assert!(close(simulation.bubble_rate(), 6.0 / 14.0)); // what is done twice is no progress
    assert!(close(simulation.bubble()[0], 0.0));
    assert!(close(peak(&simulation), 1.0));
}

#[test]
fn a_slow_link_reverses_the_order() {
    let at = |maker, stage: f64, transfer: f64| {
        let costs = Costs { transfer: transfer.into(), ..Costs::new(stage, stage, stage).unwrap() };
        make(maker, 4, 8).simulate(&costs).unwrap().makespan()
    };
    assert!(at(Maker::OneFOneB, 2.0, 0.0) > at(Maker::Interleaved1F1B, 1.0, 0.0));
    assert!(at(Maker::OneFOneB, 2.0, 6.0) < at(Maker::Interleaved1F1B, 1.0, 6.0));
}

#[test]
fn costs_that_do_not_fit_are_refused() {
    let schedule = make(Maker::ZbV, 2, 2);
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let costs = Costs { transfer: vec![0.0, bad, 0.0, 0.0].into(), ..Costs::default() };
        assert!(matches!(schedule.simulate(&costs), Err(Error::BadCost { what: "transfer", .. })));
    }
    let costs = Costs { weight_grad_memory: f64::NAN.into(), ..Costs::default() };
    assert!(matches!(costs.check(None), Err(Error::BadMemory { what: "weight_grad_memory", .. })));
    let costs = Costs { forward: vec![1.0, 2.0].into(), ..Costs::default() };
    let error = schedule.simulate(&costs).unwrap_err().to_string();
    assert_eq!(
        error,
        "the cost forward has 2 numbers for 4 stages; give one number for all, or one for each"
    );
}
