//! Lowering: what comes out is valid, computes the same in the same order, and lists what must be where it must be.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{Action, Costs, Error, Kind, Lowering, Maker, Recompute, Schedule};

fn actions(schedule: &Schedule, rank: usize) -> &[Action] {
    schedule.actions(rank).unwrap()
}

/// Any schedule of a maker with some of its pairs overlapping, whole or as inference.
fn schedules() -> impl Strategy<Value = Schedule> {
    let maker = prop::sample::select(Maker::ALL);
    (maker, 1usize..6, 1usize..12, any::<bool>(), any::<u64>()).prop_filter_map(
        "what the maker permits",
        |(maker, ranks, m, inference, seed)| {
            let made = maker.make(ranks, m, None).ok()?;
            let placement: Vec<_> = made.placement().collect();
            if inference {
                let forwards = |rank| {
                    let list = made.actions(rank).unwrap().iter().copied();
                    list.filter(|action| action.kind() == Kind::Forward).collect()
                };
                let lists = (0..ranks).map(forwards).collect();
                return Some(Schedule::new("inference", &placement, m, false, lists).unwrap());
            }
            let lists: Vec<_> = (0..ranks).map(|rank| made.actions(rank).unwrap().to_vec()).collect();
            let mut overlaps = vec![Vec::new(); ranks];
            let mut random = seed;
            for (rank, list) in lists.iter().enumerate() {
                let mut free = 0;
                for position in 0..list.len().saturating_sub(1) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (first, second) = (list[position], list[position + 1]);
                    let fits = first.kind() == Kind::Forward
                        && matches!(second.kind(), Kind::Backward | Kind::InputGrad)
                        && (first.stage(), first.microbatch()) != (second.stage(), second.microbatch());
                    if fits && position >= free && random >> 62 == 0 {
                        overlaps[rank].push(position);
                        free = position + 2;
                    }
                }
            }
            let paired =
                Schedule::new("pairs", &placement, m, true, lists).unwrap().with_overlaps(overlaps).unwrap();
            // Pairs may make ranks wait for one another.
            Some(if paired.verify().is_ok() { paired } else { made })
        },
    )
}

