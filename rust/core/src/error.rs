//! The one error of the core. Each variant carries the data, so that a caller can point at what is wrong.

use crate::partition::Problem;
use crate::schedule::{Action, At, Blocked, Kind, Maker};
use crate::skip::SkipProblem;
use crate::streams::Hazard;

/// What a plan can be refused for.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A count that must be at least one is smaller.
    #[error("{what} must be at least 1, but is {value}")]
    NotPositive {
        /// The name of the argument.
        what: &'static str,
        /// What was given.
        value: i64,
    },
    /// A plan would be larger than any that could be carried out.
    #[error("{what} must be at most {limit}, but would be {value}")]
    TooLarge {
        /// What is limited.
        what: &'static str,
        /// What was asked for.
        value: u128,
        /// The largest that is accepted.
        limit: usize,
    },
    /// A name that is none of those that can be chosen.
    #[error("{what} must be one of {known}, but is {given:?}")]
    UnknownOption {
        /// The name of the argument.
        what: &'static str,
        /// What was given.
        given: String,
        /// What can be chosen.
        known: &'static str,
    },
    /// A name that is no schedule's.
    #[error("there is no schedule {given:?}; the names are: {known}")]
    UnknownSchedule {
        /// What was given.
        given: String,
        /// What can be chosen.
        known: String,
    },
    /// Numbers for which a schedule is not defined.
    #[error("{maker} needs {rule}; with {given} {what} it cannot be made, with {} it can", nearest.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or "))]
    NotPermitted {
        /// Which schedule.
        maker: Maker,
        /// What it needs.
        rule: String,
        /// What is counted.
        what: &'static str,
        /// What was given.
        given: usize,
        /// The nearest that are permitted.
        nearest: Vec<usize>,
    },
    /// A memory limit that nothing was found for.
    #[error(
        "no schedule was found within the memory limit; each rank needs at least a forward of all its stages"
    )]
    NoSchedule,
    /// Buckets need a limit of size.
    #[error("the list of bucket size limits is empty; give at least one limit in bytes")]
    NoLimits,
    /// A limit of size below zero.
    #[error("the bucket size limit at position {position} is {value}; a limit is in bytes and not negative")]
    NegativeLimit {
        /// Where in the list of limits.
        position: usize,
        /// What was given.
        value: i64,
    },
    /// A tensor smaller than nothing.
    #[error("the size of the tensor at position {position} is {value} bytes; a size is not negative")]
    NegativeSize {
        /// Where in the list of tensors.
        position: usize,
        /// What was given.
        value: i64,
    },
    /// Two lists that describe the same tensors have different lengths.
    #[error("{what} has {length} entries for {expected} tensors: {}", first_unmatched(*length, *expected))]
    LengthsDiffer {
        /// The name of the list.
        what: &'static str,
        /// Its length.
        length: usize,
        /// The number of tensors.
        expected: usize,
    },
    /// An index that is no tensor's.
    #[error("the tensor index at position {position} is {index}, out of range for {count} tensors")]
    IndexOutOfRange {
        /// Where in the list of indices.
        position: usize,
        /// What was given.
        index: i64,
        /// The number of tensors.
        count: usize,
    },
    /// Two positions with one index.
    #[error("the tensor index {index} at position {position} stands at position {first} already")]
    DuplicateIndex {
        /// Where it was met for the second time.
        position: usize,
        /// Where it stands first.
        first: usize,
        /// The index.
        index: i64,
    },
    /// An index that is missing, unknown, or there twice.
    #[error("each index must be in exactly one of the {what}, but {index} is not")]
    NotAPartition {
        /// What the indices are divided into.
        what: &'static str,
        /// The first index at fault.
        index: usize,
    },
    /// A bucket without a member.
    #[error("bucket {bucket} is empty")]
    EmptyBucket {
        /// Its place in the order of reduction.
        bucket: usize,
    },
    /// A bucket of what may not be mixed.
    #[error("bucket {bucket} mixes dtypes or devices: parameters {first} and {other} differ in that")]
    MixedBucket {
        /// Its place in the order of reduction.
        bucket: usize,
        /// A member.
        first: usize,
        /// One that does not fit to it.
        other: usize,
    },
    /// A sparse gradient travels by itself.
    #[error("parameter {index} has sparse gradients and must be alone, but bucket {bucket} has others")]
    SparseNotAlone {
        /// Its place in the order of reduction.
        bucket: usize,
        /// The parameter.
        index: usize,
    },
    /// The bytes of a bucket do not fit in 64 bits.
    #[error("with the tensor at position {position} its bucket exceeds {} bytes", i64::MAX)]
    SumOverflow {
        /// The tensor that is one too many.
        position: usize,
    },
    /// A time that no action can take.
    #[error("the cost {what} must be finite and not negative, but is {value}")]
    BadCost {
        /// Which cost.
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// Durations that do not belong to the actions of a schedule.
    #[error("rank {rank} has {actions} actions, but {given} durations are given for it; give one for each")]
    DurationsDiffer {
        /// The rank.
        rank: usize,
        /// How many durations were given.
        given: usize,
        /// How many actions it has.
        actions: usize,
    },
    /// Memory that no action can add or free.
    #[error("the cost {what} must be finite, but is {value}")]
    BadMemory {
        /// Which cost.
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// Costs whose sums are no longer numbers.
    #[error("the costs are too large: what they sum up to is infinite; give them in a larger unit")]
    CostsOverflow,
    /// A limit that says nothing.
    #[error("the memory limit must be a number, or infinite for none, but is {value}")]
    BadLimit {
        /// What was given.
        value: f64,
    },
    /// Costs that are not one for each stage.
    #[error(
        "the cost {what} has {given} numbers for {stages} stages; give one number for all, or one for each"
    )]
    CostsDiffer {
        /// Which cost.
        what: &'static str,
        /// How many were given.
        given: usize,
        /// How many stages there are.
        stages: usize,
    },
    /// More parts than there are layers to put into them.
    #[error("{layers} layers cannot be divided into {parts} parts, since each needs at least 1 layer: {}", at_most(*layers))]
    TooManyParts {
        /// How many parts were asked for.
        parts: usize,
        /// How many layers there are.
        layers: usize,
    },
    /// A cost that no layer can have.
    #[error(
        "the cost of the layer at position {position} is {value}; a cost must be finite and not negative"
    )]
    BadLayerCost {
        /// Where in the list of costs.
        position: usize,
        /// What was given.
        value: f64,
    },
    /// A text that is not an action.
    #[error("{text:?} is not an action: at column {column}, {reason}")]
    ActionText {
        /// The text, cut to a readable length.
        text: String,
        /// Counted in characters from 1.
        column: usize,
        /// What was expected there.
        reason: &'static str,
    },
    /// An action without the micro-batch that its kind needs.
    #[error("an action of kind {0} needs a micro-batch")]
    MicrobatchMissing(Kind),
    /// An action with a micro-batch although its kind concerns the whole step.
    #[error("an action of kind {0} takes no micro-batch")]
    MicrobatchUnexpected(Kind),
    /// A stage on a rank that does not exist.
    #[error("stage {stage} is placed on rank {rank}, but there are {ranks} ranks")]
    NoSuchRank {
        /// The stage.
        stage: usize,
        /// Where it was placed.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// A pair that cannot be carried out as one.
    #[error(
        "rank {rank}, position {position}: only a forward (F) and a backward (B or I) right after it overlap, \
         and an action overlaps with one other"
    )]
    BadOverlap {
        /// The rank.
        rank: usize,
        /// Where the first of the two would stand.
        position: usize,
    },
    /// A text that is not what it should be.
    #[error("not {what}: line {line}, column {column}: {reason}")]
    Text {
        /// What it should be, such as "a schedule".
        what: &'static str,
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
        /// What was expected there.
        reason: String,
    },
    /// A rank that does not exist.
    #[error("there is no {what} {value}, only {count}")]
    OutOfRange {
        /// What is counted.
        what: &'static str,
        /// What was given.
        value: usize,
        /// How many there are.
        count: usize,
    },
    /// An action of a stage that the schedule does not have.
    #[error("{at}: there is no stage {}, only {stages} stages", at.action.stage())]
    NoSuchStage {
        /// The action.
        at: At,
        /// How many stages there are.
        stages: usize,
    },
    /// An action of a micro-batch that the schedule does not have.
    #[error("{at}: there are only {microbatches} micro-batches")]
    NoSuchMicrobatch {
        /// The action.
        at: At,
        /// How many micro-batches there are.
        microbatches: usize,
    },
    /// An action on a rank that does not hold its stage.
    #[error("{at}: stage {} is placed on rank {home}", at.action.stage())]
    Misplaced {
        /// The action.
        at: At,
        /// The rank that holds the stage.
        home: usize,
    },
    /// An action that happens twice.
    #[error("{at}: done already at position {first}")]
    Repeated {
        /// The second of the two.
        at: At,
        /// The position of the first, on the same rank.
        first: usize,
    },
    /// A backward that is done both whole (B) and split (I and W).
    #[error("{at}: this backward is both whole and split, with {} at position {first}", other)]
    WholeAndSplit {
        /// The second of the two.
        at: At,
        /// The action that it contradicts.
        other: Action,
        /// The position of that action, on the same rank.
        first: usize,
    },
    /// A backward in a schedule that is declared to have none.
    #[error("{at}: the schedule is forward only")]
    UnexpectedBackward {
        /// The action.
        at: At,
    },
    /// A transfer that goes nowhere.
    #[error("{at}: {}", no_peer(at.action.kind(), *same_rank))]
    NoPeer {
        /// The action.
        at: At,
        /// Whether the neighbouring stage is on the same rank; else there is none.
        same_rank: bool,
    },
    /// A copy where results are sent.
    #[error("{at}: results are sent and received in this schedule, so that none is copied")]
    CopiedAndSent {
        /// The first copy, or wait for one.
        at: At,
    },
    /// A schedule that has been lowered before.
    #[error("the schedule says already {what}; lower its computations")]
    Lowered {
        /// What it says.
        what: &'static str,
    },
    /// Two actions that overlap, where a rank may hold the weights of only one stage.
    #[error("{at} overlaps with an action of another stage: at least 2 stages must be unsharded at a time")]
    PairSharded {
        /// The first of the two.
        at: At,
    },
    /// Two actions that cannot overlap, since one needs the other.
    #[error("{at} overlaps with {needs}, which it needs")]
    OverlapNeeds {
        /// The second of the two.
        at: At,
        /// The first.
        needs: Action,
    },
    /// A computation without the weights.
    #[error("{at}: the weights of stage {} are sharded here; an UNSHARD must come first", at.action.stage())]
    Sharded {
        /// The computation.
        at: At,
    },
    /// Weights that are gathered or dropped twice.
    #[error(
        "{at}: the weights of stage {} are {} already",
        at.action.stage(),
        if at.action.kind() == Kind::Unshard { "gathered" } else { "sharded" }
    )]
    ShardedTwice {
        /// The second of two UNSHARD, or of two RESHARD.
        at: At,
    },
    /// An action before one of the same rank that it needs.
    #[error("{at} needs {needs}, which comes later, at position {later}")]
    OutOfOrder {
        /// The action that is too early.
        at: At,
        /// What it needs.
        needs: Action,
        /// Where that stands, on the same rank.
        later: usize,
    },
    /// An action that is nowhere.
    #[error("{action} is missing on rank {rank}")]
    Missing {
        /// The action.
        action: Action,
        /// The rank that holds its stage.
        rank: usize,
    },
    /// Ranks that wait for one another for ever.
    #[error("deadlock: {}", chain(cycle))]
    Deadlock {
        /// Each entry waits for an action of the next one's rank, the last for one of the first's.
        cycle: Vec<Blocked>,
    },
    /// Ranks that wait for one another for ever, unless what is sent is buffered.
    #[error("deadlock, unless sends are buffered: {}", chain(cycle))]
    Rendezvous {
        /// Each entry waits for an action of the next one's rank, the last for one of the first's.
        cycle: Vec<Blocked>,
    },
    /// Messages that arrive in another order than they are received.
    #[error("{receive}: message {number} from rank {} is {send}, not what is received here", send.rank)]
    MessageOrder {
        /// What is sent.
        send: At,
        /// What is received as the same message.
        receive: At,
        /// Which of the messages between the two ranks, counted from 0.
        number: usize,
    },
    /// A rank that holds more than it may.
    #[error("{at}: rank {} would hold {held}, more than its limit {limit}", at.rank)]
    OverMemory {
        /// The action that takes too much.
        at: At,
        /// What the rank would hold, in the unit of the costs.
        held: f64,
        /// What it may hold.
        limit: f64,
    },
    /// Limits that are not one for each rank.
    #[error(
        "the memory limit must be one number, or one for each of the {ranks} ranks, but {given} are given"
    )]
    LimitsDiffer {
        /// How many were given.
        given: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// Devices that are not one for each stage.
    #[error("there must be a device for each of the {stages} stages, but there are {devices}")]
    DevicesDiffer {
        /// How many devices were given.
        devices: usize,
        /// How many stages there are.
        stages: usize,
    },
    /// A skip connection that does not lead to a later stage.
    #[error(
        "skip {skip} must lead from one of the {stages} stages to a later one, but leads from {from} to {to}"
    )]
    SkipNotForward {
        /// Its place in the list.
        skip: usize,
        /// The stage that stashes.
        from: u32,
        /// The stage that pops.
        to: u32,
        /// How many stages there are.
        stages: usize,
    },
    /// Streams are not planned for such an action.
    #[error("{at}: streams are planned for forwards, recomputations and whole backwards (F, R, B) only")]
    SplitBackward {
        /// The first of them.
        at: At,
    },
    /// Something that streams may do in the wrong order.
    #[error(transparent)]
    Hazard(Box<Hazard>),
    /// A split that a module cannot have; all the reasons.
    #[error("{}", list("the module cannot be split like this", problems))]
    Partition {
        /// At least one.
        problems: Vec<Problem>,
    },
    /// Skip connections that do not fit together; all the reasons.
    #[error("{}", list("the skip connections do not fit together", problems))]
    Skips {
        /// At least one.
        problems: Vec<SkipProblem>,
    },
    /// An index into another list that is too large.
    #[error("the entry at position {position} is of {what} {index}, but there are only {count}")]
    NoSuchPlace {
        /// What is counted.
        what: &'static str,
        /// Where in the list.
        position: usize,
        /// What was given.
        index: usize,
        /// How many there are.
        count: usize,
    },
}

