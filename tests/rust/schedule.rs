//! Schedules: the GPipe maker, the invariants of `schedule/verify.rs` with a counterexample for each fault, simulation.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{
    Action, Blocked, Costs, Error, Gpipe, Held, Kind, Lowering, MAX_CELLS, MAX_STAGES, Maker, Recompute,
    Schedule, make_gpipe,
};

fn options() -> impl Strategy<Value = Gpipe> {
    let recompute = prop::sample::select(&[Recompute::Never, Recompute::ExceptLast, Recompute::Always]);
    (any::<bool>(), any::<bool>(), recompute).prop_map(|(backward, ascending, recompute)| Gpipe {
        backward,
        ascending,
        recompute,
    })
}

/// A schedule from a text: a rank per line, its actions separated by blanks.
fn schedule(placement: &[usize], microbatches: usize, text: &str) -> Schedule {
    let actions = |line: &str| line.split_whitespace().map(|action| action.parse().unwrap()).collect();
    let lines = text.trim().lines().map(actions).collect();
    Schedule::new("by hand", placement, microbatches, true, lines).unwrap()
}

fn lists(schedule: &Schedule) -> Vec<Vec<Action>> {
    (0..schedule.ranks()).map(|rank| schedule.actions(rank).unwrap().to_vec()).collect()
}

fn with_lists(schedule: &Schedule, lists: Vec<Vec<Action>>) -> Schedule {
    let placement: Vec<_> = (0..schedule.stages()).map(|stage| schedule.rank_of(stage).unwrap()).collect();
    Schedule::new("changed", &placement, schedule.microbatches(), schedule.backward(), lists).unwrap()
}

/// Whether a schedule can be carried out, by trying again and again: quadratic, and nothing like the verification.
fn runs_to_the_end(schedule: &Schedule) -> bool {
    let last = schedule.stages() - 1;
    let mut queues: Vec<_> = lists(schedule).into_iter().map(|list| list.into_iter().peekable()).collect();
    let mut done: Vec<Action> = Vec::new();
    loop {
        let before = done.len();
        for queue in &mut queues {
            while let Some(action) = queue.next_if(|action| {
                let has =
                    |kind, stage| done.contains(&Action::new(kind, stage, action.microbatch()).unwrap());
                let (stage, has_grad) =
                    (action.stage(), |stage| has(Kind::Backward, stage) || has(Kind::InputGrad, stage));
                match action.kind() {
                    Kind::Forward => stage == 0 || has(Kind::Forward, stage - 1),
                    Kind::WeightGrad => has(Kind::InputGrad, stage),
                    _ => has(Kind::Forward, stage) && (stage == last || has_grad(stage + 1)),
                }
            }) {
                done.push(action);
            }
        }
        if done.len() == before {
            return queues.iter_mut().all(|queue| queue.peek().is_none());
        }
    }
}

/// Correct schedules of several stages per rank, whole or split, by taking any action that can be taken.
fn random_schedule() -> impl Strategy<Value = Schedule> {
    let shape = (1usize..4, 1usize..5, 1usize..4).prop_flat_map(|(ranks, stages, microbatches)| {
        let placement = proptest::collection::vec(0..ranks, stages);
        let split = proptest::collection::vec(any::<bool>(), stages * microbatches);
        (Just(ranks), placement, Just(microbatches), split, any::<u64>())
    });
    shape.prop_map(|(ranks, placement, microbatches, split, seed)| {
        let stages = placement.len();
        let mut actions = vec![Vec::new(); ranks];
        let mut random = seed;
        let mut open: Vec<Action> =
            (0..microbatches).map(|i| Action::new(Kind::Forward, 0, Some(i)).unwrap()).collect();
        while !open.is_empty() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let chosen = open.swap_remove(usize::try_from(random >> 33).unwrap() % open.len());
            actions[placement[chosen.stage()]].push(chosen);
            let microbatch = chosen.microbatch();
            let backward = |stage: usize| {
                let kind = if split[stage * microbatches + microbatch.unwrap()] {
                    Kind::InputGrad
                } else {
                    Kind::Backward
                };
                Action::new(kind, stage, microbatch).unwrap()
            };
            match chosen.kind() {
                Kind::Forward if chosen.stage() + 1 < stages => {
                    open.push(Action::new(Kind::Forward, chosen.stage() + 1, microbatch).unwrap());
                }
                Kind::Forward => open.push(backward(chosen.stage())),
                Kind::Backward | Kind::InputGrad => {
                    if chosen.stage() > 0 {
                        open.push(backward(chosen.stage() - 1));
                    }
                    if chosen.kind() == Kind::InputGrad {
                        open.push(Action::new(Kind::WeightGrad, chosen.stage(), microbatch).unwrap());
                    }
                }
                _ => {}
            }
        }
        Schedule::new("random", &placement, microbatches, true, actions).unwrap()
    })
}

