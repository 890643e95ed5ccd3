//! What hosts tell streams to do, as a value, and how it is written.
//!
//! The text has a line for each operation: who issues it, within which action, and what it is.
//!
//! ```text
//! lane 1 | 1F0 | wait on compute[1]@0 for e1
//! lane 1 | 1F0 | share value[0,0] with compute[1]@0
//! lane 1 | 1F0 | run on compute[1]@0: reads value[0,0] state[1]; writes value[1,0] value[0,0]
//! ```

use std::collections::BTreeSet;
use std::fmt;

use crate::schedule::Action;

/// A thread of the process, which issues operations in its own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    /// The thread that calls forward and backward.
    Caller,
    /// The worker of a rank.
    Lane(u32),
}

/// What a device works off in order. Each has the index of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    /// The stream that the caller works on.
    Caller(u32),
    /// The stream of a stage.
    Compute {
        /// The stage.
        stage: u32,
        /// Its device.
        device: u32,
    },
    /// One end of what carries values (or skips, which may pass stages over) from a stage to another. Between two devices there are two ends, which wait for each
    /// other at every copy, as torch makes them do.
    Copy {
        /// The stage whose result is copied.
        from: u32,
        /// The stage that needs it.
        to: u32,
        /// The device of this end.
        device: u32,
    },
}

impl Stream {
    /// The index of the device.
    pub const fn device(self) -> u32 {
        match self {
            Self::Caller(device) | Self::Compute { device, .. } | Self::Copy { device, .. } => device,
        }
    }
}

/// Memory with one life: from the first write, by whose stream it is owned, to its release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The mini-batch.
    Input,
    /// A stage's parameters and buffers. What a layer writes there, such as a running statistic, it writes where it reads,
    /// and nobody but the caller has a use for it: so the caller's own writes stand for all that must not come too early.
    State(u32),
    /// What a stage's forward gives to others. It is not what the stage itself keeps, although it may be the same memory:
    /// a value without a gradient is held by nobody but those that it was given to.
    Value(u32, u32),
    /// A value, copied for the next stage: that stage, micro-batch.
    ValueCopy(u32, u32),
    /// A skip connection's value: which skip, micro-batch. It may be the same memory as any other value.
    Skip(u32, u32),
    /// Such a value, copied for the stage that pops it.
    SkipCopy(u32, u32),
    /// What a forward or recomputation leaves for its backward: stage, micro-batch.
    Saved(u32, u32),
    /// The gradient of the step's output.
    OutputGradient,
    /// The gradient of a stage's input: stage, micro-batch.
    Gradient(u32, u32),
    /// Such a gradient, copied for the stage before: that stage, micro-batch.
    GradientCopy(u32, u32),
    /// The gradient of a skip connection's value: which skip, micro-batch.
    SkipGradient(u32, u32),
    /// Such a gradient, copied for the stage that stashed the value.
    SkipGradientCopy(u32, u32),
    /// The sum of a stage's parameter gradients.
    ParameterGradient(u32),
}

/// A point in a stream, which others can wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event(pub u32);

/// Half of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Half {
    /// The forward.
    Forward,
    /// The backward, recomputation included.
    Backward,
}

/// What passes from host to host, and orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// The caller starts the lanes.
    Begin(Half),
    /// A stage's value: stage, micro-batch.
    Value(u32, u32),
    /// The gradient of a stage's input: stage, micro-batch.
    Gradient(u32, u32),
    /// A lane has issued its half.
    End(Half, u32),
}

/// What is to be done. Where a stream is optional, `None` is the host itself, which works as it issues.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Work {
    /// Computes.
    Run {
        /// Where.
        stream: Option<Stream>,
        /// What it reads.
        reads: Vec<Buffer>,
        /// What it writes; a buffer that is not there yet is allocated.
        writes: Vec<Buffer>,
    },
    /// Copies to another device, or between device and host. At least one end is a stream.
    Copy {
        /// What is copied.
        buffer: Buffer,
        /// The new memory, owned by the end that receives.
        copy: Buffer,
        /// The sending end.
        from: Option<Stream>,
        /// The receiving end.
        to: Option<Stream>,
        /// Memory of the host that `buffer` may be part of: a layer may hand on its input, or what it keeps.
        within: Option<Buffer>,
    },
    /// Marks a point in a stream.
    Record {
        /// The stream.
        stream: Stream,
        /// The mark.
        event: Event,
    },
    /// Holds a stream, or the host, until a mark is reached.
    Wait {
        /// What is held.
        stream: Option<Stream>,
        /// The mark.
        event: Event,
    },
    /// Tells the allocator that a stream uses memory which another one owns (`record_stream`): once released, the memory
    /// is given to nobody before that stream has done all that it has been told until then.
    Share {
        /// The memory.
        buffer: Buffer,
        /// Who uses it.
        stream: Stream,
    },
    /// Gives memory back, for the owning stream to use again. The runtime counts references: what it releases is told to no
    /// stream any more, as here.
    Release {
        /// The memory.
        buffer: Buffer,
    },
    /// Sends to other hosts.
    Post(Message),
    /// Waits for what another host sends.
    Take(Message),
}

