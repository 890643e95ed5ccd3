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
//! 4. A parameter marked again after its bucket was released, or its piece was complete, is late: what was taken lacks a
//!    gradient. Every late parameter is reported at the end of that backward.
//! 5. A parameter is used in a window if it was marked in a finished backward since the last reducing one, or in this.
//! 6. An abandoned backward leaves no trace, except what it taught (7).
//! 7. The first backward, each after one that marked a parameter twice, and one that is held, releases everything at the
//!    end; so a model in which a parameter's gradient arrives in pieces is never late twice, and mostly never once.
//! 8. The order in which the gradients of a backward arrived is known until it is closed. Other buckets may take the place
//!    of the tracker's; nothing else that it knows changes by that.
//! 9. A bucket may be divided into pieces. A piece is complete, once in a backward, when every parameter of it has been
//!    marked, unless everything is released at the end (7); so before its bucket is released, if that is not at the end.

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

/// What a gradient has made possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Marked {
    /// The piece that is complete by it.
    pub piece: Option<usize>,
    /// The number of buckets that may be launched by now, if that number has grown.
    pub stop: Option<usize>,
}

/// The tracker: see the module's text for what it keeps to.
#[derive(Debug, Clone)]
pub struct Readiness {
    bucket_of: Vec<usize>,
    sizes: Vec<usize>,
    pieces: Pieces,
    phase: Phase,
    marked: Vec<bool>,
    carried: Vec<bool>,
    left: Vec<usize>,
    released: usize,
    late: Vec<usize>,
    arrival: Vec<usize>,
    repeated: bool,
    observed: bool,
    held: bool,
}

impl Readiness {
    /// A tracker of `parameters` parameters in these buckets, in the order of reduction.
    ///
    /// # Errors
    /// [`Error::NotAPartition`] unless each of the parameters `0..parameters` is in exactly one bucket.
    pub fn new(parameters: usize, buckets: &[Vec<usize>]) -> Result<Self> {
        let bucket_of = inverse("buckets", parameters, buckets)?;
        let sizes: Vec<_> = buckets.iter().map(Vec::len).collect();
        Ok(Self {
            bucket_of,
            left: sizes.clone(),
            sizes,
            pieces: Pieces::default(),
            phase: Phase::Idle,
            marked: vec![false; parameters],
            carried: vec![false; parameters],
            released: 0,
            late: Vec::new(),
            arrival: Vec::with_capacity(parameters),
            repeated: false,
            observed: false,
            held: false,
        })
    }

    /// Puts other buckets in the place of these, for the same parameters, undivided. Of a backward that is open, what has
    /// arrived stays known; what was released is not.
    ///
    /// # Errors
    /// [`Error::NotAPartition`], as for [`Readiness::new`]; then nothing has changed.
    pub fn rearrange(&mut self, buckets: &[Vec<usize>]) -> Result<()> {
        self.bucket_of = inverse("buckets", self.parameters(), buckets)?;
        self.sizes = buckets.iter().map(Vec::len).collect();
        self.left.clone_from(&self.sizes);
        for parameter in &self.arrival {
            let left = self.bucket_of.get(*parameter).and_then(|&bucket| self.left.get_mut(bucket));
            if let Some(left) = left {
                *left -= 1;
            }
        }
        self.released = 0;
        self.pieces = Pieces::default();
        Ok(())
    }

    /// Divides the buckets, or some of them, into pieces, until they are rearranged. In a backward that is open, those
    /// pieces count as incomplete whose parameters have all arrived.
    ///
    /// # Errors
    /// [`Error::NotAPartition`] if a parameter is in several pieces, or there is none of that number; then nothing has
    /// changed.
    pub fn divide(&mut self, pieces: &[Vec<usize>]) -> Result<()> {
        let piece_of = groups_of("pieces", self.parameters(), pieces)?;
        let sizes: Vec<_> = pieces.iter().map(Vec::len).collect();
        self.pieces = Pieces { piece_of, left: sizes.clone(), complete: vec![false; sizes.len()], sizes };
        for &parameter in &self.arrival {
            self.pieces.count(parameter);
        }
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
        !self.observed || self.repeated || self.held
    }

