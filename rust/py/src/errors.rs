//! The one way from the core's errors to Python's.

use pyo3::prelude::*;
use torchrelay_core::{Error, Problem, Schedule};

pyo3::import_exception!(torchrelay.errors, PartitionError);
pyo3::import_exception!(torchrelay.errors, PartitionIndexError);
pyo3::import_exception!(torchrelay.errors, PlanError);
pyo3::import_exception!(torchrelay.errors, ScheduleError);
pyo3::import_exception!(torchrelay.errors, SkipError);
pyo3::import_exception!(torchrelay.errors, StreamError);

/// The Python exception for an error of the core.
#[allow(clippy::needless_pass_by_value)] // so that it fits `map_err`
pub fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NotPositive { .. }
        | Error::TooLarge { .. }
        | Error::UnknownSchedule { .. }
        | Error::NotPermitted { .. }
        | Error::OutOfRange { .. }
        | Error::NoLimits
        | Error::NegativeLimit { .. }
        | Error::NegativeSize { .. }
        | Error::LengthsDiffer { .. }
        | Error::IndexOutOfRange { .. }
        | Error::NoSuchPlace { .. }
        | Error::DuplicateIndex { .. }
        | Error::NotAPartition { .. }
        | Error::EmptyBucket { .. }
        | Error::MixedBucket { .. }
        | Error::SparseNotAlone { .. }
        | Error::SumOverflow { .. }
        | Error::BadCost { .. }
        | Error::NoSchedule
        | Error::DurationsDiffer { .. }
        | Error::BadMemory { .. }
        | Error::BadLimit { .. }
        | Error::CostsOverflow
        | Error::CostsDiffer { .. }
        | Error::TooManyParts { .. }
        | Error::BadLayerCost { .. }
        | Error::UnknownOption { .. }
        | Error::ActionText { .. }
        | Error::MicrobatchMissing(_)
        | Error::MicrobatchUnexpected(_)
        | Error::NoSuchRank { .. }
        | Error::DevicesDiffer { .. }
        | Error::SkipNotForward { .. }
        | Error::SplitBackward { .. }
        | Error::BadOverlap { .. }
        | Error::Lowered { .. }
        | Error::PairSharded { .. }
        | Error::LimitsDiffer { .. }
        | Error::Text { .. } => PlanError::new_err(message),
        Error::NoSuchStage { .. }
        | Error::NoSuchMicrobatch { .. }
        | Error::Misplaced { .. }
        | Error::Repeated { .. }
        | Error::WholeAndSplit { .. }
        | Error::UnexpectedBackward { .. }
        | Error::NoPeer { .. }
        | Error::CopiedAndSent { .. }
        | Error::OverlapNeeds { .. }
        | Error::Sharded { .. }
        | Error::ShardedTwice { .. }
        | Error::Rendezvous { .. }
        | Error::MessageOrder { .. }
        | Error::OverMemory { .. }
        | Error::OutOfOrder { .. }
        | Error::Missing { .. }
        | Error::Deadlock { .. } => ScheduleError::new_err(message),
        Error::Hazard(_) => StreamError::new_err(message),
        Error::Partition { problems } => partition(message, &problems),
        Error::Skips { problems } => SkipError::new_err((message, lines(&problems))),
    }
}

/// The Python exception for a schedule that is refused, with a picture of the place.
pub fn refused(schedule: &Schedule, error: Error) -> PyErr {
    match schedule.picture_of(&error) {
        Some(picture) => ScheduleError::new_err((error.to_string(), picture)),
        None => to_py(error),
    }
}

/// The class takes the problems as its second argument, so that they are an attribute and survive pickling.
fn partition(message: String, problems: &[Problem]) -> PyErr {
    let lines = lines(problems);
    if let [Problem::TooFewDevices { .. }] = problems {
        PartitionIndexError::new_err((message, lines))
    } else {
        PartitionError::new_err((message, lines))
    }
}

fn lines<P: ToString>(problems: &[P]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}
