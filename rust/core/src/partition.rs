//! Which split of a sequence of layers into partitions is possible.
//!
//! 1. Every layer is in exactly one partition; partitions are contiguous, in order and not empty.
//! 2. Every partition has a device.
//! 3. A module or parameter that occurs several times occurs on one device only: inside a partition, or in partitions on
//!    the same device. Elsewhere it would have to be in two memories at once.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::error::{Error, Result};

/// A module or parameter inside a layer. What occurs twice has one identity and two paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The same number for the same object.
    pub identity: u64,
    /// Counted from 0.
    pub layer: usize,
    /// Its name as seen from the whole module, such as `2.linear.weight`.
    pub path: String,
}

/// Where a shared member occurs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// Its path there.
    pub path: String,
    /// The partition.
    pub partition: usize,
    /// The partition's device.
    pub device: String,
}

impl fmt::Display for Occurrence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' (partition {} on {})", self.path, self.partition, self.device)
    }
}

/// Whether a member is a module or a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberKind {
    /// A module.
    Module,
    /// A parameter.
    Parameter,
}

impl fmt::Display for MemberKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Module => "module",
            Self::Parameter => "parameter",
        })
    }
}

/// One reason why a split is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Nobody said where to cut.
    #[error(
        "no balance was given for {layers} layers; torchrelay.balance.balance_by_time and balance_by_size find one, \
         or give the number of layers of each partition, for example {example:?}"
    )]
    NoBalance {
        /// How many layers there are.
        layers: usize,
        /// An even split.
        example: Vec<usize>,
    },
    /// A partition without layers.
    #[error("the balance at position {position} is {value}; every partition needs at least 1 layer")]
    NotPositive {
        /// Where in the balance.
        position: usize,
        /// What was given.
        value: i64,
    },
    /// A balance for another number of layers.
    #[error(
        "the balance is for {sum} layers, but the module has {layers}{}; for example {example:?} would fit",
        left_out.as_ref().map_or_else(String::new, |name| format!(" (from '{name}' on they would be left out)"))
    )]
    WrongSum {
        /// The sum of the balance; the nearest 64-bit number where it does not fit.
        sum: i64,
        /// How many layers there are.
        layers: usize,
        /// The first layer that would be in no partition, if the balance is for too few.
        left_out: Option<String>,
        /// An even split over as many partitions as there can be.
        example: Vec<usize>,
    },
    /// Partitions without a device.
    #[error(
        "the balance has {partitions} partitions, each of which needs a device, but the number of devices is {devices}; \
         name a device several times to put several partitions on it, or use fewer partitions"
    )]
    TooFewDevices {
        /// How many devices were given.
        devices: usize,
        /// How many partitions there are.
        partitions: usize,
    },
    /// A module or parameter in two memories at once.
    #[error(
        "the {kind} {first} is also {second}, but cannot be on two devices; put these partitions on one device, choose \
         a balance that has both in one partition, or give each its own {kind}"
    )]
    Shared {
        /// Which of the two.
        kind: MemberKind,
        /// Where it occurs first.
        first: Occurrence,
        /// Where it occurs on another device.
        second: Occurrence,
    },
}

