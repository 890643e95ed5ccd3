//! Which buckets of gradients may be launched, while a backward runs.
//!
//! A tracker is told of each gradient as it arrives and answers how far the plan may be launched. It decides nothing
//! else: it knows neither tensors nor ranks nor time. What it keeps to:
//!
//! 1. Buckets are released in plan order, and each once in a backward.
//! 2. Before the end of a backward a bucket is released only if every parameter of it and of all buckets before it has
//!    been marked in this backward. The last bucket is released at the end: what is known only then (which parameters
//!    went without a gradient) travels with it. Who wants it earlier may ask, once every parameter has been marked.
//! 3. Finishing a reducing backward releases every bucket that is left; a counting one (no reduction was asked for)
//!    releases none.
//! 4. A parameter marked again after its bucket was released is late: what was sent lacks a gradient. Every late
//!    parameter is reported at the end of that backward.
//! 5. A parameter is used in a window if it was marked in a finished backward since the last reducing one, or in this.
//! 6. An abandoned backward leaves no trace, except what it taught (7).
//! 7. The first backward, and each after one that marked a parameter twice, releases everything at the end; so a model
//!    in which a parameter's gradient arrives in pieces is never late twice, and mostly never once.
//! 8. The order in which the gradients of a backward arrived is known until it is closed. Other buckets may take the place
//!    of the tracker's between two backwards; nothing else that it knows changes by that.

use crate::error::{Error, Result};

/// Where a tracker is in the life of a backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Between two backwards.
    Idle,
    /// In a backward whose gradients stay on this rank.
    Counting,
    /// In a backward that ends with the reduction of every bucket.
    Reducing,
}

/// The tracker: see the module's text for what it keeps to.
#[derive(Debug, Clone)]
pub struct Readiness {
    bucket_of: Vec<usize>,
    sizes: Vec<usize>,
    phase: Phase,
    marked: Vec<bool>,
    carried: Vec<bool>,
    left: Vec<usize>,
    released: usize,
    late: Vec<usize>,
    arrival: Vec<usize>,
    repeated: bool,
    observed: bool,
}

impl Readiness {
    /// A tracker of `parameters` parameters in these buckets, in the order of reduction.
    ///
    /// # Errors
    /// [`Error::NotAPartition`] unless each of the parameters `0..parameters` is in exactly one bucket.
    pub fn new(parameters: usize, buckets: &[Vec<usize>]) -> Result<Self> {
        let bucket_of = inverse(parameters, buckets)?;
        let sizes: Vec<_> = buckets.iter().map(Vec::len).collect();
        Ok(Self {
            bucket_of,
            left: sizes.clone(),
            sizes,
            phase: Phase::Idle,
            marked: vec![false; parameters],
            carried: vec![false; parameters],
            released: 0,
            late: Vec::new(),
            arrival: Vec::with_capacity(parameters),
            repeated: false,
            observed: false,
        })
    }

    /// Puts other buckets in the place of these, for the same parameters. A backward that is open is forgotten.
    ///
    /// # Errors
    /// [`Error::NotAPartition`], as for [`Readiness::new`]; then nothing has changed.
    pub fn rearrange(&mut self, buckets: &[Vec<usize>]) -> Result<()> {
        self.bucket_of = inverse(self.parameters(), buckets)?;
        self.sizes = buckets.iter().map(Vec::len).collect();
        self.left.clone_from(&self.sizes);
        self.reset();
        Ok(())
    }

    /// How many parameters there are.
    pub fn parameters(&self) -> usize {
        self.bucket_of.len()
    }

    /// Where the tracker is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether all buckets of this backward are released at its end (7).
    pub fn deferred(&self) -> bool {
        !self.observed || self.repeated
    }

    /// Opens a backward. `reduce` says whether it ends with the reduction.
    pub fn start(&mut self, reduce: bool) {
        self.reset();
        self.phase = if reduce { Phase::Reducing } else { Phase::Counting };
    }

    /// Notes that a parameter's gradient has arrived. Returns the number of buckets that may be launched by now, if that
    /// number has grown. Outside a backward, and for an unknown parameter, nothing happens.
    pub fn mark(&mut self, parameter: usize) -> Option<usize> {
        let bucket = *self.bucket_of.get(parameter)?;
        if self.phase == Phase::Idle {
            return None;
        }
        let marked = self.marked.get_mut(parameter)?;
        if *marked {
            self.repeated = true;
            if bucket < self.released && !self.late.contains(&parameter) {
                self.late.push(parameter);
            }
            return None;
        }
        *marked = true;
        self.arrival.push(parameter);
        if let Some(left) = self.left.get_mut(bucket) {
            *left -= 1;
        }
        self.advance()
    }

    fn advance(&mut self) -> Option<usize> {
        if self.phase != Phase::Reducing || self.deferred() {
            return None;
        }
        let before = self.released;
        while self.released + 1 < self.left.len() && self.left.get(self.released) == Some(&0) {
            self.released += 1;
        }
        (self.released > before).then_some(self.released)
    }

    /// Releases every bucket before the end, if all parameters have been marked (2). Returns whether that is so.
    pub fn release(&mut self) -> bool {
        let complete = self.phase == Phase::Reducing && self.left.iter().all(|&left| left == 0);
        if complete {
            self.released = self.left.len();
        }
        complete
    }

    /// Parameters without a gradient in this window, as far as it has gone (5); ascending.
    pub fn unused(&self) -> Vec<usize> {
        let used = self.marked.iter().zip(&self.carried);
        used.enumerate()
            .filter(|(_, (marked, carried))| !**marked && !**carried)
            .map(|(index, _)| index)
            .collect()
    }

    /// Counts parameters as used in this window, as a backward of another tracker has done; unknown ones are none of ours.
    pub fn carry(&mut self, parameters: &[usize]) {
        for &parameter in parameters {
            if let Some(carried) = self.carried.get_mut(parameter) {
                *carried = true;
            }
        }
    }

    /// Parameters that were marked after their bucket was released (4), in order of arrival.
    pub fn late(&self) -> &[usize] {
        &self.late
    }

    /// Parameters in the order in which they were first marked in this backward (8).
    pub fn arrival(&self) -> &[usize] {
        &self.arrival
    }

    /// Closes the backward. What is left is released by this (3): everything after a reducing one.
    pub fn finish(&mut self) {
        match self.phase {
            Phase::Idle => return,
            Phase::Counting => {
                for (carried, marked) in self.carried.iter_mut().zip(&self.marked) {
                    *carried |= marked;
                }
            }
            Phase::Reducing => self.carried.fill(false),
        }
        self.observed = true;
        self.reset();
    }

    /// Forgets the backward: an error ended it (6).
    pub fn abandon(&mut self) {
        self.reset();
    }

    fn reset(&mut self) {
        self.phase = Phase::Idle;
        self.marked.fill(false);
        self.left.copy_from_slice(&self.sizes);
        self.released = 0;
        self.late.clear();
        self.arrival.clear();
    }
}

/// The bucket of each parameter.
fn inverse(parameters: usize, buckets: &[Vec<usize>]) -> Result<Vec<usize>> {
    let mut bucket_of = vec![None; parameters];
    for (bucket, members) in buckets.iter().enumerate() {
        for &member in members {
            match bucket_of.get_mut(member) {
                Some(slot @ None) => *slot = Some(bucket),
                _ => return Err(Error::NotAPartition { what: "buckets", index: member }),
            }
        }
    }
    let checked = |(index, bucket): (usize, Option<usize>)| {
        bucket.ok_or(Error::NotAPartition { what: "buckets", index })
    };
    bucket_of.into_iter().enumerate().map(checked).collect()
}
