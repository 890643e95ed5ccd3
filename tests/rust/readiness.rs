//! Readiness against a naive model, and the stories behind its rules. Numbers are those of the module's invariants.

#![allow(clippy::indexing_slicing, clippy::unwrap_used)] // what fails here shall fail the test

use proptest::prelude::*;
use torchrelay_core::{Error, Marked, Readiness};

/// The rules of the module's text, written once more from sets and without counters.
#[derive(Default)]
struct Naive {
    buckets: Vec<Vec<usize>>,
    pieces: Vec<Vec<usize>>,
    complete: Vec<usize>,
    arrivals: Option<(bool, Vec<usize>)>,
    window: Vec<usize>,
    released: usize,
    late: Vec<usize>,
    seen_one: bool,
    seen_twice: bool,
    held: bool,
}

impl Naive {
    fn mark(&mut self, p: usize) -> Marked {
        let mut progress = Marked::default();
        progress.stop = self.launchable(p, &mut progress.piece);
        progress
    }

    fn launchable(&mut self, p: usize, complete: &mut Option<usize>) -> Option<usize> {
        let (reduce, arrivals) = self.arrivals.as_mut()?;
        let again = arrivals.contains(&p);
        arrivals.push(p);
        if again {
            self.seen_twice = true;
            let taken = self.complete.iter().flat_map(|&piece| &self.pieces[piece]);
            let gone = self.buckets[..self.released].iter().flatten().chain(taken).any(|&q| q == p);
            if gone && !self.late.contains(&p) {
                self.late.push(p);
            }
            return None;
        }
        if !*reduce || !self.seen_one || self.seen_twice || self.held {
            return None;
        }
        let whole = |bucket: &&Vec<usize>| bucket.iter().all(|q| arrivals.contains(q));
        let piece = self.pieces.iter().position(|piece| piece.contains(&p) && whole(&piece));
        self.complete.extend(piece);
        *complete = piece;
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
        self.complete.clear();
        self.late.clear();
        self.held = false;
    }
}

#[derive(Debug, Clone)]
enum Event {
    Start(bool, bool),
    Mark(usize),
    Finish,
    Abandon,
    Carry(usize),
    Rearrange(usize),
    Divide(usize),
}

fn events(parameters: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        2 => any::<(bool, bool)>().prop_map(|(reduce, hold)| Event::Start(reduce, hold)),
        12 => (0..parameters + 1).prop_map(Event::Mark),
        2 => Just(Event::Finish),
        1 => Just(Event::Abandon),
        1 => (0..parameters + 1).prop_map(Event::Carry),
        1 => (1..parameters + 1).prop_map(Event::Rearrange),
        1 => (1..parameters + 1).prop_map(Event::Divide),
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
    /// Invariants 1 to 9: whatever happens in whatever order, the tracker is the naive model.
    #[test]
    fn equals_the_naive_model(((parameters, buckets), events) in plan().prop_flat_map(|p| (Just(p.clone()), events(p.0)))) {
        let mut tracker = Readiness::new(parameters, &buckets).unwrap();
        let mut naive = Naive { buckets, ..Naive::default() };
        for event in events {
            match event {
                Event::Start(reduce, hold) => {
                    tracker.start(reduce, hold);
                    naive.close(false);
                    naive.held = hold;
                    naive.arrivals = Some((reduce, vec![]));
                }
                Event::Mark(p) if p < parameters => prop_assert_eq!(tracker.mark(p), naive.mark(p)),
                Event::Mark(p) => prop_assert_eq!(tracker.mark(p), Marked::default()),
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
                    naive.pieces.clear();
                    naive.complete.clear();
                    naive.released = 0;
                }
                Event::Divide(size) => {
                    naive.pieces = (1..parameters).collect::<Vec<_>>().chunks(size).map(<[_]>::to_vec).collect();
                    tracker.divide(&naive.pieces).unwrap();
                    naive.complete.clear();
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
    tracker.start(true, false);
    (0..4).for_each(|p| assert_eq!(tracker.mark(p).stop, None)); // invariant 7
    tracker.finish();
    tracker.start(true, false);
    tracker
}

#[test]
fn a_bucket_that_is_ready_early_waits_for_its_turn() {
    let mut tracker = seasoned();
    assert_eq!([1, 2, 0].map(|p| tracker.mark(p).stop), [None, None, None]);
    assert_eq!(tracker.mark(3).stop, Some(2)); // invariants 1 and 2: the last one stays
}

#[test]
fn a_second_gradient_after_the_release_is_late_and_teaches() {
    let mut tracker = seasoned();
    assert_eq!(tracker.mark(3).stop, Some(1));
    assert_eq!(tracker.mark(3).stop, None);
    assert_eq!(tracker.late(), [3]); // invariant 4
    tracker.abandon();
    tracker.start(true, false);
    assert_eq!(tracker.mark(3).stop, None); // invariants 6 and 7
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
    tracker.start(false, false);
    (0..4).for_each(|p| assert_eq!(tracker.mark(p), Marked::default()));
    assert!(!tracker.release()); // 3
}

#[test]
fn a_piece_is_complete_before_its_bucket_and_also_in_the_last_one() {
    let mut tracker = Readiness::new(4, &[vec![3, 2], vec![1, 0]]).unwrap();
    tracker.divide(&[vec![3], vec![2], vec![0, 1]]).unwrap();
    tracker.start(true, false);
    assert_eq!(tracker.mark(3), Marked::default()); // invariant 7: the first one
    tracker.finish();
    tracker.start(true, false);
    assert_eq!(tracker.mark(1), Marked::default());
    assert_eq!(tracker.mark(3), Marked { piece: Some(0), stop: None }); // invariant 9
    assert_eq!(tracker.mark(0), Marked { piece: Some(2), stop: None });
    assert_eq!(tracker.mark(2), Marked { piece: Some(1), stop: Some(1) });
}

#[test]
fn a_second_gradient_after_its_piece_was_complete_is_late() {
    let mut tracker = Readiness::new(3, &[vec![2, 1], vec![0]]).unwrap();
    tracker.divide(&[vec![2], vec![1, 0]]).unwrap();
    tracker.start(true, false);
    tracker.finish();
    tracker.start(true, false);
    tracker.mark(1);
    tracker.mark(1); // its piece has not been taken
    assert!(tracker.late().is_empty() && tracker.deferred());
    tracker.abandon();
    let mut tracker = Readiness::new(3, &[vec![2, 1], vec![0]]).unwrap();
    tracker.divide(&[vec![2], vec![1, 0]]).unwrap();
    tracker.start(true, false);
    tracker.finish();
    tracker.start(true, false);
    assert_eq!(tracker.mark(2).piece, Some(0));
    tracker.mark(2);
    assert_eq!(tracker.late(), [2]); // invariant 4
}

#[test]
fn use_is_carried_from_backwards_that_do_not_reduce() {
    let mut tracker = seasoned();
    tracker.finish();
    tracker.start(false, false);
    tracker.mark(0);
    tracker.finish();
    tracker.start(true, false);
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
    for (pieces, index) in [(vec![vec![0, 0]], 0), (vec![vec![1], vec![0, 1]], 1), (vec![vec![2]], 2)] {
        let error = Readiness::new(2, &[vec![0, 1]]).unwrap().divide(&pieces).unwrap_err();
        assert_eq!(error, Error::NotAPartition { what: "pieces", index });
    }
}
