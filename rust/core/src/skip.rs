//! Skip connections: which partition hands what to which, beside the value that flows from each to the next.
//!
//! 1. A skip is stashed by one module and popped by one other, which comes later.
//! 2. So its source partition is never behind its target: whoever carries out a schedule in which each partition waits
//!    for the one before needs no further wait for a skip, neither forward nor, the other way round, backward.
//! 3. Skips are listed in the order in which they are stashed.

use std::fmt;

use crate::error::{Error, Result};

/// What a module does with a skip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipRole {
    /// Puts it aside.
    Stash,
    /// Takes it back.
    Pop,
}

/// That a module stashes or pops a skip.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkipUse {
    /// An index into the names of the skips.
    pub skip: usize,
    /// Which of the two.
    pub role: SkipRole,
    /// The layer that the module is, or is in; counted from 0.
    pub layer: usize,
    /// When it runs. What has equal numbers runs in an order that is not known: inside a module of the user's.
    pub order: usize,
    /// The module's name as seen from the whole, such as `2.down`.
    pub path: String,
}

/// A skip, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skip {
    /// An index into the names of the skips.
    pub skip: usize,
    /// The module that stashes it.
    pub stash: String,
    /// The module that pops it.
    pub pop: String,
    /// The partition that holds the one.
    pub source: usize,
    /// The partition that holds the other.
    pub target: usize,
}

/// One reason why skips do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SkipProblem {
    /// Nobody takes it back.
    #[error("skip {name} is stashed by '{stash}', but never popped")]
    NeverPopped {
        /// The skip.
        name: String,
        /// Who stashes it.
        stash: String,
    },
    /// Nobody puts it aside.
    #[error("skip {name} is popped by '{pop}', but never stashed")]
    NeverStashed {
        /// The skip.
        name: String,
        /// Who pops it.
        pop: String,
    },
    /// It is not there yet.
    #[error("skip {name} is popped by '{pop}' before it is stashed by '{stash}'")]
    PoppedFirst {
        /// The skip.
        name: String,
        /// Who pops it.
        pop: String,
        /// Who stashes it.
        stash: String,
    },
    /// Two values under one name.
    #[error("skip {name} is stashed by {}; isolate them in namespaces", Paths(paths))]
    StashedOften {
        /// The skip.
        name: String,
        /// Who stashes it, at least two.
        paths: Vec<String>,
    },
    /// One value for two.
    #[error("skip {name} is popped by {}; isolate them in namespaces", Paths(paths))]
    PoppedOften {
        /// The skip.
        name: String,
        /// Who pops it, at least two.
        paths: Vec<String>,
    },
    /// A module that hands something to itself.
    #[error("skip {name} is both stashed and popped by '{path}', which needs no skip for it")]
    Both {
        /// The skip.
        name: String,
        /// The module.
        path: String,
    },
}

struct Paths<'a>(&'a [String]);

impl fmt::Display for Paths<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, path) in self.0.iter().enumerate() {
            let between = match place {
                0 => "",
                _ if place + 1 == self.0.len() => " and ",
                _ => ", ",
            };
            write!(f, "{between}'{path}'")?;
        }
        Ok(())
    }
}