/// One entry of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Operation {
    /// Who issues it.
    pub host: Host,
    /// The lane's action that it belongs to.
    pub action: Option<Action>,
    /// What it does.
    pub work: Work,
}

/// The operations of one step, in an order in which hosts may issue them. Each host keeps to its own; between hosts
/// only messages, and their waits for events, order anything.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StreamPlan {
    operations: Vec<Operation>,
}

impl StreamPlan {
    /// A plan of explicit operations. Whether it is in order is judged by [`StreamPlan::verify`] alone.
    pub fn new(operations: Vec<Operation>) -> Self {
        Self { operations }
    }

    /// The operations.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Every stream that an operation names, once.
    pub fn streams(&self) -> BTreeSet<Stream> {
        self.operations.iter().flat_map(|operation| operation.work.streams()).flatten().collect()
    }
}

impl Work {
    /// The streams that are named.
    fn streams(&self) -> [Option<Stream>; 2] {
        match *self {
            Self::Run { stream, .. } | Self::Wait { stream, .. } => [stream, None],
            Self::Copy { from, to, .. } => [from, to],
            Self::Record { stream, .. } | Self::Share { stream, .. } => [Some(stream), None],
            Self::Release { .. } | Self::Post(_) | Self::Take(_) => [None, None],
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller => f.write_str("caller"),
            Self::Lane(rank) => write!(f, "lane {rank}"),
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller(device) => write!(f, "caller@{device}"),
            Self::Compute { stage, device } => write!(f, "compute[{stage}]@{device}"),
            Self::Copy { from, to, device } => write!(f, "copy[{from}>{to}]@{device}"),
        }
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input => f.write_str("input"),
            Self::State(stage) => write!(f, "state[{stage}]"),
            Self::Value(stage, microbatch) => write!(f, "value[{stage},{microbatch}]"),
            Self::ValueCopy(stage, microbatch) => write!(f, "value_copy[{stage},{microbatch}]"),
            Self::Skip(skip, microbatch) => write!(f, "skip[{skip},{microbatch}]"),
            Self::SkipCopy(skip, microbatch) => write!(f, "skip_copy[{skip},{microbatch}]"),
            Self::Saved(stage, microbatch) => write!(f, "saved[{stage},{microbatch}]"),
            Self::OutputGradient => f.write_str("output_gradient"),
            Self::Gradient(stage, microbatch) => write!(f, "gradient[{stage},{microbatch}]"),
            Self::GradientCopy(stage, microbatch) => write!(f, "gradient_copy[{stage},{microbatch}]"),
            Self::SkipGradient(skip, microbatch) => write!(f, "skip_gradient[{skip},{microbatch}]"),
            Self::SkipGradientCopy(skip, microbatch) => write!(f, "skip_gradient_copy[{skip},{microbatch}]"),
            Self::ParameterGradient(stage) => write!(f, "parameter_gradient[{stage}]"),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}

impl fmt::Display for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Begin(half) => write!(f, "begin {half}"),
            Self::Value(stage, microbatch) => Buffer::Value(stage, microbatch).fmt(f),
            Self::Gradient(stage, microbatch) => Buffer::Gradient(stage, microbatch).fmt(f),
            Self::End(half, rank) => write!(f, "end {half} of lane {rank}"),
        }
    }
}

/// A stream, or the host.
struct Where(Option<Stream>);

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(stream) => stream.fmt(f),
            None => f.write_str("host"),
        }
    }
}

fn list(f: &mut fmt::Formatter<'_>, before: &str, buffers: &[Buffer]) -> fmt::Result {
    if !buffers.is_empty() {
        f.write_str(before)?;
    }
    buffers.iter().try_for_each(|buffer| write!(f, " {buffer}"))
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run { stream, reads, writes } => {
                write!(f, "run on {}:", Where(*stream))?;
                list(f, " reads", reads)?;
                list(f, if reads.is_empty() { " writes" } else { "; writes" }, writes)
            }
            Self::Copy { buffer, copy, from, to, within } => {
                write!(f, "copy {buffer} to {copy} on {} > {}", Where(*from), Where(*to))?;
                within.map_or(Ok(()), |memory| write!(f, ", maybe within {memory}"))
            }
            Self::Record { stream, event } => write!(f, "record {event} on {stream}"),
            Self::Wait { stream, event } => write!(f, "wait on {} for {event}", Where(*stream)),
            Self::Share { buffer, stream } => write!(f, "share {buffer} with {stream}"),
            Self::Release { buffer } => write!(f, "release {buffer}"),
            Self::Post(message) => write!(f, "post {message}"),
            Self::Take(message) => write!(f, "take {message}"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = self.action.map_or_else(String::new, |action| action.to_string());
        write!(f, "{} | {action} | {}", self.host, self.work)
    }
}

impl fmt::Display for StreamPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.operations.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}
