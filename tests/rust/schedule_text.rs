//! Schedules as text: actions, JSON, pictures.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{
    Action, Costs, Entry, Error, Gpipe, Kind, Links, PerStage, Placement, Schedule, make_gpipe,
};

fn actions() -> impl Strategy<Value = Action> {
    (prop::sample::select(Kind::ALL), 0usize..65_536, 0usize..1 << 24).prop_map(
        |(kind, stage, microbatch)| {
            Action::new(kind, stage, kind.per_microbatch().then_some(microbatch)).unwrap()
        },
    )
}

/// Any lists of entries, however senseless, whose CSV says all about them: every stage and the last micro-batch occur.
fn any_schedule() -> impl Strategy<Value = Schedule> {
    let entry = |stages: usize, m: usize| {
        let action = (prop::sample::select(Kind::ALL), 0..stages, 0..m).prop_map(|(kind, stage, i)| {
            Action::new(kind, stage, kind.per_microbatch().then_some(i)).unwrap()
        });
        let backward = prop::sample::select(&[Kind::Backward, Kind::InputGrad]);
        let pair = (backward, 0..stages, 0..m, 0..stages, 0..m).prop_map(|(kind, s, i, t, j)| {
            let forward = Action::new(Kind::Forward, s, Some(i)).unwrap();
            Entry::Overlap(forward, Action::new(kind, t, Some(j)).unwrap())
        });
        prop_oneof![4 => action.prop_map(Entry::Single), 1 => pair]
    };
    let shape = (1usize..5, 1usize..5, 1usize..5);
    shape.prop_flat_map(move |(ranks, stages, m)| {
        let placement = proptest::collection::vec(0..ranks, stages);
        (placement, proptest::collection::vec(entry(stages, m), 0..40)).prop_map(
            move |(placement, entries)| {
                let (mut lists, mut overlaps) = (vec![Vec::new(); ranks], vec![Vec::new(); ranks]);
                for (stage, &rank) in placement.iter().enumerate() {
                    lists[rank].push(Action::new(Kind::Forward, stage, Some(m - 1)).unwrap());
                }
                for entry in entries {
                    let stages: Vec<_> = entry.actions().map(Action::stage).collect();
                    let rank = placement[stages[0]];
                    if stages.iter().all(|&stage| placement[stage] == rank) {
                        if let Entry::Overlap(..) = entry {
                            overlaps[rank].push(lists[rank].len());
                        }
                        lists[rank].extend(entry.actions());
                    }
                }
                let backward = lists.iter().flatten().any(|action| action.kind().of_backward());
                Schedule::new("any", &placement, m, backward, lists).unwrap().with_overlaps(overlaps).unwrap()
            },
        )
    })
}

