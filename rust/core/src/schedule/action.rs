//! What a rank can be told to do, in eight bytes, and how it is written.
//!
//! The text form is `{stage}{KIND}{microbatch}`, as in `2F5`: the one that `torch.distributed.pipelining` reads and
//! writes, and `R`, a recomputation, `COPY_F`, `COPY_B` and their waits, which are ours. Reading is strict: `Display` and `FromStr` are each other's inverse,
//! and any other text is refused.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::limits::MAX_CELLS;

/// The most stages a schedule may have.
pub const MAX_STAGES: usize = 1 << 16;

/// Stands for "no micro-batch", beyond every one that there can be, so that an action stays within eight bytes.
const WHOLE_STEP: u32 = u32::MAX;

/// Declares the kinds once, each with its text and whether it concerns one micro-batch (rather than the whole step).
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $text:literal $per_microbatch:literal;)*) => {
        /// What an action does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// The text between stage and micro-batch.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$kind => $text,)* }
            }

            /// Whether an action of this kind names a micro-batch.
            pub const fn per_microbatch(self) -> bool {
                match self { $(Self::$kind => $per_microbatch,)* }
            }
        }
    };
}

impl Kind {
    /// Whether a stage computes, so that it takes time on its device.
    pub const fn computes(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::InputGrad | Self::WeightGrad | Self::Recompute)
    }

    /// Whether it gives the gradient of the stage's input.
    pub(super) const fn gives_input_grad(self) -> bool {
        matches!(self, Self::Backward | Self::InputGrad)
    }

    /// Whether an action of this kind belongs to the backward, so that there is none in inference.
    pub const fn of_backward(self) -> bool {
        !matches!(
            self,
            Self::Forward
                | Self::SendForward
                | Self::RecvForward
                | Self::WaitSendForward
                | Self::CopyForward
                | Self::WaitCopyForward
                | Self::Unshard
                | Self::Reshard
        )
    }
}

kinds! {
    /// The forward of one stage for one micro-batch.
    Forward "F" true;
    /// The whole backward: gradients of the stage's input and of its weights.
    Backward "B" true;
    /// The gradient of the stage's input alone.
    InputGrad "I" true;
    /// The gradients of the stage's weights, postponed by [`Kind::InputGrad`].
    WeightGrad "W" true;
    /// The forward once more, for a backward whose activations were not kept.
    Recompute "R" true;
    /// Hands the output to the next stage.
    SendForward "SEND_F" true;
    /// Takes the input from the stage before.
    RecvForward "RECV_F" true;
    /// Hands the input's gradient to the stage before.
    SendBackward "SEND_B" true;
    /// Takes the output's gradient from the next stage.
    RecvBackward "RECV_B" true;
    /// Waits until the output has left.
    WaitSendForward "WAIT_SEND_F" true;
    /// Waits until the gradient has left.
    WaitSendBackward "WAIT_SEND_B" true;
    /// Copies the input from where the stage before left it, on a stream beside the computation.
    CopyForward "COPY_F" true;
    /// Copies the output's gradient from where the next stage left it.
    CopyBackward "COPY_B" true;
    /// Makes the computation wait for the copy of the input.
    WaitCopyForward "WAIT_COPY_F" true;
    /// Makes the computation wait for the copy of the gradient.
    WaitCopyBackward "WAIT_COPY_B" true;
    /// Gathers the stage's sharded weights.
    Unshard "UNSHARD" false;
    /// Drops what [`Kind::Unshard`] gathered.
    Reshard "RESHARD" false;
    /// Starts the reduction of the stage's gradients over its replicas.
    ReduceGrad "REDUCE_GRAD" false;
    /// Waits until the gradients are reduced.
    WaitReduceGrad "WAIT_REDUCE_GRAD" false;
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.iter().copied().find(|kind| kind.text() == text);
        found.ok_or_else(|| refused(text, 0, "no kind of action has this name"))
    }
}

/// One thing that a rank does.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action {
    kind: Kind,
    stage: u16,
    microbatch: u32,
}