/// Where each skip goes.
///
/// `names` are the skips' names as an error shows them, `uses` all stashes and pops, and `partitions` the first layer
/// and one past the last of each partition, as `verify_partition` gives them.
///
/// ```
/// use torchrelay_core::{SkipRole, SkipUse, verify_skips};
///
/// let at = |role, layer: usize| SkipUse { skip: 0, role, layer, order: layer, path: layer.to_string() };
/// let uses = [at(SkipRole::Stash, 0), at(SkipRole::Pop, 3)];
/// let skips = verify_skips(&["'residual'".to_owned()], &uses, &[(0, 2), (2, 4)])?;
/// assert_eq!((skips[0].source, skips[0].target), (0, 1));
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::Skips`] with every problem; [`Error::IndexOutOfRange`] for a use of a skip that has no name, or in a layer
/// that is in no partition.
pub fn verify_skips(names: &[String], uses: &[SkipUse], partitions: &[(usize, usize)]) -> Result<Vec<Skip>> {
    let layers = partitions.last().map_or(0, |&(_, stop)| stop);
    let mut by_skip: Vec<[Vec<&SkipUse>; 2]> = names.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    for (position, each) in uses.iter().enumerate() {
        let count = names.len();
        let Some([stashes, pops]) = by_skip.get_mut(each.skip) else {
            return Err(Error::NoSuchPlace { what: "skip", position, index: each.skip, count });
        };
        if each.layer >= layers {
            return Err(Error::NoSuchPlace { what: "layer", position, index: each.layer, count: layers });
        }
        if each.role == SkipRole::Stash { stashes.push(each) } else { pops.push(each) }
    }
    let (mut skips, mut problems) = (Vec::new(), Vec::new());
    for (skip, (name, [stashes, pops])) in names.iter().zip(&by_skip).enumerate() {
        match pair(name, stashes, pops) {
            Ok(None) => {}
            Ok(Some((stash, pop))) => skips.push((
                stash.order,
                Skip {
                    skip,
                    stash: stash.path.clone(),
                    pop: pop.path.clone(),
                    source: partition_of(stash.layer, partitions),
                    target: partition_of(pop.layer, partitions),
                },
            )),
            Err(found) => problems.extend(found),
        }
    }
    if !problems.is_empty() {
        return Err(Error::Skips { problems });
    }
    skips.sort_by_key(|&(order, _)| order); // invariant 3; stable, so that names decide between equals
    Ok(skips.into_iter().map(|(_, skip)| skip).collect())
}

fn partition_of(layer: usize, partitions: &[(usize, usize)]) -> usize {
    partitions.partition_point(|&(_, stop)| stop <= layer)
}

type Pair<'a> = Option<(&'a SkipUse, &'a SkipUse)>;

/// The one stash and the one pop of a skip, nothing if it has neither, or what is wrong with them.
fn pair<'a>(
    name: &str,
    stashes: &[&'a SkipUse],
    pops: &[&'a SkipUse],
) -> std::result::Result<Pair<'a>, Vec<SkipProblem>> {
    let name = || name.to_owned();
    match (stashes, pops) {
        ([], []) => return Ok(None),
        ([stash], [pop]) if stash.path == pop.path => {
            return Err(vec![SkipProblem::Both { name: name(), path: stash.path.clone() }]);
        }
        ([stash], [pop]) if stash.order > pop.order => {
            let (pop, stash) = (pop.path.clone(), stash.path.clone());
            return Err(vec![SkipProblem::PoppedFirst { name: name(), pop, stash }]);
        }
        ([stash], [pop]) => return Ok(Some((stash, pop))),
        _ => {}
    }
    let mut problems = Vec::new();
    if stashes.len() > 1 {
        problems.push(SkipProblem::StashedOften { name: name(), paths: paths(stashes) });
    }
    if pops.len() > 1 {
        problems.push(SkipProblem::PoppedOften { name: name(), paths: paths(pops) });
    }
    let first = stashes.iter().min_by_key(|stash| stash.order);
    for pop in pops {
        if let Some(stash) = first.filter(|stash| stash.order > pop.order && stash.path != pop.path) {
            let (pop, stash) = (pop.path.clone(), stash.path.clone());
            problems.push(SkipProblem::PoppedFirst { name: name(), pop, stash });
        }
    }
    if pops.is_empty() {
        problems.extend(
            stashes.iter().map(|stash| SkipProblem::NeverPopped { name: name(), stash: stash.path.clone() }),
        );
    }
    if stashes.is_empty() {
        problems
            .extend(pops.iter().map(|pop| SkipProblem::NeverStashed { name: name(), pop: pop.path.clone() }));
    }
    Err(problems)
}

fn paths(uses: &[&SkipUse]) -> Vec<String> {
    uses.iter().map(|each| each.path.clone()).collect()
}