proptest! {
    #[test]
    fn entries_are_read_as_they_are_written(schedule in any_schedule()) {
        for rank in 0..schedule.ranks() {
            for entry in schedule.entries(rank) {
                prop_assert_eq!(entry.to_string().parse(), Ok(entry));
            }
            let flat: Vec<_> = schedule.entries(rank).flat_map(Entry::actions).collect();
            prop_assert_eq!(flat, schedule.actions(rank).unwrap());
        }
    }

    #[test]
    fn csv_gives_the_same_schedule(schedule in any_schedule()) {
        let read = Schedule::from_csv("any", &schedule.to_csv());
        match read {
            Ok(read) => prop_assert_eq!(read, schedule),
            // Most of them lack actions, which is an error where the rows differ in length, and only then.
            Err(error) => prop_assert!(error.to_string().contains("before the longest"), "{}", error),
        }
    }

    #[test]
    fn json_gives_the_same_schedule_with_its_pairs(schedule in any_schedule()) {
        prop_assert_eq!(Schedule::from_json(&schedule.to_json().unwrap()), Ok(schedule));
    }

    #[test]
    fn reading_is_the_inverse_of_writing(action in actions()) {
        prop_assert_eq!(action.to_string().parse(), Ok(action));
    }

    #[test]
    fn what_is_read_is_written_again(text in "[0-9]{0,3}[A-Z_]{0,8}[0-9]{0,3}.{0,2}") {
        if let Ok(action) = text.parse::<Action>() {
            prop_assert_eq!(action.to_string(), text);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in any::<String>()) {
        let _ = text.parse::<Action>();
        let _ = text.parse::<Entry>();
        let _ = Schedule::from_csv("any", &text);
        let _ = Schedule::from_json(&text);
    }

    #[test]
    fn csv_with_a_changed_character_is_no_panic(at in any::<prop::sample::Index>(), with in "[-0-9A-Z_;(), \n\r]") {
        let csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n";
        let position = at.index(csv.len());
        let changed = format!("{}{with}{}", &csv[..position], &csv[position + 1..]);
        if let Ok(schedule) = Schedule::from_csv("any", &changed) {
            let _ = schedule.verify();
            prop_assert_eq!(Schedule::from_csv("any", &schedule.to_csv()), Ok(schedule));
        }
    }

    #[test]
    fn json_gives_the_same_schedule(ranks in 1usize..6, m in 1usize..6, backward in any::<bool>()) {
        let schedule = make_gpipe(ranks, m, Gpipe { backward, ..Gpipe::default() }).unwrap();
        prop_assert_eq!(Schedule::from_json(&schedule.to_json().unwrap()), Ok(schedule));
    }

    #[test]
    fn json_with_a_changed_character_is_no_panic(at in any::<prop::sample::Index>(), with in any::<char>()) {
        let json = make_gpipe(2, 2, Gpipe::default()).unwrap().to_json().unwrap();
        let position = at.index(json.len());
        let changed: String = json.chars().enumerate().map(|(i, c)| if i == position { with } else { c }).collect();
        if let Ok(schedule) = Schedule::from_json(&changed) {
            let _ = schedule.verify();
            let _ = schedule.draw(80);
        }
    }

    #[test]
    fn a_picture_keeps_to_its_width(ranks in 1usize..40, m in 1usize..200, width in 50usize..120) {
        let picture = make_gpipe(ranks, m, Gpipe::default()).unwrap().draw(width);
        for line in picture.lines() {
            prop_assert!(line.chars().count() <= width, "{}", picture);
        }
    }
}

#[test]
fn texts_of_actions() {
    let forward = Action::new(Kind::Forward, 12, Some(3)).unwrap();
    assert_eq!(forward.to_string(), "12F3");
    let table: [(&str, usize, &str); 14] = [
        ("", 1, "expected a number"),
        ("F0", 1, "expected a number"),
        ("0F", 3, "expected a number"),
        ("0F0junk", 4, "expected the end"),
        ("0F-1", 2, "expected a kind"),
        ("0X1", 2, "expected a kind"),
        ("0f1", 2, "expected a kind"),
        (" 0F1", 1, "expected a number"),
        ("0F1 ", 4, "expected the end"),
        ("00F1", 1, "does not begin with a zero"),
        ("0F01", 3, "does not begin with a zero"),
        ("1UNSHARD0", 9, "takes no micro-batch"),
        ("0F99999999999999999999", 3, "too large"),
        ("0F\u{661}", 2, "expected a kind"),
    ];
    for (text, column, reason) in table {
        let error = text.parse::<Action>().unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::ActionText { column: found, .. } if found == column), "{message}");
        assert!(message.contains(reason), "{message}");
    }
    for text in ["65536F0", "0F16777216"] {
        assert!(matches!(text.parse::<Action>(), Err(Error::TooLarge { .. })), "{text}");
    }
    assert_eq!("3WAIT_REDUCE_GRAD".parse::<Action>().unwrap().microbatch(), None);
    assert_eq!(Action::new(Kind::Forward, 0, None), Err(Error::MicrobatchMissing(Kind::Forward)));
    assert_eq!(Action::new(Kind::Unshard, 0, Some(0)), Err(Error::MicrobatchUnexpected(Kind::Unshard)));
}

#[test]
fn texts_of_overlapping_pairs() {
    let pair = "(0F4;7B1)OVERLAP_F_B";
    let Ok(Entry::Overlap(forward, backward)) = pair.parse() else { panic!("{pair}") };
    assert_eq!((forward.to_string(), backward.to_string()), ("0F4".to_owned(), "7B1".to_owned()));
    let table: [(&str, usize, &str); 11] = [
        ("(0F4;7B1)OVERLAP_F_B ", 10, "expected 'OVERLAP_F_B' and then the end"),
        ("(0F4;7B1)OVERLAP", 10, "expected 'OVERLAP_F_B' and then the end"),
        ("(0F4;7B1)", 10, "expected 'OVERLAP_F_B' and then the end"),
        ("(0F4;7B1", 9, "expected ')OVERLAP_F_B'"),
        ("(0F4)OVERLAP_F_B", 17, "expected two actions"),
        ("(0F4;7B1;0F5)OVERLAP_F_B", 9, "expected the end"),
        ("(0F4; 7B1)OVERLAP_F_B", 6, "expected a number"),
        ("(0F-4;7B1)OVERLAP_F_B", 3, "expected a kind"),
        ("(7B1;0F4)OVERLAP_F_B", 2, "in this order"),
        ("(0F4;7W1)OVERLAP_F_B", 2, "only a forward (F) and a backward (B or I) overlap"),
        ("(0F4;0F5)OVERLAP_F_B", 2, "only a forward (F) and a backward (B or I) overlap"),
    ];
    for (text, column, reason) in table {
        let message = text.parse::<Entry>().unwrap_err().to_string();
        assert!(message.contains(reason) && message.contains(&format!("column {column},")), "{message}");
    }
}

