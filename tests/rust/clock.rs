//! The wavefront: the invariants of `clock.rs`.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use std::collections::HashMap;

use proptest::prelude::*;
use torchrelay_core::{Error, MAX_CELLS, clock_cycles};

/// The clock of every pair.
fn clock_of(m: usize, n: usize) -> HashMap<(usize, usize), usize> {
    let clocks = clock_cycles(m, n).unwrap();
    clocks.iter().enumerate().flat_map(|(k, clock)| clock.iter().map(move |&pair| (pair, k))).collect()
}

proptest! {
    #[test]
    fn invariant_1_every_pair_once(m in 1usize..40, n in 1usize..40) {
        let total: usize = clock_cycles(m, n).unwrap().iter().map(Vec::len).sum();
        prop_assert_eq!(total, m * n);
        let pairs = clock_of(m, n);
        prop_assert!((0..m).all(|i| (0..n).all(|j| pairs.contains_key(&(i, j)))));
    }

    #[test]
    fn invariant_2_what_is_needed_is_earlier(m in 1usize..40, n in 1usize..40) {
        let clock_of = clock_of(m, n);
        for (&(i, j), clock) in &clock_of {
            prop_assert!(i == 0 || clock_of[&(i - 1, j)] < *clock);
            prop_assert!(j == 0 || clock_of[&(i, j - 1)] < *clock);
        }
    }

    #[test]
    fn invariant_3_as_few_and_as_narrow_as_can_be(m in 1usize..40, n in 1usize..40) {
        let clocks = clock_cycles(m, n).unwrap();
        prop_assert_eq!(clocks.len(), m + n - 1);
        for clock in clocks {
            prop_assert!(!clock.is_empty() && clock.len() <= m.min(n));
            prop_assert!(clock.is_sorted_by(|a, b| a.1 < b.1));
        }
    }

    #[test]
    fn any_numbers_give_clocks_or_an_error(m in any::<usize>(), n in any::<usize>()) {
        // Numbers this large are never within the limit.
        prop_assume!(m > MAX_CELLS || n > MAX_CELLS || m == 0 || n == 0);
        prop_assert!(clock_cycles(m, n).is_err());
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let what = "the number of micro-batches";
    assert_eq!(clock_cycles(0, 3), Err(Error::NotPositive { what, value: 0 }));
    let what = "the number of partitions";
    assert_eq!(clock_cycles(3, 0), Err(Error::NotPositive { what, value: 0 }));
    let huge = clock_cycles(usize::MAX, usize::MAX).unwrap_err();
    assert!(matches!(huge, Error::TooLarge { limit: MAX_CELLS, .. }), "{huge}");
    assert!(clock_cycles(MAX_CELLS + 1, 1).is_err());
}

#[test]
fn as_many_pairs_as_the_limit_are_accepted() {
    assert_eq!(clock_cycles(MAX_CELLS, 1).unwrap().len(), MAX_CELLS);
}
