//! Readiness against a naive model, and the stories behind its rules. Numbers are those of the module's invariants.

#![allow(clippy::indexing_slicing, clippy::unwrap_used)] // what fails here shall fail the test

use proptest::prelude::*;
use torchrelay_core::{Error, Readiness};

/// The rules of the module's text, written once more from sets and without counters.
#[derive(Default)]
struct Naive {
    buckets: Vec<Vec<usize>>,
    arrivals: Option<(bool, Vec<usize>)>,
    window: Vec<usize>,
    released: usize,
    late: Vec<usize>,
    seen_one: bool,
    seen_twice: bool,
}

impl Naive {
    fn mark(&mut self, p: usize) -> Option<usize> {
        let (reduce, arrivals) = self.arrivals.as_mut()?;
        let again = arrivals.contains(&p);
        arrivals.push(p);
        if again {
            self.seen_twice = true;
            let gone = self.buckets[..self.released].iter().flatten().any(|&q| q == p);
            if gone && !self.late.contains(&p) {
                self.late.push(p);
            }
            return None;
        }
        if !*reduce || !self.seen_one || self.seen_twice {
            return None;
        }
        let whole = |bucket: &&Vec<usize>| bucket.iter().all(|q| arrivals.contains(q));
        let stop = self.buckets.iter().take(self.buckets.len() - 1).take_while(whole).count();
        let grown = stop > self.released;
        self.released = self.released.max(stop);
        grown.then_some(stop)
    }

    fn unused(&self, parameters: usize) -> Vec<usize> {
        let now: &[usize] = self.arrivals.as_ref().map_or(&[], |(_, arrivals)| arrivals);
        (0..parameters).filter(|p| !now.contains(p) && !self.window.contains(p)).collect()
    }

    fn close(&mut self, kept: bool) {
        if let Some((reduce, arrivals)) = self.arrivals.take().filter(|_| kept) {
            self.seen_one = true;
            self.window = if reduce { vec![] } else { [self.window.clone(), arrivals].concat() };
        }
        self.arrivals = None;
        self.released = 0;
        self.late.clear();
    }
}

#[derive(Debug, Clone)]
enum Event {
    Start(bool),
    Mark(usize),
    Finish,
    Abandon,
    Carry(usize),
    Rearrange(usize),
}

fn events(parameters: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        2 => any::<bool>().prop_map(Event::Start),
        12 => (0..parameters + 1).prop_map(Event::Mark),
        2 => Just(Event::Finish),
        1 => Just(Event::Abandon),
        1 => (0..parameters + 1).prop_map(Event::Carry),
        1 => (1..parameters + 1).prop_map(Event::Rearrange),
    ];
    prop::collection::vec(event, 0..120)
}

fn plan() -> impl Strategy<Value = (usize, Vec<Vec<usize>>)> {
    (1usize..12, 1usize..6).prop_flat_map(|(parameters, buckets)| {
        prop::collection::vec(0..buckets, parameters).prop_map(move |choice| {
            let members = |b| (0..parameters).filter(|&p| choice[p] == b).collect();
            (parameters, (0..buckets).map(members).collect())
        })
    })
}

proptest! {
    /// Invariants 1 to 8: whatever happens in whatever order, the tracker is the naive model.
    #[test]
    fn equals_the_naive_model(((parameters, buckets), events) in plan().prop_flat_map(|p| (Just(p.clone()), events(p.0)))) {
        let mut tracker = Readiness::new(parameters, &buckets).unwrap();
        let mut naive = Naive { buckets, ..Naive::default() };
        for event in events {
            match event {
                Event::Start(reduce) => {
                    tracker.start(reduce);
                    naive.close(false);
                    naive.arrivals = Some((reduce, vec![]));
                }
                Event::Mark(p) if p < parameters => prop_assert_eq!(tracker.mark(p), naive.mark(p)),
                Event::Mark(p) => prop_assert_eq!(tracker.mark(p), None),
                Event::Finish => {
                    tracker.finish();
                    naive.close(true);
                }
                Event::Abandon => {
                    tracker.abandon();
                    naive.close(false);
                }
                Event::Carry(p) => {
                    tracker.carry(&[p]);
                    naive.window.push(p);
                }
                Event::Rearrange(size) => {
                    naive.buckets =
                        (0..parameters).rev().collect::<Vec<_>>().chunks(size).map(<[_]>::to_vec).collect();
                    tracker.rearrange(&naive.buckets).unwrap();
                    naive.close(false);
                }
            }
            let mut arrival: Vec<usize> = vec![];
            for &p in naive.arrivals.iter().flat_map(|(_, arrivals)| arrivals) {
                if !arrival.contains(&p) {
                    arrival.push(p);
                }
            }
            prop_assert_eq!(tracker.arrival(), &arrival[..]);
            prop_assert_eq!(tracker.unused(), naive.unused(parameters));
            prop_assert_eq!(tracker.late(), &naive.late[..]);
        }
    }
}

/// A tracker of three buckets that has its first backward behind it.
fn seasoned() -> Readiness {
    let mut tracker = Readiness::new(4, &[vec![3], vec![1, 2], vec![0]]).unwrap();
    tracker.start(true);
    (0..4).for_each(|p| assert_eq!(tracker.mark(p), None)); // invariant 7
    tracker.finish();
    tracker.start(true);
    tracker
}

#[test]
fn a_bucket_that_is_ready_early_waits_for_its_turn() {
    let mut tracker = seasoned();
    assert_eq!([1, 2, 0].map(|p| tracker.mark(p)), [None, None, None]);
    assert_eq!(tracker.mark(3), Some(2)); // invariants 1 and 2: the last one stays
}

#[test]
fn a_second_gradient_after_the_release_is_late_and_teaches() {
    let mut tracker = seasoned();
    assert_eq!(tracker.mark(3), Some(1));
    assert_eq!(tracker.mark(3), None);
    assert_eq!(tracker.late(), [3]); // invariant 4
    tracker.abandon();
    tracker.start(true);
    assert_eq!(tracker.mark(3), None); // invariants 6 and 7
    assert!(tracker.late().is_empty() && tracker.deferred());
}

#[test]
fn everything_is_released_early_on_demand_once_all_is_marked() {
    let mut tracker = seasoned();
    for p in [0, 2, 3] {
        tracker.mark(p);
    }
    assert!(!tracker.release()); // 2
    tracker.mark(1);
    assert!(tracker.release());
    tracker.mark(1);
    assert_eq!(tracker.late(), [1]); // 4
    tracker.finish();
    tracker.start(false);
    (0..4).for_each(|p| assert_eq!(tracker.mark(p), None));
    assert!(!tracker.release()); // 3
}

#[test]
fn use_is_carried_from_backwards_that_do_not_reduce() {
    let mut tracker = seasoned();
    tracker.finish();
    tracker.start(false);
    tracker.mark(0);
    tracker.finish();
    tracker.start(true);
    tracker.mark(1);
    assert_eq!(tracker.unused(), [2, 3]); // invariant 5
    tracker.finish();
    assert_eq!(tracker.unused(), [0, 1, 2, 3]);
}

#[test]
fn a_plan_that_is_no_partition_is_refused() {
    for (buckets, index) in [(vec![vec![0, 0]], 0), (vec![vec![1]], 0), (vec![vec![0], vec![2]], 2)] {
        let error = Readiness::new(2, &buckets).unwrap_err();
        assert_eq!(error, Error::NotAPartition { what: "buckets", index });
    }
}
