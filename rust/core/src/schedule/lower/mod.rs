//! From what ranks compute to all that they do: sends and receives, waits for them, reductions.
//!
//! Everything is put in one order, that of a clock by which a whole backward takes two units of time and any other
//! computation one, and every rank does what it can as soon as it can. A transfer stands where its result is done, ahead of
//! what begins then. Each rank's list is this order as far as it concerns the rank, so ranks cannot wait for one another
//! in a circle, even where a send waits for its receive:
//!
//! ```text
//! rank 0 | F0 | send F0 | F1        | send F1, receive B0 | B0 ...
//! rank 1 |    | receive F0 | F0  B0 | receive F1, send B0 | F1 ...     F1 came while B0 was being computed
//! ```
//!
//! 1. Transfers that meet between two ranks, as the last ones above, stand side by side in both lists, and can be made at
//!    once: as one batch, in both directions.
//! 2. A forward's send is waited for behind the backward of its pair, when the output is not needed any more. Any other
//!    send is waited for before the next one of its stage: of what was sent, two micro-batches are alive at most.
//! 3. A stage's gradients are reduced once its last weight gradients are there (behind what is sent then, before the rank
//!    receives or computes on). The reduction is waited for before the rank's next one, or at the end.
//! 4. A copy stands where a receive would, and nothing where a send would; it is waited for right before it is needed.
//! 5. A recomputation is the last computation before its backward, and does not wait for the gradient.
//! 6. The weights of sharded stages are gathered and dropped as `sharding.rs` says.
//! 7. The time is linear in the number of actions, and what comes out passes [`Schedule::verify`].

mod sharding;
mod timing;
mod writer;

use super::action::{Action, Kind};
use super::lists::Lists;
use super::{Entry, Recompute, Schedule};
use crate::error::{Error, Result};
use timing::Timing;
use writer::Writer;

/// What can be chosen about lowering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lowering {
    /// Whether sends and reductions are waited for by actions of their own. torch wants them from 2.15 on, and does not
    /// know them before.
    pub waits: bool,
    /// What is recomputed, besides what is already.
    pub recompute: Recompute,
    /// How many of its stages a rank may hold unsharded at a time; `None`: weights are not sharded, or the schedule says
    /// itself when they are gathered.
    pub unsharded: Option<usize>,
    /// Whether an input's gradient and the weights' gradients of its pair right behind it become one whole backward, which
    /// may take less time; but its gradient is sent only when all of it is done.
    pub merge: bool,
    /// Whether results are copied, by streams beside the computation, instead of sent: where ranks are lanes of one process.
    pub copies: bool,
}

impl Default for Lowering {
    fn default() -> Self {
        Self { waits: true, recompute: Recompute::Never, unsharded: None, merge: false, copies: false }
    }
}

impl Schedule {
    /// The schedule with all that is needed to carry it out on several ranks.
    ///
    /// ```
    /// use torchrelay_core::{Lowering, Schedule};
    ///
    /// let schedule = Schedule::from_csv("by hand", "0F0,0B0\n1F0,1B0\n")?;
    /// let lowered = schedule.lower(Lowering { waits: false, ..Lowering::default() })?;
    /// let csv = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n";
    /// assert_eq!(lowered.to_csv(), csv);
    /// # Ok::<(), torchrelay_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Schedule::verify`]; [`Error::Lowered`] if there are transfers already, or weights are gathered already
    /// and should be; [`Error::NotPositive`] and [`Error::PairSharded`] for too few unsharded stages.
    pub fn lower(&self, options: Lowering) -> Result<Self> {
        let lists = Lists::verified(self)?;
        if lists.transfers() {
            return Err(Error::Lowered { what: "what is sent and received" });
        }
        if lists.copies() {
            return Err(Error::Lowered { what: "what is copied" });
        }
        // Always fits, being within the limit.
        let m = u32::try_from(self.microbatches).unwrap_or(u32::MAX);
        let recomputed = if self.backward { options.recompute.count(m) } else { 0 };
        if options.merge {
            return self.merged()?.lower(Lowering { merge: false, ..options });
        }
        if recomputed > 0 {
            return self.recomputing(recomputed)?.lower(Lowering { recompute: Recompute::Never, ..options });
        }
        if let Some(limit) = options.unsharded {
            return sharding::unshard(self, limit)?.lower(Lowering { unsharded: None, ..options });
        }
        let timing = Timing::of(self)?;
        let mut writer = Writer::new(self, &timing, options);
        for transfer in timing.transfers(self) {
            for (rank, end) in transfer.ends(self) {
                writer.transfer(rank, transfer.time, end);
            }
        }
        let (lists, overlaps) = writer.done();
        self.with_lists(lists, overlaps)
    }

