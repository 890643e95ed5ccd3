//! The most even of the divisions that have the smallest largest cost: dynamic programming over the cuts.
//!
//! Let `G_k(i)` be the least unevenness of the layers from `i` on, divided into the parts after the first `k`. Then
//! `G_k(i)` is the minimum over `j` of `w(i, j) + G_k+1(j)`, where `w` is the weight of a part from `i` to `j`. Squares
//! of sums have the quadrangle inequality, so that the best `j` never falls when `i` rises: the best for the `i` in the
//! middle bounds those before and after it.

use super::number::Binary;

/// The unevenness that parts contribute: the square of the cost, and below it the square of the number of layers.
pub(super) struct Weights {
    /// Of the costs before each layer, in units.
    sums: Vec<u64>,
    /// By how many bits the squares of costs stand above those of numbers of layers.
    shift: u32,
}

impl Weights {
    /// For costs whose total has so many bits.
    pub fn new(costs: &[Binary], bits: u32) -> Self {
        let count_bits = usize::BITS - costs.len().leading_zeros();
        // So all squares of sums, moved up by the bits of squared counts, add up to less than 2^127.
        let unit = bits.saturating_sub(63 - count_bits);
        let mut total = 0;
        let following = costs.iter().map(|cost| {
            total += cost.rounded(unit);
            total
        });
        Self { sums: std::iter::once(0).chain(following).collect(), shift: 2 * count_bits }
    }

    fn sum(&self, place: usize) -> u64 {
        self.sums.get(place).copied().unwrap_or_default()
    }

    /// That of a part.
    pub fn weight(&self, begin: usize, end: usize) -> u128 {
        self.of(self.sum(end) - self.sum(begin), end - begin)
    }

    fn of(&self, cost: u64, layers: usize) -> u128 {
        let (cost, layers) = (u128::from(cost), layers as u128);
        ((cost * cost) << self.shift) + layers * layers
    }

    /// Of the same layers from the last to the first.
    pub fn reversed(&self) -> Self {
        let total = self.sums.last().copied().unwrap_or_default();
        Self { sums: self.sums.iter().rev().map(|sum| total - sum).collect(), shift: self.shift }
    }
}

/// The best end of a part that begins at a given place, and the unevenness from there on.
#[derive(Clone, Copy, Default)]
struct Cut {
    end: usize,
    unevenness: u128,
}

/// One part, for each place where it can begin; what follows it is known.
struct Part<'a> {
    weights: &'a Weights,
    reach: &'a [usize],
    /// The first end, and the unevenness after each.
    first_end: usize,
    after: &'a [u128],
}

impl Part<'_> {
    /// The cuts for beginnings from `first` on, whose ends are in `low..=high`.
    fn fill(&self, cuts: &mut [Cut], first: usize, low: usize, high: usize) {
        let middle = cuts.len() / 2;
        let (before, rest) = cuts.split_at_mut(middle);
        let Some((cut, after)) = rest.split_first_mut() else { return };
        *cut = self.best(first + middle, low, high);
        let end = cut.end;
        self.fill(before, first, low, end);
        self.fill(after, first + middle + 1, end, high);
    }

    fn best(&self, begin: usize, low: usize, high: usize) -> Cut {
        let furthest = self.reach.get(begin).copied().unwrap_or(high);
        let (low, high) = (low.max(begin + 1), high.min(furthest));
        let sums = self.weights.sums.get(low..=high).unwrap_or_default();
        let after = self.after.get(low - self.first_end..).unwrap_or_default();
        let start = self.weights.sum(begin);
        let mut best = Cut { end: low, unevenness: u128::MAX };
        for ((&sum, &after), end) in sums.iter().zip(after).zip(low..) {
            let unevenness = self.weights.of(sum - start, end - begin) + after;
            if unevenness <= best.unevenness {
                best = Cut { end, unevenness };
            }
        }
        best
    }
}

/// The number of layers of each part, of which part `k` ends in `windows[k]`.
pub(super) fn sizes(weights: &Weights, reach: &[usize], windows: &[(usize, usize)]) -> Vec<usize> {
    // Where each part can begin: where the one before it can end.
    let begins = || windows.iter().rev().skip(1).chain([&(0, 0)]);
    let mut ends = Vec::with_capacity(windows.len());
    let mut after = vec![0];
    for (&(low, high), &(first, last)) in windows.iter().rev().zip(begins()) {
        let mut cuts = vec![Cut::default(); last - first + 1];
        Part { weights, reach, first_end: low, after: &after }.fill(&mut cuts, first, low, high);
        after = cuts.iter().map(|cut| cut.unevenness).collect();
        ends.push(cuts.into_iter().map(|cut| cut.end).collect::<Vec<_>>());
    }
    let mut sizes = Vec::with_capacity(windows.len());
    let mut begin = 0;
    for (ends, first) in ends.iter().rev().zip([0].into_iter().chain(windows.iter().map(|&(first, _)| first)))
    {
        let end = ends.get(begin - first).copied().unwrap_or(begin);
        sizes.push(end - begin);
        begin = end;
    }
    sizes
}