/// A plan, or why there is none.
pub type Result<T> = std::result::Result<T, Error>;

fn first_unmatched(length: usize, expected: usize) -> String {
    let position = length.min(expected);
    if length < expected {
        format!("the tensor at position {position} has none")
    } else {
        format!("the entry at position {position} has no tensor")
    }
}

fn at_most(layers: usize) -> String {
    if layers == 0 { "give costs of layers".to_owned() } else { format!("at most {layers} parts would fit") }
}

fn no_peer(kind: Kind, same_rank: bool) -> String {
    let which = match kind {
        Kind::SendForward
        | Kind::RecvBackward
        | Kind::WaitSendForward
        | Kind::CopyBackward
        | Kind::WaitCopyBackward => "after",
        _ => "before",
    };
    if same_rank {
        format!("the stage {which} is on the same rank, so that nothing is sent")
    } else {
        format!("there is no stage {which}")
    }
}

/// All links of a chain, or the first ones of a long chain.
fn chain(cycle: &[Blocked]) -> String {
    const READABLE: usize = 8;
    let mut links: Vec<_> = cycle.iter().take(READABLE).map(ToString::to_string).collect();
    match cycle.len().saturating_sub(READABLE) {
        0 => {}
        more => links.push(format!("and {more} more, back to the first")),
    }
    links.join("; ")
}

fn list<P: ToString>(what: &str, problems: &[P]) -> String {
    match problems {
        [one] => one.to_string(),
        many => {
            let lines: Vec<_> = many.iter().map(|problem| format!("- {}", problem.to_string())).collect();
            format!("{what}, for {} reasons:\n{}", many.len(), lines.join("\n"))
        }
    }
}
