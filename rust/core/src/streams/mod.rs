//! Accelerator streams: which work of a step runs on which stream, and what waits for what.
//!
//! A device does what it is told in the order of its streams, later than the host tells it. So everything that crosses
//! streams has to be ordered by events, and memory that a foreign stream uses has to be marked before it is given back.
//! Forgetting either is silent: a wrong number now and then. Hence both are a plan, made by [`plan_streams`], whose order
//! is verified by [`StreamPlan::verify`] on any machine, and which the runtime follows operation by operation.

mod lower;
mod plan;
mod race;

pub use lower::plan_streams;
pub use plan::{Buffer, Event, Half, Host, Message, Operation, Stream, StreamPlan, Work};
pub use race::{Hazard, Place, Use};
