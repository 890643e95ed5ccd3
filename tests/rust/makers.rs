//! The makers: every one valid for every shape that its rule permits, as drawn in its file, with the bubble and the memory
//! that are known of it.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use proptest::prelude::*;
use torchrelay_core::{Error, Gpipe, MAX_CELLS, MAX_STAGES, Maker, Recompute, make_gpipe, make_gpipe_rank};

const INTERLEAVED: [Maker; 3] = [Maker::Interleaved1F1B, Maker::InterleavedZb, Maker::LoopedBfs];

/// A maker, ranks, micro-batches, stages per rank.
fn shapes() -> impl Strategy<Value = (Maker, usize, usize, Option<usize>)> {
    let maker = prop::sample::select(Maker::ALL);
    (maker, 1usize..9, 1usize..24, prop::option::of(1usize..5))
        .prop_map(|(maker, p, m, v)| (maker, p, m, v.filter(|_| INTERLEAVED.contains(&maker))))
}

proptest! {
    #[test]
    fn what_is_made_is_valid_and_each_rank_can_make_its_own((maker, p, m, v) in shapes()) {
        match maker.make(p, m, v) {
            Ok(schedule) => {
                prop_assert_eq!(schedule.verify(), Ok(()));
                prop_assert_eq!((schedule.name(), schedule.ranks(), schedule.microbatches()), (maker.name(), p, m));
                for rank in 0..p {
                    prop_assert_eq!(maker.make_rank(p, m, v, rank).unwrap(), schedule.entries(rank).collect::<Vec<_>>());
                }
                prop_assert!(maker.make_rank(p, m, v, p).is_err());
            }
            Err(Error::NotPermitted { what: "micro-batches", given, nearest, .. }) => {
                prop_assert_eq!(given, m);
                let made = |m: usize| maker.make(p, m, v).is_ok();
                prop_assert!(!nearest.is_empty() && nearest.iter().all(|&m| made(m)), "{:?}", nearest);
                let (low, high) = (nearest[0].min(m), nearest[nearest.len() - 1]);
                prop_assert!((low + 1..high).all(|m| nearest.contains(&m) || !made(m)), "{:?}", nearest);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

#[test]
fn the_rules_are_those_that_are_known() {
    for p in 1..9 {
        for m in 1..24 {
            let rounds = (m / p).max(1);
            for &maker in Maker::ALL {
                let permitted = match maker {
                    Maker::Interleaved1F1B | Maker::InterleavedZb => m % rounds == 0,
                    Maker::DualpipeV => m >= 2 * p,
                    _ => true,
                };
                assert_eq!(maker.make(p, m, None).is_ok(), permitted, "{maker} {p} {m}");
            }
        }
    }
}

#[test]
fn a_refusal_names_the_rule_and_the_nearest_numbers() {
    let table = [
        (
            Maker::Interleaved1F1B.make(4, 11, None),
            "interleaved_1f1b needs 2 equal rounds of micro-batches, each of at least as many as the 4 ranks; \
             with 11 micro-batches it cannot be made, with 10 or 12 it can",
        ),
        (
            Maker::DualpipeV.make(4, 7, None),
            "dualpipe_v needs at least as many micro-batches as stages (8); with 7 micro-batches it cannot be made, \
             with 8 it can",
        ),
        (
            Maker::ZbV.make(4, 7, Some(3)),
            "zb_v needs exactly 2 stages on each rank; with 3 stages per rank it cannot be made, with 2 it can",
        ),
        (Maker::ZbH1.make(0, 7, None), "the number of ranks must be at least 1, but is 0"),
        (Maker::ZbH1.make(7, 0, None), "the number of micro-batches must be at least 1, but is 0"),
        (Maker::LoopedBfs.make(7, 7, Some(0)), "the number of stages per rank must be at least 1, but is 0"),
    ];
    for (made, message) in table {
        assert_eq!(made.unwrap_err().to_string(), message);
    }
    let error = "zb".parse::<Maker>().unwrap_err().to_string();
    assert!(
        error.starts_with("there is no schedule \"zb\"; the names are: gpipe, 1f1b, interleaved_1f1b"),
        "{error}"
    );
}

#[test]
fn sizes_are_limited_before_memory_is_taken() {
    let huge = usize::MAX;
    for &maker in Maker::ALL {
        for (p, m) in [(huge, 1), (1, huge), (huge, huge), (MAX_STAGES + 1, 1), (1, MAX_CELLS + 1)] {
            assert!(matches!(maker.make(p, m, None), Err(Error::TooLarge { .. })), "{maker} {p} {m}");
        }
    }
    for maker in INTERLEAVED {
        assert!(matches!(maker.make(1, 1, Some(huge)), Err(Error::TooLarge { .. })));
    }
}

#[test]
fn gpipe_by_name_is_gpipe() {
    assert_eq!(Maker::Gpipe.make(3, 5, None), make_gpipe(3, 5, torchrelay_core::Gpipe::default()));
}

#[test]
fn the_files_draw_what_they_make() {
    let files = [
        (Maker::Gpipe, include_str!("../../rust/core/src/schedule/makers/gpipe.rs")),
        (Maker::OneFOneB, include_str!("../../rust/core/src/schedule/makers/one_f_one_b.rs")),
        (Maker::Interleaved1F1B, include_str!("../../rust/core/src/schedule/makers/interleaved_1f1b.rs")),
        (Maker::LoopedBfs, include_str!("../../rust/core/src/schedule/makers/looped_bfs.rs")),
        (Maker::InterleavedZb, include_str!("../../rust/core/src/schedule/makers/interleaved_zb.rs")),
        (Maker::ZbH1, include_str!("../../rust/core/src/schedule/makers/zb_h1.rs")),
        (Maker::ZbH2, include_str!("../../rust/core/src/schedule/makers/zb_h2.rs")),
        (Maker::ZbV, include_str!("../../rust/core/src/schedule/makers/zb_v.rs")),
        (Maker::VHalf, include_str!("../../rust/core/src/schedule/makers/v_half.rs")),
        (Maker::VMin, include_str!("../../rust/core/src/schedule/makers/v_min.rs")),
        (Maker::DualpipeV, include_str!("../../rust/core/src/schedule/makers/dualpipe_v.rs")),
    ];
    for (maker, source) in files {
        let lines: Vec<_> =
            source.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim).collect();
        let caption = lines.iter().find(|line| line.starts_with("time ")).unwrap();
        let before = |word: &str| {
            let words: Vec<_> = caption.split_whitespace().collect();
            let at = words.iter().position(|other| other.trim_end_matches(['s', ',']) == word)?;
            words[at - 1].parse::<usize>().ok()
        };
        let drawn =
            maker.make(before("rank").unwrap(), before("micro-batche").unwrap(), None).unwrap().draw(200);
        let shown: Vec<_> = lines.iter().filter(|line| line.starts_with("rank ")).copied().collect();
        let rows: Vec<_> = drawn.lines().filter(|line| line.starts_with("rank ")).collect();
        assert_eq!(shown, rows, "{maker}");
    }
}

#[test]
fn a_rank_of_gpipe_makes_its_own_with_all_that_can_be_chosen() {
    for (backward, ascending) in [(true, false), (true, true), (false, false)] {
        for recompute in [Recompute::Never, Recompute::ExceptLast, Recompute::Always] {
            let options = Gpipe { backward, ascending, recompute };
            let schedule = make_gpipe(3, 4, options).unwrap();
            for rank in 0..3 {
                let alone = make_gpipe_rank(3, 4, options, rank).unwrap();
                assert_eq!(alone, schedule.entries(rank).collect::<Vec<_>>());
            }
            let error = make_gpipe_rank(3, 4, options, 3).unwrap_err();
            assert_eq!(error.to_string(), "there is no rank 3, only 3");
        }
    }
}
