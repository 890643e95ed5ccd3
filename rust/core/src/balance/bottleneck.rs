//! The smallest largest cost, and how far a part that costs no more can reach.

use super::number::{Binary, Natural};

/// For each layer (and the end) the furthest end of a part that begins there, in a division whose largest cost is the
/// smallest possible; and the number of bits of the total.
pub(super) fn reach<const N: usize>(costs: &[Binary], parts: usize) -> (Vec<usize>, u32) {
    let (mut sums, mut total, mut largest) =
        (Vec::with_capacity(costs.len() + 1), Natural::<N>::ZERO, Natural::ZERO);
    sums.push(total);
    for &cost in costs {
        let cost = Natural::new(cost);
        total = total.plus(&cost);
        largest = largest.max(cost);
        sums.push(total);
    }
    let limit = smallest_limit(&sums, parts, largest, total);
    let mut end = 0;
    let mut reach = Vec::with_capacity(sums.len());
    for sum in &sums {
        let furthest = sum.plus(&limit);
        end += sums.iter().skip(end + 1).take_while(|&other| *other <= furthest).count();
        reach.push(end);
    }
    (reach, total.bits())
}

/// Halves the range from `least` to `most`, each time to a sum that occurs: the range never holds a number for nothing.
fn smallest_limit<const N: usize>(
    sums: &[Natural<N>],
    parts: usize,
    mut least: Natural<N>,
    mut most: Natural<N>,
) -> Natural<N> {
    while least < most {
        match divide(sums, parts, least.plus(&most.minus(&least).half())) {
            Ok(largest) => most = largest,
            Err(next) => least = next,
        }
    }
    most
}

/// Divide greedily: the largest cost if there are enough parts, otherwise the next limit that makes a difference.
fn divide<const N: usize>(
    sums: &[Natural<N>],
    parts: usize,
    limit: Natural<N>,
) -> Result<Natural<N>, Natural<N>> {
    let (mut largest, mut next) = (Natural::ZERO, None::<Natural<N>>);
    let mut left = sums;
    for _ in 0..parts {
        let Some(begin) = left.first() else { break };
        let furthest = begin.plus(&limit);
        let count = left.partition_point(|sum| *sum <= furthest);
        let Some((within, beyond)) = left.split_at_checked(count) else { break };
        if let Some(end) = within.last() {
            largest = largest.max(end.minus(begin));
        }
        let Some(following) = beyond.first() else { return Ok(largest) };
        let longer = following.minus(begin);
        next = Some(next.map_or(longer, |next| next.min(longer)));
        left = left.get(count - 1..).unwrap_or_default();
    }
    Err(next.unwrap_or(limit))
}
