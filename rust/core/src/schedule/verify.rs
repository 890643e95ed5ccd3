//! Whether a schedule can be carried out, and computes what a step is.
//!
//! 1. Placement: every action is of a stage that its rank holds, and of a micro-batch that exists.
//! 2. Completeness: for each pair of stage and micro-batch there is one forward and, unless the schedule is forward only,
//!    one backward, either whole (B) or split (I and W). A recomputation (R) may happen once.
//! 3. Order: nothing comes before an action of the same rank that it needs: a forward before the backward of its pair, with
//!    a recomputation in between; I before W; the stage before in forward, the stage after in backward. Of two actions that
//!    overlap, neither needs the other.
//! 4. Progress: no ranks wait for one another for ever.
//!
//! A schedule may leave all transfers out, and then each is as good as done once its sender has computed. If one is there
//! (a send, a receive, or a wait for a send), then:
//!
//! 5. Every result that another rank needs is sent once, after it was computed, and received once, before it is needed; no
//!    other is. If a send is waited for, then every send is, once and later.
//! 6. Transfers happen in one order: invariant 4 holds where a send returns only when its receive has been reached, and the
//!    other way round (rendezvous). It follows that between two ranks messages are received in the order in which they were
//!    sent, and that invariant 4 holds where sends are buffered.
//!
//! Where several ranks are streams of one process, copies take the place of transfers:
//!
//! 7. If one result is copied, then every result that another rank needs is, once, after it was computed; the copy is
//!    waited for once and later, before it is needed. No other is, and nothing is sent.
//!
//! What is done once a step follows the same pattern:
//!
//! 8. If one stage's gradients are reduced over its replicas, then every stage's are, once and after its last weight
//!    gradients; if one reduction is waited for, every one is, once and later.
//! 9. A stage that is ever unsharded computes only between UNSHARD and RESHARD, which alternate and end with RESHARD.
//!
//! The first fault is reported, with its place. Every action costs constant time: tables with a place per pair, no search
//! but for the message.

use std::fmt;

use super::Schedule;
use super::action::Action;
use super::lists::Lists;
use super::rendezvous;
use super::walk::walk;
use crate::error::{Error, Result};

/// An action and where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The rank whose list it is in.
    pub rank: usize,
    /// Counted from 0 in that list.
    pub position: usize,
    /// The action.
    pub action: Action,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {}, position {})", self.action, self.rank, self.position)
    }
}

impl Schedule {
    /// Says whether the schedule can be carried out; see the invariants at the top of this file.
    ///
    /// # Errors
    /// The first fault: [`Error::NoSuchStage`], [`Error::NoSuchMicrobatch`], [`Error::Misplaced`], [`Error::Repeated`],
    /// [`Error::WholeAndSplit`], [`Error::UnexpectedBackward`], [`Error::NoPeer`], [`Error::CopiedAndSent`], [`Error::OutOfOrder`],
    /// [`Error::OverlapNeeds`], [`Error::Sharded`], [`Error::Missing`], [`Error::MessageOrder`], [`Error::Deadlock`] or
    /// [`Error::Rendezvous`].
    pub fn verify(&self) -> Result<()> {
        let lists = Lists::verified(self)?;
        if lists.transfers() {
            rendezvous::verify(self)
        } else {
            walk(self, |_, _| {}).map_err(|cycle| Error::Deadlock { cycle })
        }
    }

    /// All but what ranks owe to one another: with it, [`walk`] can only fail for a deadlock.
    pub(super) fn verify_lists(&self) -> Result<()> {
        Lists::verified(self).map(|_| ())
    }
}
