//! Schedules as text: actions, JSON, pictures.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{Action, Error, Gpipe, Kind, Schedule, make_gpipe};

fn actions() -> impl Strategy<Value = Action> {
    (prop::sample::select(Kind::ALL), 0usize..65_536, 0usize..1 << 24).prop_map(
        |(kind, stage, microbatch)| {
            Action::new(kind, stage, kind.per_microbatch().then_some(microbatch)).unwrap()
        },
    )
}

proptest! {
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
        let _ = Schedule::from_json(&text);
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
fn json_is_strict_and_says_where() {
    let good = r#"{"format":1,"name":"x","placement":[0],"microbatches":1,"backward":true,"actions":[["0F0","0B0"]]}"#;
    let schedule = Schedule::from_json(good).unwrap();
    assert_eq!(schedule.to_json().unwrap(), good);
    let table = [
        (r#""0B0""#, r#""0B0x""#, "line 1, column 96: \"0B0x\" is not an action: at column 4"),
        (r#""0B0""#, "7", "expected an action such as \"0F0\""),
        (r#""format":1"#, r#""format":2"#, "format 2 is not known"),
        (r#""format":1"#, r#""format":1,"format":1"#, "duplicate field `format`"),
        (r#""format":1,"#, "", "missing field `format`"),
        (r#""format":1"#, r#""format":1,"more":0"#, "unknown field `more`"),
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
