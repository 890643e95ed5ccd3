//! Plans for data- and pipeline-parallel training, as plain values.
//!
//! Everything that will happen in a training step is decided here: which gradients travel in which bucket, which
//! partition computes which micro-batch when. Nothing here knows of Python, torch, clocks or I/O.
//!
//! What holds everywhere (each file adds its own, by number):
//!
//! 1. Functions are pure: the same arguments give the same plan in every process, on every machine.
//! 2. Arguments never panic: what cannot be planned is an [`Error`], whose variant carries the place.
//! 3. Sizes are 64-bit and checked; no sum or product wraps.
//! 4. What a plan takes in time and memory is linear in what it describes, and that is bounded by [`MAX_CELLS`].

mod balance;
mod bucket;
mod clock;
mod error;
mod limits;
mod partition;
mod schedule;
mod search;
mod skip;
mod streams;

pub use balance::{Cost, balance};
pub use bucket::{
    Buckets, Marked, Phase, Readiness, agreed_order, assign_buckets, buckets_by_arrival, pieces,
    reduction_end, verify_buckets,
};
pub use clock::clock_cycles;
pub use error::{Error, Result};
pub use limits::MAX_CELLS;
pub use partition::{Member, MemberKind, Occurrence, Problem, verify_partition};
pub use schedule::{
    Action, At, Blocked, Cause, Costs, Entry, Gpipe, Held, Idle, Kind, Links, Lowering, MAX_STAGES, Maker,
    PerStage, Placement, Recompute, Schedule, Simulation, Span, TextCell, TextPicture, TextRow, make_gpipe,
    make_gpipe_rank,
};
pub use search::{Found, Progress, Search, search};
pub use skip::{Skip, SkipProblem, SkipRole, SkipUse, verify_skips};
pub use streams::{
    Buffer, Event, Half, Hazard, Host, Message, Operation, Place, Stream, StreamPlan, Use, Work, plan_streams,
};