#[test]
fn pairs_are_two_actions_side_by_side() {
    let list = |text: &str| vec![text.split(' ').map(|action| action.parse().unwrap()).collect()];
    let schedule = |text| Schedule::new("pairs", &[0, 0], 4, true, list(text)).unwrap();
    let text = "0F0 0F1 0B0 0F2 0I1 0W1 0B2";
    let good = schedule(text).with_overlaps(vec![vec![1, 3]]).unwrap();
    assert_eq!(good.to_csv(), "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0I1)OVERLAP_F_B,0W1,0B2\n");
    assert_eq!((good.overlaps(0), good.overlaps(1)), ([1, 3].as_slice(), [].as_slice()));
    for wrong in [vec![0], vec![2], vec![6], vec![7], vec![usize::MAX], vec![3, 1], vec![1, 1], vec![5]] {
        let error = schedule(text).with_overlaps(vec![wrong.clone()]).unwrap_err();
        assert!(matches!(error, Error::BadOverlap { rank: 0, .. }), "{wrong:?} {error}");
    }
    assert!(schedule(text).with_overlaps(vec![vec![], vec![0]]).is_err());
}

#[test]
fn csv_is_strict_and_says_where() {
    let good = "0F0,,0B0,\r\n,1F0,1B0,\r\n";
    let schedule = Schedule::from_csv("torch", good).unwrap();
    assert_eq!(schedule.to_csv(), "0F0,0B0\n1F0,1B0\n");
    assert_eq!((schedule.name(), schedule.stages(), schedule.microbatches()), ("torch", 2, 1));
    let table = [
        ("", "line 1, column 1: there is no action"),
        ("0UNSHARD", "line 1, column 1: there is no action of a micro-batch"),
        ("0F0,0B0\n1F0,1B0x", "line 2, column 8: \"1B0x\" is not an action: expected the end"),
        ("0F0,0B0\n1F0,1B-1", "line 2, column 6: \"1B-1\" is not an action: expected a kind of action"),
        ("0F0, 0B0", "line 1, column 5: \" 0B0\" is not an action: expected a number"),
        ("0F0,\"0B0\"", "line 1, column 5: "),
        ("0F0,0X0", "line 1, column 6: \"0X0\" is not an action: expected a kind of action"),
        ("0F0,\u{e9}\u{e9},0B0x", "line 1, column 5: "),
        ("0F0,(0F1;0B0)OVERLAP,0B1", "line 1, column 14: "),
        ("0F0\r\r\n0B0", "line 1, column 4: \"0F0\\r\" is not an action"),
        ("0F0,0B0\n0F1,0B1", "line 2, column 1: stage 0 is on rank 1 here, on rank 0 before"),
        ("0F0,0B0\n2F0,2B0", "line 2, column 1: there is a stage 2, but no action of stage 1"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n",
            "line 2, column 12: the row ends 1 cell before the longest, and 1B1 is",
        ),
        ("0F0,65536F0", "line 1, column 5: the stage of an action must be at most 65535"),
        ("0F16777215,1F0", "must be at most 16777216"),
    ];
    for (text, part) in table {
        let error = Schedule::from_csv("x", text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?}: {error}");
    }
    // Rows of different lengths are how torch writes them; an empty row is a rank with nothing to do.
    assert!(Schedule::from_csv("x", "0F0,0B0,0F1,0B1\n1F0,,1B0,1F1,1B1").is_ok());
    assert_eq!(Schedule::from_csv("x", "0F0,0B0\n\n").unwrap().ranks(), 2);
    assert!(!Schedule::from_csv("x", "0F0,0SEND_F0\n1RECV_F0,1F0").unwrap().backward());
}