/// The layers of each partition as a pair of first and one past the last.
///
/// `layers` are the names of the layers in order, `balance` the number of layers of each partition, and `devices` the
/// device of each (extra ones are not used).
/// `modules` and `parameters` are all that occur in the layers, each with every path it has.
///
/// ```
/// let devices = ["cpu".to_owned(), "cpu".to_owned()];
/// let layers = ["conv".to_owned(), "relu".to_owned(), "fc".to_owned()];
/// let partitions = torchrelay_core::verify_partition(&layers, Some(&[2, 1]), &devices, &[], &[])?;
/// assert_eq!(partitions, [(0, 2), (2, 3)]);
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::Partition`] with every problem that can be told.
pub fn verify_partition(
    layers: &[String],
    balance: Option<&[i64]>,
    devices: &[String],
    modules: &[Member],
    parameters: &[Member],
) -> Result<Vec<(usize, usize)>> {
    let Some(balance) = balance else {
        let (layers, example) = (layers.len(), even_split(layers.len(), devices.len().max(2)));
        return Err(Error::Partition { problems: vec![Problem::NoBalance { layers, example }] });
    };
    let mut problems = balance_problems(layers, balance);
    let bounds = if problems.is_empty() { bounds(balance) } else { Vec::new() };
    if devices.len() < balance.len() {
        problems.push(Problem::TooFewDevices { devices: devices.len(), partitions: balance.len() });
    }
    let mut shared_modules = HashSet::new();
    for (kind, members) in [(MemberKind::Module, modules), (MemberKind::Parameter, parameters)] {
        shared_across_devices(kind, members, &bounds, devices, &mut shared_modules, &mut problems);
    }
    if problems.is_empty() { Ok(bounds) } else { Err(Error::Partition { problems }) }
}

fn balance_problems(layers: &[String], balance: &[i64]) -> Vec<Problem> {
    let not_positive = balance.iter().enumerate().filter(|(_, value)| **value < 1);
    let mut problems: Vec<_> =
        not_positive.map(|(position, &value)| Problem::NotPositive { position, value }).collect();
    let sum = balance.iter().fold(0i64, |sum, &value| sum.saturating_add(value));
    if usize::try_from(sum) != Ok(layers.len()) {
        let left_out = layers.get(usize::try_from(sum).unwrap_or_default()).cloned();
        let (layers, example) = (layers.len(), even_split(layers.len(), balance.len().max(1)));
        problems.push(Problem::WrongSum { sum, layers, left_out, example });
    }
    problems
}

/// As even as can be, the longer ones first, no partition empty.
fn even_split(layers: usize, partitions: usize) -> Vec<usize> {
    let partitions = partitions.min(layers);
    (0..partitions).map(|j| layers / partitions + usize::from(j < layers % partitions)).collect()
}

fn bounds(balance: &[i64]) -> Vec<(usize, usize)> {
    let mut start = 0;
    let next = |&layers: &i64| {
        let stop = start + usize::try_from(layers).unwrap_or_default();
        (std::mem::replace(&mut start, stop), stop)
    };
    balance.iter().map(next).collect()
}

/// Adds a problem per member that is on two devices, unless it is so only as a part of a module that is.
fn shared_across_devices(
    kind: MemberKind,
    members: &[Member],
    bounds: &[(usize, usize)],
    devices: &[String],
    shared_modules: &mut HashSet<(String, String)>,
    problems: &mut Vec<Problem>,
) {
    let occurrence = |member: &Member| {
        let partition = bounds.partition_point(|&(_, stop)| stop <= member.layer);
        bounds.get(partition)?;
        let device = devices.get(partition)?.clone();
        Some(Occurrence { path: member.path.clone(), partition, device })
    };
    let mut firsts: HashMap<u64, &Member> = HashMap::new();
    let mut reported = HashSet::new();
    for member in members {
        let first = *firsts.entry(member.identity).or_insert(member);
        // Most members occur once, and then nothing needs to be looked up.
        if first.path == member.path && first.layer == member.layer {
            continue;
        }
        let (Some(first), Some(second)) = (occurrence(first), occurrence(member)) else { continue };
        if first.device == second.device || !reported.insert((member.identity, second.device.clone())) {
            continue;
        }
        if inside_shared(&first.path, &second.path, shared_modules) {
            continue;
        }
        if kind == MemberKind::Module {
            // Either may come first among the parameters.
            shared_modules.insert((first.path.clone(), second.path.clone()));
            shared_modules.insert((second.path.clone(), first.path.clone()));
        }
        problems.push(Problem::Shared { kind, first, second });
    }
}

/// Whether two paths are the same continuation of two paths of one shared module.
fn inside_shared(first: &str, second: &str, shared: &HashSet<(String, String)>) -> bool {
    let ends = first.rmatch_indices('.').map(|(dot, _)| first.split_at(dot));
    let mut pairs = ends.filter_map(|(owner, rest)| Some((owner, second.strip_suffix(rest)?)));
    pairs.any(|(owner, other)| shared.contains(&(owner.to_owned(), other.to_owned())))
}