impl Action {
    /// An action of `kind` on `stage`, for `microbatch` where the kind concerns one.
    ///
    /// # Errors
    /// [`Error::MicrobatchMissing`] and [`Error::MicrobatchUnexpected`] where kind and micro-batch do not fit together,
    /// [`Error::TooLarge`] from stage [`MAX_STAGES`] and micro-batch [`MAX_CELLS`] on.
    pub fn new(kind: Kind, stage: usize, microbatch: Option<usize>) -> Result<Self> {
        let narrow = u16::try_from(stage).map_err(|_| Error::TooLarge {
            what: "the stage of an action",
            value: stage as u128,
            limit: MAX_STAGES - 1,
        })?;
        let microbatch = match microbatch {
            Some(_) if !kind.per_microbatch() => return Err(Error::MicrobatchUnexpected(kind)),
            None if kind.per_microbatch() => return Err(Error::MicrobatchMissing(kind)),
            None => WHOLE_STEP,
            Some(wide) => u32::try_from(wide).ok().filter(|_| wide < MAX_CELLS).ok_or(Error::TooLarge {
                what: "the micro-batch of an action",
                value: wide as u128,
                limit: MAX_CELLS - 1,
            })?,
        };
        Ok(Self { kind, stage: narrow, microbatch })
    }

    /// An action whose parts are known to be in range.
    pub(super) const fn known(kind: Kind, stage: u16, microbatch: u32) -> Self {
        Self { kind, stage, microbatch }
    }

    /// An action of the whole step.
    pub(super) const fn of_step(kind: Kind, stage: u16) -> Self {
        Self { kind, stage, microbatch: WHOLE_STEP }
    }

    /// What it does.
    pub const fn kind(self) -> Kind {
        self.kind
    }

    /// The stage that it concerns.
    pub const fn stage(self) -> usize {
        self.stage as usize
    }

    /// The micro-batch that it concerns, `None` if the whole step.
    pub const fn microbatch(self) -> Option<usize> {
        if self.kind.per_microbatch() { Some(self.microbatch as usize) } else { None }
    }

    /// The same for another kind that concerns one micro-batch, possibly of a neighbouring stage.
    pub(super) const fn with(self, kind: Kind, stage: u16) -> Self {
        Self { kind, stage, microbatch: self.microbatch }
    }

    pub(super) const fn narrow_stage(self) -> u16 {
        self.stage
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.kind)?;
        self.microbatch().map_or(Ok(()), |microbatch| write!(f, "{microbatch}"))
    }
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (stage, rest) = number(text, text)?;
        let kind_length = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (kind, digits) = rest.split_at(kind_length);
        let Some(kind) = Kind::ALL.iter().copied().find(|known| known.text() == kind) else {
            return Err(refused(text, text.len() - rest.len(), "expected a kind of action, such as F or B"));
        };
        let microbatch = match (kind.per_microbatch(), digits) {
            (false, "") => None,
            (false, _) => {
                return Err(refused(text, text.len() - digits.len(), "this kind takes no micro-batch"));
            }
            (true, _) => {
                let (microbatch, junk) = number(text, digits)?;
                if !junk.is_empty() {
                    return Err(refused(text, text.len() - junk.len(), "expected the end"));
                }
                Some(microbatch)
            }
        };
        Self::new(kind, stage, microbatch)
    }
}

/// The number that `rest`, the end of `text`, begins with, and what follows it.
fn number<'a>(text: &str, rest: &'a str) -> Result<(usize, &'a str)> {
    let start = text.len() - rest.len();
    let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(length);
    if digits.len() > 1 && digits.starts_with('0') {
        return Err(refused(text, start, "a number does not begin with a zero"));
    }
    // Ten digits hold every stage and micro-batch there can be.
    if digits.len() > 10 {
        return Err(refused(text, start, "the number is too large"));
    }
    digits.parse().map(|value| (value, after)).map_err(|_| refused(text, start, "expected a number"))
}

pub(super) fn refused(text: &str, bytes_before: usize, reason: &'static str) -> Error {
    const READABLE: usize = 40;
    let column = text.get(..bytes_before).map_or(1, |before| before.chars().count() + 1);
    Error::ActionText { text: text.chars().take(READABLE).collect(), column, reason }
}
