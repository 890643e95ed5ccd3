//! Assignment of tensors to buckets by size.
//!
//! ```text
//! tensors (key, bytes)   a:200  b:200  a:200  b:200  a:200  b:200        limits 200, 400
//! open bucket of a      [0]200 closed  [2]200       [2,4]400 closed
//! open bucket of b             [1]200 closed  [3]200       [3,5]400 closed
//! ```
//!
//! 1. Each index is in exactly one bucket.
//! 2. The tensors of a bucket have one key.
//! 3. A bucket that was closed reaches its limit, and had not without its last tensor. Tensors are never split.
//! 4. The first bucket of a key has the first limit, the next one the next, the last limit serving for all that follow.
//! 5. A tensor with a sparse gradient is alone, with limit 0; the open bucket of its key stays open.
//! 6. Without explicit indices the buckets are in the order of their smallest index; with them, closed and sparse
//!    buckets come in the order they were closed in, then what is left over in the order it was opened in.

use std::collections::HashMap;
use std::hash::Hash;

use crate::error::{Error, Result};

/// The buckets of a list of tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Buckets {
    /// The indices of the tensors of each bucket.
    pub indices: Vec<Vec<usize>>,
    /// The limit in bytes that each bucket was filled to; 0 for a sparse one.
    pub limits: Vec<i64>,
}

/// The bucket of a key that still takes tensors.
#[derive(Default)]
struct Open {
    indices: Vec<usize>,
    bytes: i64,
    /// Which of the limits counts now.
    cursor: usize,
    /// The position of the first tensor, meaningful while there is one.
    opened: usize,
}

/// The keys that have been met, numbered in that order.
struct Numbers<'a, K> {
    first: Vec<&'a K>,
    all: HashMap<&'a K, usize>,
}

impl<'a, K: Eq + Hash> Numbers<'a, K> {
    /// Models have a few keys, and comparing with a few is faster than hashing.
    const COMPARED: usize = 8;

    fn number(&mut self, key: &'a K) -> usize {
        if let Some(number) = self.first.iter().position(|&known| known == key) {
            return number;
        }
        let next = self.all.len();
        let number = *self.all.entry(key).or_insert(next);
        if number == next && number < Self::COMPARED {
            self.first.push(key);
        }
        number
    }
}

impl Buckets {
    fn push(&mut self, indices: Vec<usize>, limit: i64) {
        self.indices.push(indices);
        self.limits.push(limit);
    }

    /// Invariant 6, first half. Indices ascend inside a bucket here, so that the first is the smallest.
    fn sort(self) -> Self {
        let mut pairs: Vec<_> = self.indices.into_iter().zip(self.limits).collect();
        pairs.sort_unstable_by_key(|(indices, _)| indices.first().copied());
        let (indices, limits) = pairs.into_iter().unzip();
        Self { indices, limits }
    }
}

/// Assigns tensors to buckets: `sizes` in bytes and `keys` (what may not be mixed: dtype and device) per tensor,
/// `limits` in bytes, and optionally `indices`, the tensors' names in the result (a permutation; by default the
/// positions), and `sparse`, which tensors will have a sparse gradient, **by index**, not by position.
///
/// ```
/// let buckets = torchrelay_core::assign_buckets(&[40; 4], &["f32"; 4], &[40, 80], None, None)?;
/// assert_eq!(buckets.indices, [vec![0], vec![1, 2], vec![3]]);
/// assert_eq!(buckets.limits, [40, 80, 80]);
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoLimits`], [`Error::NegativeLimit`], [`Error::NegativeSize`], [`Error::LengthsDiffer`],
/// [`Error::IndexOutOfRange`], [`Error::DuplicateIndex`], and [`Error::SumOverflow`] if a bucket would hold more than
/// [`i64::MAX`] bytes.
pub fn assign_buckets<K: Eq + Hash>(
    sizes: &[i64],
    keys: &[K],
    limits: &[i64],
    sparse: Option<&[bool]>,
    indices: Option<&[i64]>,
) -> Result<Buckets> {
    let last_limit = check_limits(limits)?;
    check_lengths(sizes.len(), keys.len(), sparse, indices)?;
    let names = indices.map(|indices| checked_permutation(indices, sizes.len())).transpose()?;

    let mut closed = Buckets::default();
    let mut open: Vec<Open> = Vec::new();
    let mut numbers = Numbers { first: Vec::new(), all: HashMap::new() };
    for (position, (&size, key)) in sizes.iter().zip(keys).enumerate() {
        if size < 0 {
            return Err(Error::NegativeSize { position, value: size });
        }
        let index = names.as_ref().and_then(|names| names.get(position)).copied().unwrap_or(position);
        if sparse.and_then(|sparse| sparse.get(index)).is_some_and(|&sparse| sparse) {
            closed.push(vec![index], 0);
            continue;
        }
        let number = numbers.number(key);
        if number == open.len() {
            open.push(Open::default());
        }
        let Some(bucket) = open.get_mut(number) else { continue };
        if bucket.indices.is_empty() {
            bucket.opened = position;
        }
        bucket.indices.push(index);
        bucket.bytes = bucket.bytes.checked_add(size).ok_or(Error::SumOverflow { position })?;
        let limit = limits.get(bucket.cursor).copied().unwrap_or(last_limit);
        if bucket.bytes >= limit {
            // A copy has the exact size, and what the open one has grown to serves its successor.
            closed.push(bucket.indices.clone(), limit);
            bucket.indices.clear();
            bucket.bytes = 0;
            bucket.cursor = (bucket.cursor + 1).min(limits.len() - 1);
        }
    }

    open.retain(|bucket| !bucket.indices.is_empty());
    open.sort_unstable_by_key(|bucket| bucket.opened);
    for bucket in open {
        closed.push(bucket.indices, limits.get(bucket.cursor).copied().unwrap_or(last_limit));
    }
    Ok(if names.is_none() { closed.sort() } else { closed })
}

/// The last limit, once all of them are found to be right.
fn check_limits(limits: &[i64]) -> Result<i64> {
    if let Some((position, &value)) = limits.iter().enumerate().find(|(_, limit)| **limit < 0) {
        return Err(Error::NegativeLimit { position, value });
    }
    limits.last().copied().ok_or(Error::NoLimits)
}

fn check_lengths(
    expected: usize,
    keys: usize,
    sparse: Option<&[bool]>,
    indices: Option<&[i64]>,
) -> Result<()> {
    let given = [
        ("the list of keys", Some(keys)),
        ("the list of expected sparse gradients", sparse.map(<[_]>::len)),
        ("the list of tensor indices", indices.map(<[_]>::len)),
    ];
    match given.into_iter().find_map(|(what, length)| Some((what, length.filter(|&n| n != expected)?))) {
        Some((what, length)) => Err(Error::LengthsDiffer { what, length, expected }),
        None => Ok(()),
    }
}

/// The indices, each found to be in range and new.
fn checked_permutation(indices: &[i64], count: usize) -> Result<Vec<usize>> {
    let mut seen = vec![false; count];
    let mut names = Vec::with_capacity(count);
    for (position, &index) in indices.iter().enumerate() {
        let name = usize::try_from(index).unwrap_or(usize::MAX);
        match seen.get_mut(name) {
            None => return Err(Error::IndexOutOfRange { position, index, count }),
            Some(true) => {
                let first = names.iter().position(|&other| other == name).unwrap_or_default();
                return Err(Error::DuplicateIndex { position, first, index });
            }
            Some(new) => *new = true,
        }
        names.push(name);
    }
    Ok(names)
}
