//! Buckets in the order in which gradients arrive, and the check of buckets that come from elsewhere.
//!
//! ```text
//! arrival          4 3 1 2 0          each rank's positions; the latest counts: a message waits for every rank
//! formed in        0 2 1 3 4          the last to arrive first, so that the small first limit is the last bucket's
//! buckets          [0] [2 1] [3 4]
//! reduced in       [3 4] [2 1] [0]    each when its last gradient is there
//! ```
//!
//! 1. What comes out is a pure function of the arguments: equal on every rank that passes the same.
//! 2. The invariants 1 to 5 of the assignment by size hold.
//! 3. Buckets are in the order in which their last gradient arrives.
//! 4. Gradients that arrived on no rank count as the last ones, in the reverse order of definition.

use std::cmp::Reverse;
use std::hash::Hash;

use super::assign::{Buckets, assign_buckets};
use crate::error::{Error, Result};

/// The order of arrival on which ranks agree, from each parameter's latest position on any rank; negative is never.
pub fn agreed_order(latest: &[i64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..latest.len()).collect();
    order.sort_by_key(|&index| {
        let position = latest.get(index).copied().unwrap_or(-1);
        (position < 0, position, Reverse(index))
    });
    order
}

/// Buckets for parameters whose gradients arrive in this order, a permutation; the other arguments are those of
/// [`assign_buckets`], `sizes` and `keys` by parameter.
///
/// ```
/// let buckets = torchrelay_core::buckets_by_arrival(&[40; 5], &["f32"; 5], &[40, 80], None, &[4, 3, 1, 2, 0])?;
/// assert_eq!(buckets.indices, [vec![3, 4], vec![2, 1], vec![0]]);
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// # Errors
/// As [`assign_buckets`]; [`Error::LengthsDiffer`], [`Error::IndexOutOfRange`] and [`Error::DuplicateIndex`] are about
/// the order of arrival.
pub fn buckets_by_arrival<K: Eq + Hash + Clone>(
    sizes: &[i64],
    keys: &[K],
    limits: &[i64],
    sparse: Option<&[bool]>,
    arrival: &[i64],
) -> Result<Buckets> {
    if arrival.len() != sizes.len() {
        let (length, expected) = (arrival.len(), sizes.len());
        return Err(Error::LengthsDiffer { what: "the order of arrival", length, expected });
    }
    let formed: Vec<i64> = arrival.iter().rev().copied().collect();
    let count = sizes.len();
    let mut ordered_sizes = Vec::with_capacity(count);
    let mut ordered_keys = Vec::with_capacity(count);
    for (position, &index) in formed.iter().enumerate() {
        let out_of_range = || Error::IndexOutOfRange { position: count - 1 - position, index, count };
        let place = usize::try_from(index).map_err(|_| out_of_range())?;
        ordered_sizes.push(*sizes.get(place).ok_or_else(out_of_range)?);
        ordered_keys.push(keys.get(place).ok_or_else(out_of_range)?.clone());
    }
    let found = assign_buckets(&ordered_sizes, &ordered_keys, limits, sparse, Some(&formed))?;

    let mut position = vec![0; count];
    for (place, &index) in arrival.iter().enumerate() {
        if let Some(slot) = usize::try_from(index).ok().and_then(|index| position.get_mut(index)) {
            *slot = place;
        }
    }
    let ready = |members: &[usize]| members.iter().filter_map(|&member| position.get(member)).max().copied();
    let mut pairs: Vec<_> = found.indices.into_iter().zip(found.limits).collect();
    pairs.sort_by_key(|(members, _)| ready(members));
    let (indices, limits) = pairs.into_iter().unzip();
    Ok(Buckets { indices, limits })
}

/// Returns if the buckets can be carried out for parameters with these keys: every parameter in one bucket, a bucket
/// of one key and not empty, a parameter with a sparse gradient alone.
///
/// # Errors
/// [`Error::NotAPartition`], [`Error::EmptyBucket`], [`Error::MixedBucket`] and [`Error::SparseNotAlone`].
pub fn verify_buckets<K: Eq>(keys: &[K], sparse: &[bool], buckets: &[Vec<usize>]) -> Result<()> {
    let mut seen = vec![false; keys.len()];
    for (bucket, members) in buckets.iter().enumerate() {
        let &first = members.first().ok_or(Error::EmptyBucket { bucket })?;
        for &member in members {
            match seen.get_mut(member) {
                Some(seen @ false) => *seen = true,
                _ => return Err(Error::NotAPartition { what: "buckets", index: member }),
            }
            if keys.get(member) != keys.get(first) {
                return Err(Error::MixedBucket { bucket, first, other: member });
            }
            if members.len() > 1 && sparse.get(member).is_some_and(|&sparse| sparse) {
                return Err(Error::SparseNotAlone { bucket, index: member });
            }
        }
    }
    match seen.iter().position(|&seen| !seen) {
        Some(index) => Err(Error::NotAPartition { what: "buckets", index }),
        None => Ok(()),
    }
}