    /// Opens a backward. `reduce` says whether it ends with the reduction, `hold` that nothing is released before (7).
    pub fn start(&mut self, reduce: bool, hold: bool) {
        self.reset();
        self.held = hold;
        self.phase = if reduce { Phase::Reducing } else { Phase::Counting };
    }

    /// Notes that a parameter's gradient has arrived. Outside a backward, and for an unknown parameter, nothing happens.
    pub fn mark(&mut self, parameter: usize) -> Marked {
        let nothing = Marked::default();
        let Some(&bucket) = self.bucket_of.get(parameter) else { return nothing };
        let Some(marked) = self.marked.get_mut(parameter) else { return nothing };
        if self.phase == Phase::Idle {
            return nothing;
        }
        if *marked {
            self.repeated = true;
            let gone = bucket < self.released || self.pieces.is_complete(parameter);
            if gone && !self.late.contains(&parameter) {
                self.late.push(parameter);
            }
            return nothing;
        }
        *marked = true;
        self.arrival.push(parameter);
        if let Some(left) = self.left.get_mut(bucket) {
            *left -= 1;
        }
        if self.phase != Phase::Reducing || self.deferred() {
            return nothing;
        }
        Marked { piece: self.pieces.mark(parameter), stop: self.advance() }
    }

    fn advance(&mut self) -> Option<usize> {
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
        self.held = false;
        self.marked.fill(false);
        self.left.copy_from_slice(&self.sizes);
        self.pieces.reset();
        self.released = 0;
        self.late.clear();
        self.arrival.clear();
    }
}

/// The pieces of the buckets; none at all if they were not divided.
#[derive(Debug, Clone, Default)]
struct Pieces {
    piece_of: Vec<Option<usize>>,
    sizes: Vec<usize>,
    left: Vec<usize>,
    complete: Vec<bool>,
}

impl Pieces {
    /// Counts a parameter; returns its piece if that is complete by it. A backward that became deferred (7) midway does
    /// not get here any more, so what it has not completed by then stays incomplete.
    fn mark(&mut self, parameter: usize) -> Option<usize> {
        let (piece, left) = self.count(parameter)?;
        if left > 0 {
            return None;
        }
        *self.complete.get_mut(piece)? = true;
        Some(piece)
    }

    /// Counts a parameter; returns its piece and how many are left of that.
    fn count(&mut self, parameter: usize) -> Option<(usize, usize)> {
        let piece = self.piece_of.get(parameter).copied().flatten()?;
        let left = self.left.get_mut(piece)?;
        *left -= 1;
        Some((piece, *left))
    }

    fn is_complete(&self, parameter: usize) -> bool {
        let piece = self.piece_of.get(parameter).copied().flatten();
        piece.and_then(|piece| self.complete.get(piece)).copied().unwrap_or(false)
    }

    fn reset(&mut self) {
        self.left.copy_from_slice(&self.sizes);
        self.complete.fill(false);
    }
}

/// The group of each parameter, where each is in one.
fn inverse(what: &'static str, parameters: usize, groups: &[Vec<usize>]) -> Result<Vec<usize>> {
    let found = groups_of(what, parameters, groups)?;
    let checked = |(index, group): (usize, Option<usize>)| group.ok_or(Error::NotAPartition { what, index });
    found.into_iter().enumerate().map(checked).collect()
}

/// The group of each parameter, where none is in two.
fn groups_of(what: &'static str, parameters: usize, groups: &[Vec<usize>]) -> Result<Vec<Option<usize>>> {
    let mut group_of = vec![None; parameters];
    for (group, members) in groups.iter().enumerate() {
        for &member in members {
            match group_of.get_mut(member) {
                Some(slot @ None) => *slot = Some(group),
                _ => return Err(Error::NotAPartition { what, index: member }),
            }
        }
    }
    Ok(group_of)
}