#[test]
fn placements() {
    assert_eq!(Placement::Loop.ranks(3, 2), Ok(vec![0, 1, 2, 0, 1, 2]));
    assert_eq!(Placement::V.ranks(3, 2), Ok(vec![0, 1, 2, 2, 1, 0]));
    assert_eq!(Placement::V.ranks(2, 3), Ok(vec![0, 1, 1, 0, 0, 1]));
    assert_eq!("v".parse(), Ok(Placement::V));
    assert!("w".parse::<Placement>().unwrap_err().to_string().contains("loop, v"));
    for (ranks, per_rank) in [(0, 1), (1, 0), (256, 257), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(Placement::V.ranks(ranks, per_rank).is_err());
    }
}

#[test]
fn json_is_strict_and_says_where() {
    let good = r#"{"version":1,"name":"x","placement":[0],"microbatches":1,"backward":true,"actions":[["0F0","0B0"]]}"#;
    let schedule = Schedule::from_json(good).unwrap();
    assert_eq!(schedule.to_json().unwrap(), good);
    let table = [
        (r#""0B0""#, r#""0B0x""#, "line 1, column 97: \"0B0x\" is not an action: at column 4"),
        (r#""0B0""#, "7", "expected an action such as \"0F0\""),
        (r#""version":1"#, r#""version":2"#, "version 2 is not known"),
        (r#""version":1"#, r#""version":1,"version":1"#, "duplicate field `version`"),
        (r#""version":1,"#, "", "missing field `version`"),
        (r#""version":1"#, r#""version":1,"more":0"#, "unknown field `more`"),
        (r#""microbatches":1"#, r#""microbatches":99999999999"#, "must be at most 16777216"),
        (r#""microbatches":1"#, r#""microbatches":-1"#, "invalid value: integer `-1`"),
        (r#""microbatches":1"#, r#""microbatches":0"#, "must be at least 1"),
        (r#""placement":[0]"#, r#""placement":[1]"#, "stage 0 is placed on rank 1, but there are 1 ranks"),
        (r#""placement":[0]"#, r#""placement":[]"#, "the number of stages must be at least 1"),
        ("]]}", "]]} ]", "trailing characters"),
        ("]]}", "]]", "EOF"),
    ];
    for (from, to, part) in table {
        let error = Schedule::from_json(&good.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert!(Schedule::from_json(&"[".repeat(100_000)).is_err());
}

/// Any costs: with a number for all stages, or one for each of two.
fn any_costs() -> impl Strategy<Value = Costs> {
    let number = || prop_oneof![0.0..1e12, 0.0..1e-12, Just(0.1 + 0.2), Just(f64::MIN_POSITIVE)];
    let per_stage = move || {
        prop_oneof![
            number().prop_map(PerStage::All),
            prop::array::uniform2(number()).prop_map(|pair| pair.to_vec().into())
        ]
    };
    let links = prop::sample::select(&[Links::Parallel, Links::Serial, Links::Blocking]);
    let times = (
        per_stage(),
        per_stage(),
        per_stage(),
        proptest::option::of(per_stage()),
        proptest::option::of(per_stage()),
    );
    (times, number(), per_stage(), per_stage(), links, per_stage(), any::<bool>()).prop_map(
        |(
            (forward, input_grad, weight_grad, backward, recompute),
            overlap,
            transfer,
            latency,
            links,
            memory,
            negative,
        )| {
            let weight_grad_memory = if negative { PerStage::All(-1.5) } else { memory.clone() };
            Costs {
                forward,
                input_grad,
                weight_grad,
                backward,
                recompute,
                overlap,
                transfer,
                latency,
                links,
                forward_memory: memory.clone(),
                input_grad_memory: memory,
                weight_grad_memory,
            }
        },
    )
}

proptest! {
    #[test]
    fn json_gives_the_same_costs_alone_and_with_a_schedule(costs in any_costs()) {
        prop_assert_eq!(Costs::from_json(&costs.to_json().unwrap()), Ok(costs.clone()));
        let schedule = make_gpipe(2, 2, Gpipe::default()).unwrap();
        let both = schedule.to_json_with(&costs).unwrap();
        prop_assert_eq!(Costs::from_json(&both), Ok(costs));
        prop_assert_eq!(Schedule::from_json(&both), Ok(schedule));
    }
}

#[test]
fn json_of_costs_is_strict_and_says_where() {
    let table = [
        ("", "not costs: line 1, column 0: EOF"),
        (r#"{"forwards": 1}"#, "not costs: line 1, column 11: unknown field `forwards`"),
        (r#"{"forward": 1, "forward": 2}"#, "duplicate field `forward`"),
        (r#"{"forward": "1"}"#, "expected a number, or a list of numbers, one for each stage"),
        (r#"{"forward": [1, [2]]}"#, "expected a number, or a list of numbers, one for each stage"),
        (r#"{"forward": -1}"#, "the cost forward must be finite and not negative, but is -1"),
        (r#"{"forward": 1e999}"#, "number out of range"),
        (r#"{"links": "slow"}"#, "unknown variant `slow`"),
        (r#"{"forward": 1} x"#, "trailing characters"),
    ];
    for (text, part) in table {
        let error = Costs::from_json(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(Costs::from_json("{}"), Ok(Costs::default()));
    let schedule = make_gpipe(2, 2, Gpipe::default()).unwrap();
    let error = Costs::from_json(&schedule.to_json().unwrap()).unwrap_err().to_string();
    assert!(error.contains("the schedule has no costs"), "{error}");
    let three = Costs { forward: vec![1.0; 3].into(), ..Costs::default() };
    assert!(matches!(schedule.to_json_with(&three), Err(Error::CostsDiffer { .. })));
    let wrong =
        schedule.to_json_with(&Costs::default()).unwrap().replace(r#""forward":1.0"#, r#""forward":[1,2,3]"#);
    assert!(matches!(Schedule::from_json(&wrong), Err(Error::CostsDiffer { .. })));
    let infinite = Costs { latency: f64::INFINITY.into(), ..Costs::default() };
    assert!(infinite.to_json().is_err());
}

#[test]
fn small_pictures_show_every_action() {
    let picture = make_gpipe(3, 3, Gpipe::default()).unwrap().draw(80);
    let expected = "\
rank 0 | F0 F1 F2  .  .  .  . B2 B1 B0
rank 1 |  . F0 F1 F2  .  . B2 B1 B0  .
rank 2 |  .  . F0 F1 F2 B2 B1 B0  .  .
(time runs to the right)";
    assert_eq!(picture, expected);
}

#[test]
fn pictures_of_ranks_with_several_stages_and_split_backwards() {
    let text = [["0F0", "3F0", "3I0", "3W0", "0B0"].as_slice(), &["1F0", "2F0", "2I0", "1I0", "2W0", "1W0"]];
    let lists = text.map(|list| list.iter().map(|action| action.parse().unwrap()).collect()).to_vec();
    let picture = Schedule::new("v", &[0, 1, 1, 0], 1, true, lists).unwrap().draw(80);
    let expected = "\
rank 0 | 0F0   .   . 3F0 3I0 3W0   . 0B0 0B0
rank 1 |   . 1F0 2F0   .   . 2I0 1I0 2W0 1W0
(time runs to the right)";
    assert_eq!(picture, expected);
}

#[test]
fn large_pictures_say_what_they_leave_out() {
    let picture = make_gpipe(100, 1000, Gpipe::default()).unwrap().draw(80);
    assert!(picture.lines().count() <= 35, "{picture}");
    assert!(picture.contains("68 ranks left out"), "{picture}");
    assert!(picture.ends_with("(too wide for numbers: a letter is 31 units)"), "{picture}");
}

#[test]
fn ranks_that_hold_different_numbers_of_stages_are_drawn_in_whole_units() {
    let lists = [["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"].as_slice(), &["3F0", "3B0"]];
    let lists = lists.map(|list| list.iter().map(|action| action.parse().unwrap()).collect()).to_vec();
    let picture = Schedule::new("uneven", &[0, 0, 0, 1], 1, true, lists).unwrap().draw(80);
    let expected = "\
rank 0 | 0F0 1F0 2F0   .   . 2B0 1B0 0B0
rank 1 |   .   .   . 3F0 3B0   .   .   .
(time runs to the right)";
    assert_eq!(picture, expected);
}

#[test]
fn the_largest_schedules_are_drawn_in_little_memory() {
    for (ranks, m) in [(65_536, 1), (1, 1 << 20)] {
        let picture = make_gpipe(ranks, m, Gpipe::default()).unwrap().draw(80);
        assert!(picture.len() < 4000, "{picture}");
    }
}

#[test]
fn a_broken_schedule_is_drawn_and_called_so() {
    let broken = Schedule::new("broken", &[0], 1, true, vec![vec!["0B0".parse().unwrap()]]).unwrap();
    assert_eq!(broken.draw(80), "rank 0 | B0\n(NOT VALID: columns are positions)");
    let empty = Schedule::new("empty", &[0], 1, true, vec![vec![]]).unwrap();
    assert!(empty.draw(0).contains("NOT VALID"));
}
