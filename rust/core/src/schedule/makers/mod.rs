//! The makers: schedules by name, for any number of ranks and micro-batches that their rule permits.
//!
//! 1. A maker is a pure function of the shape and a rank: each rank can make its own list without the others' (but for
//!    V-Half and V-Min, whose ranks follow one another in time).
//! 2. What is made passes [`Schedule::verify`].
//! 3. What a rule does not permit is refused before anything is made, with the nearest numbers that would do.

mod alternating;
mod block;
mod dualpipe_v;
mod gpipe;
mod interleaved_1f1b;
mod interleaved_zb;
mod looped_bfs;
mod one_f_one_b;
mod v_half;
mod v_min;
mod writer;
mod zb_h1;
mod zb_h2;
mod zb_v;

use std::fmt;
use std::str::FromStr;

pub use gpipe::{Gpipe, Recompute, make_gpipe, make_gpipe_rank};

use super::{Entry, MAX_STAGES, Schedule, entry};
use crate::error::{Error, Result};
use crate::limits;
use writer::{List, Writer};

/// The size of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// How many ranks.
    p: usize,
    /// How many micro-batches.
    m: usize,
    /// How many stages each rank holds.
    v: usize,
}

/// Declares the makers once, each with its name.
macro_rules! makers {
    ($($(#[$doc:meta])* $maker:ident $name:literal;)*) => {
        /// A schedule that can be made by name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Maker { $($(#[$doc])* $maker,)* }

        impl Maker {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$maker),*];

            /// What it is called.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$maker => $name,)* }
            }
        }
    };
}

makers! {
    /// All forwards, then all backwards.
    Gpipe "gpipe";
    /// One forward, one backward.
    OneFOneB "1f1b";
    /// One forward, one backward, with several stages on each rank.
    Interleaved1F1B "interleaved_1f1b";
    /// Breadth first: all micro-batches through a stage before the next.
    LoopedBfs "looped_bfs";
    /// Interleaved, with weight-gradients postponed into the bubble.
    InterleavedZb "interleaved_zb";
    /// Zero-bubble by hand, with the memory of 1f1b.
    ZbH1 "zb_h1";
    /// Zero-bubble by hand, with twice that memory.
    ZbH2 "zb_h2";
    /// Zero-bubble with two stages on each rank, placed in a V.
    ZbV "zb_v";
    /// Half the memory of 1f1b, with stages in a V.
    VHalf "v_half";
    /// A third of the memory of 1f1b, with stages in a V.
    VMin "v_min";
    /// Forwards and backwards that overlap, with stages in a V.
    DualpipeV "dualpipe_v";
}

impl fmt::Display for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Maker {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = || Self::ALL.iter().map(|maker| maker.name()).collect::<Vec<_>>().join(", ");
        let found = Self::ALL.iter().copied().find(|maker| maker.name() == name);
        found.ok_or_else(|| Error::UnknownSchedule { given: name.to_owned(), known: known() })
    }
}

const fn no_such(rank: usize, ranks: usize) -> Error {
    Error::OutOfRange { what: "rank", value: rank, count: ranks }
}

/// How many stages a rank holds.
enum Stages {
    /// This many and no other number.
    Exactly(usize),
    /// Any number; two unless it is chosen.
    Any,
}

impl Maker {
    /// The schedule of this name; `stages_per_rank` is for those that leave it open, and two by default.
    ///
    /// ```
    /// use torchrelay_core::Maker;
    ///
    /// let schedule = Maker::OneFOneB.make(2, 3, None)?;
    /// let rank = |rank| schedule.actions(rank).unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>();
    /// assert_eq!(rank(0), ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]);
    /// assert_eq!(rank(1), ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]);
    /// # Ok::<(), torchrelay_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotPositive`] and [`Error::TooLarge`] for numbers beyond the limits of [`Schedule::new`];
    /// [`Error::NotPermitted`] for those that the schedule's rule does not permit.
    pub fn make(self, ranks: usize, microbatches: usize, stages_per_rank: Option<usize>) -> Result<Schedule> {
        let shape = self.shape(ranks, microbatches, stages_per_rank)?;
        let (actions, overlaps) = if let Some(lists) = self.lists(shape, None) {
            (lists, Vec::new())
        } else {
            let lists = (0..ranks).map(|rank| self.list(shape, rank));
            lists.map(|list| (list.actions, list.overlaps)).unzip()
        };
        Schedule::new(self.name(), &self.placement(shape), microbatches, true, actions)?
            .with_overlaps(overlaps)
    }