proptest! {
    #[test]
    fn gpipe_is_valid_and_as_described(ranks in 1usize..9, m in 1usize..12, options in options()) {
        let schedule = make_gpipe(ranks, m, options).unwrap();
        prop_assert_eq!(schedule.verify(), Ok(()));
        prop_assert_eq!((schedule.ranks(), schedule.stages(), schedule.microbatches()), (ranks, ranks, m));
        for rank in 0..ranks {
            let kinds = |kind: Kind| {
                let mine = schedule.actions(rank).unwrap().iter().filter(move |action| action.kind() == kind);
                mine.map(|action| action.microbatch().unwrap()).collect::<Vec<_>>()
            };
            prop_assert_eq!(schedule.rank_of(rank), Some(rank));
            prop_assert_eq!(kinds(Kind::Forward), (0..m).collect::<Vec<_>>());
            let expected: Vec<_> = match options {
                Gpipe { backward: false, .. } => vec![],
                Gpipe { ascending: true, .. } => (0..m).collect(),
                Gpipe { ascending: false, .. } => (0..m).rev().collect(),
            };
            prop_assert_eq!(kinds(Kind::Backward), expected);
            let mut recomputed: Vec<_> = match options.recompute {
                _ if !options.backward => vec![],
                Recompute::Never => vec![],
                Recompute::ExceptLast => (0..m - 1).collect(),
                Recompute::Always => (0..m).collect(),
            };
            if !options.ascending {
                recomputed.reverse();
            }
            prop_assert_eq!(kinds(Kind::Recompute), recomputed);
            let actions = schedule.actions(rank).unwrap();
            prop_assert!(actions[..m].iter().all(|action| action.kind() == Kind::Forward));
            for pair in actions.windows(2).filter(|pair| pair[0].kind() == Kind::Recompute) {
                prop_assert_eq!((pair[1].kind(), pair[1].microbatch()), (Kind::Backward, pair[0].microbatch()));
            }
        }
    }

    #[test]
    fn gpipe_has_the_bubble_of_the_formula(
        ranks in 1u32..9, m in 1u32..12, f in 1u32..9, b in 1u32..9, w in 1u32..9, ascending in any::<bool>(),
    ) {
        let options = Gpipe { ascending, ..Gpipe::default() };
        let schedule = make_gpipe(ranks as usize, m as usize, options).unwrap();
        let simulation = schedule.simulate(&Costs::new(f.into(), b.into(), w.into()).unwrap()).unwrap();
        let (bubble, work) = (f64::from((ranks - 1) * (f + b + w)), f64::from(m * (f + b + w)));
        prop_assert!((simulation.makespan() - (bubble + work)).abs() < 1e-9);
        prop_assert!((simulation.bubble_rate() - bubble / (bubble + work)).abs() < 1e-12);
    }

    #[test]
    fn whatever_can_be_carried_out_is_accepted(schedule in random_schedule()) {
        prop_assert_eq!(schedule.verify(), Ok(()));
    }

    #[test]
    fn invariant_2_a_lost_action_is_found(schedule in random_schedule(), which in any::<prop::sample::Index>()) {
        let mut lists = lists(&schedule);
        let busy: Vec<_> = (0..lists.len()).filter(|&rank| !lists[rank].is_empty()).collect();
        let list = &mut lists[busy[which.index(busy.len())]];
        list.remove(which.index(list.len()));
        let error = with_lists(&schedule, lists).verify().unwrap_err();
        prop_assert!(matches!(error, Error::Missing { .. }), "{}", error);
    }

    #[test]
    fn invariant_2_a_repeated_action_is_found(schedule in random_schedule(), which in any::<prop::sample::Index>()) {
        let mut lists = lists(&schedule);
        let busy: Vec<_> = (0..lists.len()).filter(|&rank| !lists[rank].is_empty()).collect();
        let rank = busy[which.index(busy.len())];
        let first = which.index(lists[rank].len());
        let again = lists[rank][first];
        lists[rank].push(again);
        let position = lists[rank].len() - 1;
        match with_lists(&schedule, lists).verify() {
            Err(Error::Repeated { at, first: found }) => {
                prop_assert_eq!((at.rank, at.position, at.action, found), (rank, position, again, first));
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn invariants_3_and_4_are_exactly_what_trying_says(
        schedule in random_schedule(), swaps in proptest::collection::vec(any::<(usize, usize, usize)>(), 0..4),
    ) {
        let mut lists = lists(&schedule);
        for (rank, a, b) in swaps {
            let ranks = lists.len();
            let list = &mut lists[rank % ranks];
            if !list.is_empty() {
                let length = list.len();
                list.swap(a % length, b % length);
            }
        }
        let changed = with_lists(&schedule, lists);
        let verdict = changed.verify();
        prop_assert_eq!(verdict.is_ok(), runs_to_the_end(&changed), "{:?}\n{}", verdict, changed.draw(200));
        match verdict {
            Ok(()) => {}
            Err(Error::OutOfOrder { at, needs, later }) => {
                prop_assert!(at.position < later);
                prop_assert_eq!(changed.actions(at.rank).unwrap()[later], needs);
            }
            Err(Error::Deadlock { cycle }) => prop_assert!(is_a_cycle(&changed, &cycle), "{:?}", cycle),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn simulated_times_keep_every_order(schedule in random_schedule(), f in 0u32..4, i in 0u32..4, w in 0u32..4) {
        let simulation = schedule.simulate(&Costs::new(f.into(), i.into(), w.into()).unwrap()).unwrap();
        let spans: Vec<_> = (0..schedule.ranks()).flat_map(|rank| simulation.spans(rank).unwrap()).collect();
        let ends = |kinds: &[Kind], stage: usize, microbatch| {
            let wanted = |action: Action| {
                kinds.contains(&action.kind()) && action.stage() == stage && action.microbatch() == microbatch
            };
            spans.iter().find(|span| wanted(span.action)).unwrap().end
        };
        for span in &spans {
            let (action, microbatch) = (span.action, span.action.microbatch());
            let grads = &[Kind::Backward, Kind::InputGrad];
            if action.kind() == Kind::Forward && action.stage() > 0 {
                prop_assert!(ends(&[Kind::Forward], action.stage() - 1, microbatch) <= span.start);
            }
            if grads.contains(&action.kind()) {
                prop_assert!(ends(&[Kind::Forward], action.stage(), microbatch) <= span.start);
                if action.stage() + 1 < schedule.stages() {
                    prop_assert!(ends(grads, action.stage() + 1, microbatch) <= span.start);
                }
            }
        }
        for rank in 0..schedule.ranks() {
            let spans = simulation.spans(rank).unwrap();
            prop_assert!(spans.is_sorted_by(|before, after| before.end <= after.start));
            let order: Vec<_> = spans.iter().map(|span| span.action).collect();
            prop_assert_eq!(&order, schedule.actions(rank).unwrap());
        }
    }
}

/// Every entry waits for something that stands at or behind the head of the next.
fn is_a_cycle(schedule: &Schedule, cycle: &[Blocked]) -> bool {
    let next = cycle.iter().cycle().skip(1);
    !cycle.is_empty()
        && cycle.iter().zip(next).all(|(blocked, next)| {
            let list = schedule.actions(blocked.needs.rank).unwrap();
            blocked.needs.rank == next.at.rank
                && blocked.needs.position >= next.at.position
                && list[blocked.needs.position] == blocked.needs.action
        })
}

#[test]
fn faults_are_named_with_their_place() {
    // Placement, the ranks' lists, and what the message must say. Two micro-batches each.
    let table: [(&[usize], &str, &str); 15] = [
        (&[0], "0F0 0F1 0B1", "0B0 is missing on rank 0"),
        (&[0], "0F0 0B0", "0F1 is missing on rank 0"),
        (&[0], "0F0 0F1 0I0 0I1 0W0", "0W1 is missing on rank 0"),
        (&[0], "0F0 0F1 0F0", "0F0 (rank 0, position 2): done already at position 0"),
        (&[0], "0F0 0F2", "0F2 (rank 0, position 1): there are only 2 micro-batches"),
        (&[0], "0F0 1F0", "1F0 (rank 0, position 1): there is no stage 1, only 1 stages"),
        (&[0, 1], "0F0 1F0\n1F1", "1F0 (rank 0, position 1): stage 1 is placed on rank 1"),
        (&[0], "0F0 0B0 0I0", "0I0 (rank 0, position 2): this backward is both whole and split, with 0B0"),
        (&[0], "0F0 0I0 0B0", "0B0 (rank 0, position 2): this backward is both whole and split, with 0I0"),
        (&[0], "0B0 0F0", "0B0 (rank 0, position 0) needs 0F0, which comes later, at position 1"),
        (&[0], "0F0 0W0 0I0", "0W0 (rank 0, position 1) needs 0I0, which comes later, at position 2"),
        (&[0], "0F0 0B0 0R0", "0B0 (rank 0, position 1) needs 0R0, which comes later, at position 2"),
        (&[0, 0], "1F0 0F0", "1F0 (rank 0, position 0) needs 0F0, which comes later, at position 1"),
        (&[0, 0], "0F0 1F0 0B0 1B0", "0B0 (rank 0, position 2) needs 1B0, which comes later, at position 3"),
        (&[0], "0F0 0SEND_F0", "0SEND_F0 (rank 0, position 1): there is no stage after"),
    ];
    for (placement, text, message) in table {
        let error = schedule(placement, 2, text).verify().unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn a_deadlock_shows_who_waits_for_whom() {
    let crossed = schedule(&[0, 1], 2, "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0");
    assert_eq!(
        crossed.verify().unwrap_err().to_string(),
        "deadlock: 0B0 (rank 0, position 1) waits for 1B0 (rank 1, position 3); \
         1F1 (rank 1, position 1) waits for 0F1 (rank 0, position 2)"
    );
}

#[test]
fn a_rank_that_only_waits_for_the_deadlock_is_not_in_its_cycle() {
    let crossed = schedule(&[0, 1, 2], 1, "0B0 0F0\n1F0 1B0\n2F0 2B0").verify().unwrap_err();
    // Rank 0 alone is wrong, by its own order.
    assert!(matches!(crossed, Error::OutOfOrder { .. }), "{crossed}");
    let behind = schedule(
        &[0, 1, 2],
        2,
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B1 2B0", // rank 0 waits for rank 1
    );
    let Error::Deadlock { cycle } = behind.verify().unwrap_err() else { panic!("no deadlock") };
    assert_eq!(cycle.iter().map(|blocked| blocked.at.rank).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn recomputation_and_split_backwards_are_part_of_the_language() {
    schedule(&[0], 2, "0F0 0F1 0R1 0B1 0R0 0I0 0W0").verify().unwrap();
    schedule(&[0, 1, 1, 0], 1, "0F0 3F0 3I0 0B0 3W0\n1F0 2F0 2B0 1B0").verify().unwrap();
}

#[test]
fn forward_only_is_declared_and_not_guessed() {
    let inference = make_gpipe(2, 2, Gpipe { backward: false, ..Gpipe::default() }).unwrap();
    inference.verify().unwrap();
    let training = Schedule::new("lost its backward", &[0, 1], 2, true, lists(&inference)).unwrap();
    assert_eq!(training.verify().unwrap_err().to_string(), "0B0 is missing on rank 0");
    let full = make_gpipe(2, 2, Gpipe::default()).unwrap();
    let error = Schedule::new("too much", &[0, 1], 2, false, lists(&full)).unwrap().verify().unwrap_err();
    assert!(matches!(error, Error::UnexpectedBackward { .. }), "{error}");
}

#[test]
fn costs_are_times() {
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(Costs::new(1.0, bad, 1.0), Err(Error::BadCost { what: "input_grad", .. })));
    }
    let free =
        make_gpipe(2, 2, Gpipe::default()).unwrap().simulate(&Costs::new(0.0, 0.0, 0.0).unwrap()).unwrap();
    assert!(free.makespan().abs() < f64::EPSILON && free.bubble_rate().abs() < f64::EPSILON);
}

#[test]
fn a_replay_takes_the_times_that_it_is_given() {
    let plan = schedule(&[0, 1], 2, "0F0 0F1 0B1 0R0 0B0\n1F0 1F1 1B1 1B0");
    let replayed = plan.replay(&[vec![1.0, 2.0, 4.0, 2.0, 3.0], vec![5.0, 1.0, 2.0, 2.0]]).unwrap();
    let times = |rank| -> Vec<_> {
        replayed.spans(rank).unwrap().iter().map(|span| (span.start, span.end)).collect()
    };
    assert_eq!(times(1), [(1.0, 6.0), (6.0, 7.0), (7.0, 9.0), (9.0, 11.0)]);
    assert_eq!(times(0), [(0.0, 1.0), (1.0, 3.0), (9.0, 13.0), (13.0, 15.0), (15.0, 18.0)]);
    // The work of both is 10, since a recomputation is none.
    assert!((replayed.bubble_rate() - 8.0 / 18.0).abs() < 1e-12);
}

#[test]
fn a_replay_needs_a_time_for_each_action() {
    let plan = schedule(&[0, 1], 1, "0F0 0B0\n1F0 1B0");
    let fails = |durations: &[Vec<f64>]| plan.replay(durations).unwrap_err().to_string();
    let two = vec![1.0, 1.0];
    assert_eq!(
        fails(&[two.clone(), vec![1.0]]),
        "rank 1 has 2 actions, but 1 durations are given for it; give one for each"
    );
    assert!(fails(std::slice::from_ref(&two)).starts_with("rank 1 has 2 actions, but 0"));
    assert!(fails(&[two.clone(), two.clone(), two.clone()]).starts_with("rank 2 has 0 actions"));
    assert_eq!(
        fails(&[two, vec![1.0, -1.0]]),
        "the cost of an action must be finite and not negative, but is -1"
    );
}

proptest! {
    #[test]
    fn a_replay_with_one_time_for_each_kind_is_the_simulation(
        ranks in 1usize..6, m in 1usize..8, options in options(), f in 0u32..4, b in 0u32..4
    ) {
        let plan = make_gpipe(ranks, m, options).unwrap();
        let time = |action: &Action| f64::from(if action.kind() == Kind::Backward { b } else { f });
        let durations: Vec<Vec<f64>> =
            lists(&plan).iter().map(|actions| actions.iter().map(time).collect()).collect();
        let simulated = plan.simulate(&Costs::new(f.into(), b.into(), 0.0).unwrap()).unwrap();
        let replayed = plan.replay(&durations).unwrap();
        for rank in 0..ranks {
            prop_assert_eq!(replayed.spans(rank), simulated.spans(rank));
        }
        prop_assert!((replayed.bubble_rate() - simulated.bubble_rate()).abs() < 1e-12);
    }

    #[test]
    fn gpipe_holds_what_its_mode_says(ranks in 1usize..5, m in 1usize..9, options in options()) {
        let plan = make_gpipe(ranks, m, options).unwrap();
        let recomputed = match options.recompute {
            Recompute::Never => 0,
            Recompute::ExceptLast => m - 1,
            Recompute::Always => m,
        };
        for rank in 0..ranks {
            let held = plan.held(rank).unwrap().unwrap();
            if !options.backward {
                prop_assert!(held.iter().all(|held| *held == Held::default()));
                continue;
            }
            // After the last forward: all of them, as the mode says.
            prop_assert_eq!(held[m - 1], Held { inputs: recomputed, activations: m - recomputed });
            prop_assert_eq!(held.last().copied(), Some(Held::default()));
            // In reverse, not more than one recomputation is alive at a time.
            if !options.ascending {
                prop_assert!(held.iter().all(|held| held.activations <= (m - recomputed).max(1)));
            }
        }
    }
}

#[test]
fn a_split_backward_frees_with_the_weights_gradient() {
    let plan = schedule(&[0], 2, "0F0 0F1 0R1 0I1 0W1 0I0 0W0");
    let held = plan.held(0).unwrap().unwrap();
    let pairs: Vec<_> = held.iter().map(|held| (held.inputs, held.activations)).collect();
    assert_eq!(pairs, [(0, 1), (1, 1), (0, 2), (0, 2), (0, 1), (0, 1), (0, 0)]);
    assert!(plan.held(1).unwrap().is_none());
}

#[test]
fn sizes_are_limited_before_memory_is_taken() {
    let (limit, huge) = (MAX_CELLS, usize::MAX);
    for (ranks, m) in
        [(0, 1), (1, 0), (1, limit + 1), (MAX_STAGES + 1, 1), (huge, 1), (1, huge), (huge, huge)]
    {
        assert!(make_gpipe(ranks, m, Gpipe::default()).is_err(), "{ranks} {m}");
        assert!(Schedule::new("empty", &[0], m.max(limit + 1), true, vec![vec![]]).is_err());
    }
    assert!(matches!(
        Schedule::new("nowhere", &[0, 2], 1, true, vec![vec![], vec![]]),
        Err(Error::NoSuchRank { stage: 1, rank: 2, ranks: 2 })
    ));
}

#[test]
fn the_widest_and_the_longest_schedules_are_valid() {
    for (ranks, m) in [(MAX_STAGES, 1), (1, 1 << 20)] {
        make_gpipe(ranks, m, Gpipe::default()).unwrap().verify().unwrap();
    }
}

#[test]
fn an_action_takes_eight_bytes() {
    assert_eq!(size_of::<Action>(), 8);
}

#[test]
fn refusals_are_drawn_with_what_is_near() {
    let long = "0F0 0F1 0F2 0F3 0B3 0B0 0B2 0B1 0F4 0F5 0F6 0F7 0F8 0B4 0B5 0B9 0B6 0B7 0B8 0F9";
    let table: [(&[usize], usize, &str, &str); 9] = [
        (
            &[0],
            10,
            long,
            "rank 0 | ... 0F8 0B4 0B5 >0B9< 0B6 0B7 0B8 (0F9)\n> < needs ( ), which must come first",
        ),
        (&[0], 2, "0F0 0F1 0B0 0F1", "rank 0 | 0F0 (0F1) 0B0 >0F1<\n> < repeats ( )"),
        (&[0], 1, "0F0 0B0 0I0", "rank 0 | 0F0 (0B0) >0I0<\n> < contradicts ( )"),
        (&[0], 1, "0F0 0I0", "rank 0 | (0F0) (0I0)\n( ) is of the same micro-batch"),
        (&[0, 1], 1, "0F0 0B0\n", "rank 1 | (nothing)\n( ) is of the same micro-batch"),
        (&[0, 1], 1, "0F0 1F0\n1B0", "rank 0 | 0F0 >1F0<\n> < is at fault"),
        (
            &[0, 1],
            2,
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0",
            "rank 0 | 0F0 >0B0< (0F1) 0B1\nrank 1 | 1F0 >1F1< 1B1 (1B0)\nevery > < waits for a ( )",
        ),
        (
            &[0, 1],
            2,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0\n\
             1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            "rank 0 | ... 0SEND_F0 0F1 0SEND_F1 >0RECV_B1< 0B1 0RECV_B0 0B0\n\
             rank 1 | ... 1RECV_F1 1F1 1B0 (1SEND_B0) 1B1 1SEND_B1\n> < would be given ( )",
        ),
        (
            &[0, 1],
            2,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n\
             1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            "rank 0 | 0F0 0SEND_F0 0F1 >0SEND_F1< (0RECV_B0) 0B0 0RECV_B1 0B1\n\
             rank 1 | 1RECV_F0 1F0 1B0 >1SEND_B0< (1RECV_F1) 1F1 1B1 1SEND_B1\nevery > < waits for a ( )",
        ),
    ];
    for (placement, m, text, picture) in table {
        let lines: Vec<_> = text.split('\n').collect();
        let actions = |line: &&str| line.split_whitespace().map(|action| action.parse().unwrap()).collect();
        let schedule = Schedule::new("x", placement, m, true, lines.iter().map(actions).collect()).unwrap();
        let error = schedule.verify().unwrap_err();
        assert_eq!(schedule.picture_of(&error).as_deref(), Some(picture), "{error}");
    }
    assert_eq!(schedule(&[0], 1, "0F0 0B0").picture_of(&Error::NoLimits), None);
}

#[test]
fn a_long_circle_is_cut_to_a_readable_length() {
    // Twice around a ring, and every rank begins with the second time.
    let ranks = 20;
    let placement: Vec<_> = (0..2 * ranks).map(|stage| stage % ranks).collect();
    let list =
        |rank| [rank + ranks, rank].map(|stage| Action::new(Kind::Forward, stage, Some(0)).unwrap()).to_vec();
    let schedule = Schedule::new("ring", &placement, 1, false, (0..ranks).map(list).collect()).unwrap();
    let error = schedule.verify().unwrap_err();
    let Error::Deadlock { cycle } = &error else { panic!("{error}") };
    assert!(is_a_cycle(&schedule, cycle));
    assert_eq!(cycle.len(), ranks);
    let message = error.to_string();
    assert_eq!(message.matches("waits for").count(), 8, "{message}");
    assert!(message.ends_with("; and 12 more, back to the first"), "{message}");
    let picture = schedule.picture_of(&error).unwrap();
    assert_eq!(picture.lines().count(), 10, "{picture}");
    assert!(picture.contains("... 12 more ranks"), "{picture}");
}

#[test]
fn messages_of_transfers_say_what_is_wrong() {
    let table: [(&[usize], &str, &str); 6] = [
        (&[0, 1], "0F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "1RECV_F0 is missing on rank 1"),
        (
            &[0, 0],
            "0F0 0SEND_F0",
            "0SEND_F0 (rank 0, position 1): the stage after is on the same rank, so that nothing",
        ),
        (&[0], "0F0 0B0 0SEND_B0", "0SEND_B0 (rank 0, position 2): there is no stage before"),
        (
            &[0],
            "0F0 0REDUCE_GRAD 0B0",
            "0REDUCE_GRAD (rank 0, position 1) needs 0B0, which comes later, at position 2",
        ),
        (
            &[0],
            "0F0 0UNSHARD 0B0 0RESHARD",
            "0F0 (rank 0, position 0): the weights of stage 0 are sharded here",
        ),
        (
            &[0],
            "0UNSHARD 0UNSHARD 0F0 0B0",
            "0UNSHARD (rank 0, position 1): the weights of stage 0 are gathered already",
        ),
    ];
    for (placement, text, message) in table {
        let error = schedule(placement, 1, text).verify().unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn memory_limits_are_held_action_by_action() {
    let costs = Costs::default();
    let one = |m| Maker::OneFOneB.make(4, m, None).unwrap();
    // Rank r holds p - r micro-batches.
    assert_eq!(one(8).verify_within(&[4.0, 3.0, 2.0, 1.0], &costs), Ok(()));
    assert_eq!(one(8).verify_within(&[4.0], &costs), Ok(()));
    match one(8).verify_within(&[4.0, 3.0, 1.5, 1.0], &costs) {
        Err(Error::OverMemory { at, held, limit }) => {
            assert_eq!((at.rank, at.position, at.action.to_string()), (2, 1, "2F1".to_owned()));
            assert!((held - 2.0).abs() < 1e-12 && (limit - 1.5).abs() < 1e-12);
        }
        other => panic!("{other:?}"),
    }
    let recomputing = make_gpipe(2, 4, Gpipe { recompute: Recompute::Always, ..Gpipe::default() }).unwrap();
    assert_eq!(recomputing.verify_within(&[1.0], &costs), Ok(()));
    // Thirds do not add up exactly, and that is not held against them.
    let thirds =
        Costs { forward_memory: (0.1 + 0.2).into(), weight_grad_memory: (-0.3).into(), ..Costs::default() };
    assert_eq!(make_gpipe(1, 10, Gpipe::default()).unwrap().verify_within(&[3.0], &thirds), Ok(()));
    assert!(matches!(
        one(8).verify_within(&[1.0, 2.0], &costs),
        Err(Error::LimitsDiffer { given: 2, ranks: 4 })
    ));
    for bad in [f64::NAN, f64::NEG_INFINITY] {
        assert!(matches!(one(8).verify_within(&[bad], &costs), Err(Error::BadLimit { .. })));
    }
    assert_eq!(one(8).verify_within(&[f64::INFINITY], &costs), Ok(()));
    let broken = schedule(&[0], 1, "0B0 0F0");
    assert!(matches!(broken.verify_within(&[9.0], &costs), Err(Error::OutOfOrder { .. })));
}

proptest! {
    #[test]
    fn a_memory_limit_is_the_peak_of_the_simulation(
        maker in prop::sample::select(Maker::ALL), ranks in 1usize..5, m in 1usize..9, i in -3i32..4, w in -3i32..1,
    ) {
        let Ok(schedule) = maker.make(ranks, m, None) else { return Ok(()) };
        let costs = Costs { forward_memory: 3.0.into(), input_grad_memory: f64::from(i).into(),
            weight_grad_memory: f64::from(w).into(), ..Costs::default() };
        let peaks = schedule.simulate(&costs).unwrap().peak_memory().to_vec();
        prop_assert_eq!(schedule.verify_within(&peaks, &costs), Ok(()));
        let lowered = schedule.lower(Lowering::default()).unwrap();
        prop_assert_eq!(lowered.verify_within(&peaks, &costs), Ok(()));
        for rank in 0..ranks {
            let mut less = peaks.clone();
            less[rank] -= 0.5;
            let verdict = schedule.verify_within(&less, &costs);
            prop_assert!(matches!(verdict, Err(Error::OverMemory { at, .. }) if at.rank == rank), "{verdict:?}");
        }
    }
}