proptest! {
    #[test]
    fn lowered_schedules_are_valid_and_compute_the_same(schedule in schedules(), waits in any::<bool>()) {
        let lowered = schedule.lower(Lowering { waits, ..Lowering::default() }).unwrap();
        prop_assert_eq!(lowered.verify(), Ok(()), "{}", lowered.to_csv());
        prop_assert_eq!(lowered.computations(), Ok(schedule.clone()));
        prop_assert_eq!(Schedule::from_csv(lowered.name(), &lowered.to_csv()), Ok(lowered.clone()));
        let has_waits = lowered.to_csv().contains("WAIT");
        prop_assert_eq!(has_waits, waits && (schedule.backward() || schedule.ranks() > 1), "{}", lowered.to_csv());
        if schedule.ranks() > 1 {
            prop_assert_eq!(lowered.lower(Lowering::default()), Err(Error::Lowered { what: "what is sent and received" }));
        }
    }

    #[test]
    fn invariant_2_little_of_what_was_sent_is_alive(schedule in schedules()) {
        let lowered = schedule.lower(Lowering::default()).unwrap();
        for rank in 0..lowered.ranks() {
            let mut alive = vec![0usize; lowered.stages()];
            for action in actions(&lowered, rank) {
                let alive = &mut alive[action.stage()];
                match action.kind() {
                    Kind::SendBackward => *alive += 1,
                    Kind::SendForward if !lowered.backward() => *alive += 1,
                    Kind::WaitSendBackward => *alive -= 1,
                    Kind::WaitSendForward if !lowered.backward() => *alive -= 1,
                    _ => {}
                }
                // The one before is waited for ahead of the next, so one at a time has left and not been waited for.
                prop_assert!(*alive <= 1, "{}", lowered.to_csv());
            }
        }
    }

    #[test]
    fn invariant_3_gradients_are_reduced_as_soon_as_they_are_there(schedule in schedules()) {
        let lowered = schedule.lower(Lowering::default()).unwrap();
        for stage in 0..lowered.stages() {
            let list = actions(&lowered, lowered.rank_of(stage).unwrap());
            let reduction = list.iter().position(|a| a.stage() == stage && a.kind() == Kind::ReduceGrad);
            prop_assert_eq!(reduction.is_some(), lowered.backward());
            let Some(reduction) = reduction else { continue };
            // Nothing but what belongs to the same computation stands between the two.
            let before = list[..reduction].iter().rposition(|a| a.kind().computes()).unwrap();
            let between = &list[before + 1..reduction];
            let sends_or_waits = |a: &Action| {
                !a.kind().computes() && !matches!(a.kind(), Kind::RecvForward | Kind::RecvBackward)
            };
            prop_assert!(between.iter().all(sends_or_waits), "{}", lowered.to_csv());
            let adds = |a: &&Action| a.stage() == stage && matches!(a.kind(), Kind::Backward | Kind::WeightGrad);
            prop_assert_eq!(list[..reduction].iter().filter(adds).count(), lowered.microbatches());
            let last = list[..reduction].iter().rposition(|a| adds(&a)).unwrap();
            prop_assert!(list[last + 1..reduction].iter().all(|a| !a.kind().computes()), "{}", lowered.to_csv());
        }
    }

    #[test]
    fn lowering_changes_neither_times_nor_memory(schedule in schedules(), unsharded in 2usize..4, i in 0u8..4) {
        let costs = Costs { transfer: f64::from(i).into(), latency: 0.5.into(), ..Costs::default() };
        let lowered = schedule.lower(Lowering { unsharded: Some(unsharded), ..Lowering::default() }).unwrap();
        prop_assert_eq!(lowered.verify(), Ok(()), "{}", lowered.to_csv());
        let (before, after) = (schedule.simulate(&costs).unwrap(), lowered.simulate(&costs).unwrap());
        prop_assert!((before.makespan() - after.makespan()).abs() < 1e-9);
        prop_assert_eq!(before.peak_memory(), after.peak_memory());
    }

    #[test]
    fn recomputations_come_before_the_gradient(schedule in schedules(), always in any::<bool>()) {
        let recompute = if always { Recompute::Always } else { Recompute::ExceptLast };
        let lowered = schedule.lower(Lowering { recompute, ..Lowering::default() }).unwrap();
        prop_assert_eq!(lowered.verify(), Ok(()), "{}", lowered.to_csv());
        let m = lowered.microbatches();
        let count = if always { m } else { m - 1 };
        let all = (0..lowered.ranks()).flat_map(|rank| actions(&lowered, rank));
        let recomputed = all.filter(|action| action.kind() == Kind::Recompute).count();
        prop_assert_eq!(recomputed, if lowered.backward() { lowered.stages() * count } else { 0 });
        for rank in 0..lowered.ranks() {
            let computations: Vec<_> = actions(&lowered, rank).iter().filter(|a| a.kind().computes()).collect();
            for (position, action) in computations.iter().enumerate().filter(|(_, a)| a.kind() == Kind::Recompute) {
                let is_backward = |a: &&&Action| {
                    matches!(a.kind(), Kind::Backward | Kind::InputGrad)
                        && (a.stage(), a.microbatch()) == (action.stage(), action.microbatch())
                };
                // Right behind it, or behind the forward that it overlaps with.
                let next = &computations[position + 1..];
                prop_assert!(next[..next.len().min(2)].iter().any(|a| is_backward(&a)), "{}", lowered.to_csv());
            }
        }
    }

    #[test]
    fn a_gradient_that_is_waited_for_comes_behind_the_recomputation(ranks in 2usize..6, m in 1usize..6) {
        // Each rank has nothing else to do before its first backward.
        let schedule = Maker::Gpipe.make(ranks, m, None).unwrap();
        let lowered =
            schedule.lower(Lowering { recompute: Recompute::Always, ..Lowering::default() }).unwrap();
        for rank in 0..ranks - 1 {
            let of = |kind| actions(&lowered, rank).iter().position(|action| action.kind() == kind).unwrap();
            prop_assert!(of(Kind::Recompute) < of(Kind::RecvBackward), "{}", lowered.to_csv());
        }
    }
}

#[test]
fn transfers_that_meet_stand_side_by_side_on_both_ranks() {
    let schedule = Maker::OneFOneB.make(2, 4, None).unwrap();
    let lowered = schedule.lower(Lowering { waits: false, ..Lowering::default() }).unwrap();
    let expected = "\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,0RECV_B1,0B1,0F3,0SEND_F3,0RECV_B2,0B2,0RECV_B3,0B3,0REDUCE_GRAD
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1RECV_F2,1SEND_B1,1F2,1B2,1RECV_F3,1SEND_B2,1F3,1B3,1SEND_B3,1REDUCE_GRAD
";
    assert_eq!(lowered.to_csv(), expected);
}