    /// What ranks compute, without all else: what [`Schedule::lower`] began with.
    ///
    /// # Errors
    /// None that is known.
    pub fn computations(&self) -> Result<Self> {
        self.rewritten(|entry, list| list.extend(entry.filter(|action| action.kind().computes())), |_, _| {})
    }

    /// The same with a whole backward for every input's gradient with the weights' gradients right behind it. Neither is
    /// part of an overlapping pair.
    fn merged(&self) -> Result<Self> {
        let (mut lists, mut overlaps) = (Vec::new(), Vec::new());
        for rank in 0..self.ranks() {
            let (mut list, mut pairs) = (Vec::<Action>::new(), Vec::new());
            let mut open: Option<Action> = None; // an input's gradient by itself, the last of the list
            for entry in self.entries(rank) {
                match (open.take(), entry) {
                    (Some(action), Entry::Single(next))
                        if next == action.with(Kind::WeightGrad, action.narrow_stage()) =>
                    {
                        list.pop();
                        list.push(action.with(Kind::Backward, action.narrow_stage()));
                    }
                    (_, Entry::Single(action)) => {
                        open = Some(action).filter(|action| action.kind() == Kind::InputGrad);
                        list.push(action);
                    }
                    (_, Entry::Overlap(first, second)) => {
                        pairs.push(list.len());
                        list.extend([first, second]);
                    }
                }
            }
            lists.push(list);
            overlaps.push(pairs);
        }
        self.with_lists(lists, overlaps)
    }

    /// The same with a recomputation before the backwards of the first `count` micro-batches, where there is none.
    fn recomputing(&self, count: u32) -> Result<Self> {
        let known = self.recomputed();
        let wanted = |action: &Action| {
            action.kind().gives_input_grad()
                && action.microbatch().is_some_and(|microbatch| microbatch < count as usize)
                && self.cell(*action).and_then(|cell| known.get(cell)) != Some(&true)
        };
        self.rewritten(
            |entry, list| list.extend(entry),
            |entry, list| {
                let recompute = |action: Action| action.with(Kind::Recompute, action.narrow_stage());
                list.extend(entry.filter(wanted).map(recompute));
            },
        )
    }

    /// The same with every entry written anew: first what comes before it, then itself, a pair as a pair.
    fn rewritten(
        &self,
        write: impl Fn(&mut dyn Iterator<Item = Action>, &mut Vec<Action>),
        write_before: impl Fn(&mut dyn Iterator<Item = Action>, &mut Vec<Action>),
    ) -> Result<Self> {
        let (mut lists, mut overlaps) = (Vec::new(), Vec::new());
        for rank in 0..self.ranks() {
            let (mut list, mut pairs) = (Vec::new(), Vec::new());
            for entry in self.entries(rank) {
                write_before(&mut entry.actions(), &mut list);
                if matches!(entry, Entry::Overlap(..)) {
                    pairs.push(list.len());
                }
                write(&mut entry.actions(), &mut list);
            }
            lists.push(list);
            overlaps.push(pairs);
        }
        self.with_lists(lists, overlaps)
    }

    /// The same schedule with other lists.
    fn with_lists(&self, lists: Vec<Vec<Action>>, overlaps: Vec<Vec<usize>>) -> Result<Self> {
        let placement: Vec<_> = self.placement().collect();
        Self::new(self.name.clone(), &placement, self.microbatches, self.backward, lists)?
            .with_overlaps(overlaps)
    }
}