    /// The list of one rank alone: the same that [`Maker::make`] gives that rank. But for V-Half and V-Min, in time and memory
    /// linear in its length.
    ///
    /// # Errors
    /// Those of [`Maker::make`], and [`Error::OutOfRange`] if there is no such rank.
    pub fn make_rank(
        self,
        ranks: usize,
        microbatches: usize,
        stages_per_rank: Option<usize>,
        rank: usize,
    ) -> Result<Vec<Entry>> {
        let shape = self.shape(ranks, microbatches, stages_per_rank)?;
        if rank >= ranks {
            return Err(no_such(rank, ranks));
        }
        let List { actions, overlaps } = match self.lists(shape, Some(rank)) {
            Some(mut lists) if rank < lists.len() => {
                List { actions: lists.swap_remove(rank), overlaps: Vec::new() }
            }
            _ => self.list(shape, rank),
        };
        Ok(entry::entries(&actions, &overlaps).collect())
    }

    const fn stages(self) -> Stages {
        match self {
            Self::Gpipe | Self::OneFOneB | Self::ZbH1 | Self::ZbH2 => Stages::Exactly(1),
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualpipeV => Stages::Exactly(2),
            Self::Interleaved1F1B | Self::LoopedBfs | Self::InterleavedZb => Stages::Any,
        }
    }

    /// Whether the second half of the stages goes back the way of the first; else every `p` stages begin at rank 0 again.
    const fn in_a_v(self) -> bool {
        matches!(self, Self::ZbV | Self::VHalf | Self::VMin | Self::DualpipeV)
    }

    /// The rank of each stage.
    fn placement(self, Shape { p, v, .. }: Shape) -> Vec<usize> {
        if self.in_a_v() { (0..p).chain((0..p).rev()).collect() } else { (0..v).flat_map(|_| 0..p).collect() }
    }

    /// The shape, if the limits and the rule permit it.
    fn shape(self, ranks: usize, microbatches: usize, stages_per_rank: Option<usize>) -> Result<Shape> {
        super::checked_ranks(ranks)?;
        let v = match (self.stages(), stages_per_rank) {
            (_, Some(0)) => {
                return Err(Error::NotPositive { what: "the number of stages per rank", value: 0 });
            }
            (Stages::Any, given) => given.unwrap_or(2),
            (Stages::Exactly(v), None) => v,
            (Stages::Exactly(v), Some(given)) if given == v => v,
            (Stages::Exactly(v), Some(given)) => {
                return Err(Error::NotPermitted {
                    maker: self,
                    rule: format!("exactly {v} stage{} on each rank", if v == 1 { "" } else { "s" }),
                    what: "stages per rank",
                    given,
                    nearest: vec![v],
                });
            }
        };
        let stages = ranks.saturating_mul(v);
        if stages > MAX_STAGES {
            return Err(Error::TooLarge {
                what: "the number of stages",
                value: stages as u128,
                limit: MAX_STAGES,
            });
        }
        limits::cells(("the number of micro-batches", microbatches), ("the number of stages", stages))?;
        let shape = Shape { p: ranks, m: microbatches, v };
        match self {
            Self::Interleaved1F1B | Self::InterleavedZb => interleaved_1f1b::check(self, shape)?,
            Self::DualpipeV => dualpipe_v::check(shape)?,
            _ => {}
        }
        Ok(shape)
    }

    /// The lists of all ranks, of schedules in which a rank's own depends on the others'.
    fn lists(self, shape: Shape, only: Option<usize>) -> Option<Vec<Vec<super::Action>>> {
        match self {
            Self::VHalf => v_half::lists(shape, only),
            Self::VMin => v_min::lists(shape, only),
            _ => None,
        }
    }

    /// The list of a rank, of all other schedules.
    fn list(self, shape: Shape, rank: usize) -> List {
        let Shape { p, v, .. } = shape;
        let v_turn = self.in_a_v();
        let stage = |chunk| if v_turn && chunk == 1 { 2 * p - 1 - rank } else { chunk * p + rank };
        let writer = Writer::new((0..v).map(stage));
        match self {
            Self::Gpipe => gpipe::list(shape, rank),
            Self::OneFOneB => one_f_one_b::list(shape, rank, writer),
            Self::Interleaved1F1B => interleaved_1f1b::list(shape, rank, writer),
            Self::LoopedBfs => looped_bfs::list(shape, writer),
            Self::InterleavedZb => interleaved_zb::list(shape, rank, writer),
            Self::ZbH1 => zb_h1::list(shape, rank, writer),
            Self::ZbH2 => zb_h2::list(shape, rank, writer),
            // The latter two are made for all ranks at once; there is a block for any number of them.
            Self::ZbV | Self::VHalf | Self::VMin => zb_v::list(shape, rank, writer),
            Self::DualpipeV => dualpipe_v::list(shape, rank, writer),
        }
    }
}