#[test]
fn what_the_schedule_says_itself_is_kept() {
    let text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n";
    let lowered = Schedule::from_csv("x", text).unwrap().lower(Lowering::default()).unwrap();
    lowered.verify().unwrap();
    let expected = "\
0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0RESHARD,0REDUCE_GRAD
1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_SEND_B0
";
    assert_eq!(lowered.to_csv(), expected);
    let broken = Schedule::from_csv("x", "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0").unwrap();
    assert!(matches!(broken.lower(Lowering::default()), Err(Error::Deadlock { .. })));
}

#[test]
fn gradients_side_by_side_become_a_whole_backward() {
    let csv = "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W1,1W0\n";
    let schedule = Schedule::from_csv("by hand", csv).unwrap();
    let lowered = schedule.lower(Lowering { merge: true, ..Lowering::default() }).unwrap();
    assert_eq!(lowered.verify(), Ok(()));
    let computed = lowered.computations().unwrap().to_csv();
    assert_eq!(computed, "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n");
}

proptest! {
    #[test]
    fn merged_schedules_are_valid_and_leave_nothing_to_merge(schedule in schedules()) {
        let lowered = schedule.lower(Lowering { merge: true, ..Lowering::default() }).unwrap();
        prop_assert_eq!(lowered.verify(), Ok(()));
        let merged = lowered.computations().unwrap();
        for rank in 0..schedule.ranks() {
            // A whole backward, taken apart again, is what there was.
            let apart = |schedule: &Schedule| -> Vec<Action> {
                let part = |action: &Action, kind| Action::new(kind, action.stage(), action.microbatch()).unwrap();
                let of = |action: &Action| match action.kind() {
                    Kind::Backward => vec![part(action, Kind::InputGrad), part(action, Kind::WeightGrad)],
                    _ => vec![*action],
                };
                actions(schedule, rank).iter().flat_map(of).collect()
            };
            prop_assert_eq!(apart(&merged), apart(&schedule));
            let again = merged.lower(Lowering { merge: true, ..Lowering::default() }).unwrap();
            prop_assert_eq!(&again, &lowered);
        }
    }
}

#[test]
fn lanes_of_one_process_copy() {
    let schedule = Schedule::from_csv("by hand", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").unwrap();
    let lowered = schedule.lower(Lowering { copies: true, ..Lowering::default() }).unwrap();
    let csv = "0F0,0F1,0COPY_B0,0WAIT_COPY_B0,0B0,0COPY_B1,0WAIT_COPY_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n\
               1COPY_F0,1WAIT_COPY_F0,1F0,1COPY_F1,1B0,1WAIT_COPY_F1,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
    assert_eq!(lowered.to_csv(), csv);
    assert_eq!(lowered.verify(), Ok(()));
    let read = Schedule::from_json(&lowered.to_json().unwrap()).unwrap();
    assert_eq!(read, lowered);
    assert_eq!(lowered.computations().unwrap().to_csv(), schedule.to_csv());
    let error = lowered.lower(Lowering::default()).unwrap_err();
    assert_eq!(error, Error::Lowered { what: "what is copied" });
    let costs = Costs { transfer: 0.5.into(), ..Costs::default() };
    let (before, after) = (schedule.simulate(&costs).unwrap(), lowered.simulate(&costs).unwrap());
    assert_eq!((before.makespan(), before.peak_memory()), (after.makespan(), after.peak_memory()));
    // Each refusal by its rule.
    let table = [
        (
            "1WAIT_COPY_F1,1F1",
            "1F1,1WAIT_COPY_F1",
            "1F1 (rank 1, position 5) needs 1WAIT_COPY_F1, which comes later",
        ),
        ("1COPY_F1,", ",", "1COPY_F1 is missing on rank 1"),
        ("0COPY_B1,", "0COPY_B1,0COPY_B1,", "0COPY_B1 (rank 0, position 6): done already at position 5"),
        ("1F0,", "1F0,1COPY_B0,", "1COPY_B0 (rank 1, position 3): there is no stage after"),
        (
            "0F0,",
            "0F0,0SEND_F0,",
            "0COPY_B0 (rank 0, position 3): results are sent and received in this schedule",
        ),
        ("0F0,0F1,0COPY_B0", "0COPY_B0,0F0,0F1", "deadlock: 0COPY_B0 (rank 0, position 0) waits for 1B0"),
    ];
    for (right, wrong, message) in table {
        let changed = Schedule::from_csv("changed", &csv.replacen(right, wrong, 1)).unwrap();
        let error = changed.verify().unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}
