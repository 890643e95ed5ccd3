//! Which cuts the most even divisions have, found by putting a price on each part.
//!
//! The least unevenness `f(k)` of `k` parts falls ever less with `k`, since squares of sums have the quadrangle
//! inequality. So there is a price at which no number of parts is better than the one that is asked for, and with it the
//! most even divisions are shortest paths, whatever the number of their parts: a walk over the layers, not over layers
//! times parts. All of them together leave few places for each cut, mostly one.

use super::even::Weights;

/// A price is searched for that many walks.
const WALKS: usize = 48;

/// With a price that is halved the number of parts grows, at least and at most, as its root of so high an order.
const POWERS: (f64, f64) = (0.5, 60.0);

/// A division into some number of parts that is the most even of those.
#[derive(Clone, Copy)]
struct Point {
    price: u128,
    parts: usize,
    unevenness: u128,
}

/// The smallest part of each window that holds all places that cut `k` has in a most even division; None where that
/// takes too long to find out.
pub(super) fn narrow(
    weights: &Weights,
    reach: &[usize],
    windows: &[(usize, usize)],
) -> Option<Vec<(usize, usize)>> {
    let (layers, parts) = (reach.len().checked_sub(1)?, windows.len());
    let there = Line { weights, reach };
    let (price, fewest) = search(&there, layers, parts)?;
    let most = there.walk(price, -1);
    let (backwards, reach_back) = (weights.reversed(), reversed(reach));
    let back = Line { weights: &backwards, reach: &reach_back };
    let (fewest_back, most_back) = (back.walk(price, 1), back.walk(price, -1));
    let whole = fewest.last()?.cost;

    let mut narrowed = vec![(usize::MAX, 0); parts];
    let before = fewest.iter().zip(&most);
    let after = fewest_back.iter().zip(&most_back).rev();
    for (place, ((fewest, most), (fewest_after, most_after))) in before.zip(after).enumerate() {
        if fewest.cost.checked_add(fewest_after.cost) != Some(whole) {
            continue;
        }
        // Between as few and as many parts as can be, every number can.
        let first = fewest.parts().max(parts.saturating_sub(most_after.parts())).max(1);
        let last = most.parts().min(parts.saturating_sub(fewest_after.parts()));
        for window in narrowed.get_mut(first - 1..last).unwrap_or_default() {
            *window = (window.0.min(place), window.1.max(place));
        }
    }
    let within = |(window, narrow): (&(usize, usize), &(usize, usize))| {
        window.0 <= narrow.0 && narrow.0 <= narrow.1 && narrow.1 <= window.1
    };
    windows.iter().zip(&narrowed).all(within).then_some(narrowed)
}

/// A price at which a division into `parts` is a shortest path, and the walk with the fewest parts at it.
fn search(line: &Line<'_>, layers: usize, parts: usize) -> Option<(u128, Vec<Stop>)> {
    // Between one with fewer parts and one with more; each layer by itself is the most even of all.
    let (mut fewer, mut more) = (None::<Point>, Point { price: 0, parts: layers, unevenness: line.singly() });
    let mut price = line.weights.weight(0, layers) / (parts as u128).pow(2);
    let (mut last, mut stands_still) = (more, false);
    for walk in 0..WALKS {
        let stops = line.walk(price, 1);
        let end = stops.last()?;
        // Sums that large were perhaps cut off.
        let unevenness = end.cost.checked_sub(price.checked_mul(end.parts() as u128)?)?;
        if end.cost >= u128::MAX / 4 {
            return None;
        }
        let found = Point { price, parts: end.parts(), unevenness };
        let level = |point: &Point| {
            price.checked_mul(point.parts as u128).and_then(|paid| paid.checked_add(point.unevenness))
        };
        // Where both sides are shortest paths as well, so are all numbers of parts between them.
        let on_both =
            fewer.is_some_and(|fewer| level(&fewer) == Some(end.cost)) && level(&more) == Some(end.cost);
        if found.parts == parts || on_both {
            return Some((price, stops));
        }
        if found.parts < parts {
            stands_still = fewer.is_some_and(|fewer| fewer.parts == found.parts);
            fewer = Some(found);
        } else {
            more = found;
        }
        let slope = |fewer: &Point| {
            // Between the two: no walk at this price ends outside them, nor at one of them alone.
            let gain = fewer.unevenness.checked_sub(more.unevenness)?;
            Some(gain / (more.parts - fewer.parts).max(1) as u128)
        };
        price = match &fewer {
            None => guess(&last, &found, parts),
            Some(fewer) if walk % 3 == 2 || stands_still => slope(fewer)?,
            Some(fewer) => {
                let other = if more.price > 0 { more } else { last };
                let guess = guess(fewer, &other, parts);
                if more.price < guess && guess < fewer.price { guess } else { slope(fewer)? }
            }
        };
        last = found;
    }
    None
}

/// The price for `parts`, as if the number of parts were a power of the price: close in a few walks, if perhaps never
/// there.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // it is a guess
fn guess(one: &Point, other: &Point, parts: usize) -> u128 {
    let times = |from: usize, to: usize| (to as f64 / from as f64).ln();
    let power = (other.price as f64 / one.price as f64).ln() / times(one.parts, other.parts);
    let power = if power.is_finite() { power.clamp(-POWERS.1, -POWERS.0) } else { -2.0 };
    let nearest = if times(one.parts, parts).abs() < times(other.parts, parts).abs() { one } else { other };
    let price = nearest.price as f64 * (power * times(nearest.parts, parts)).exp();
    (price as u128).max(1)
}

/// The furthest ends for the layers from the last to the first.
fn reversed(reach: &[usize]) -> Vec<usize> {
    let layers = reach.len().saturating_sub(1);
    let mut begin = layers;
    (0..=layers)
        .rev()
        .map(|end| {
            while begin > 0 && reach.get(begin - 1).is_some_and(|&furthest| furthest >= end) {
                begin -= 1;
            }
            begin = begin.min(end);
            layers - begin
        })
        .collect()
}

/// How a shortest path comes to a place: what it costs, and its number of parts, of which as few or as many as can be.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Stop {
    cost: u128,
    signed_parts: i64,
}

impl Stop {
    fn parts(&self) -> usize {
        usize::try_from(self.signed_parts.unsigned_abs()).unwrap_or(usize::MAX)
    }
}

/// A beginning, which is the best one for the ends from `since` on, until the next one is.
#[derive(Clone, Copy)]
struct Begin {
    place: usize,
    since: usize,
}

struct Line<'a> {
    weights: &'a Weights,
    reach: &'a [usize],
}

impl Line<'_> {
    fn singly(&self) -> u128 {
        (1..self.reach.len()).map(|end| self.weights.weight(end - 1, end)).sum()
    }

    /// The shortest path to each place; of those, one of the fewest parts if `sign` is 1, of the most if it is -1.
    fn walk(&self, price: u128, sign: i64) -> Vec<Stop> {
        let layers = self.reach.len() - 1;
        let mut stops = vec![Stop::default()];
        // A later beginning, once it is better, stays better: the quadrangle inequality again. So the beginnings that
        // are of use are a queue, each with the end from which on it is the best.
        let mut queue: Vec<Begin> = Vec::with_capacity(layers);
        let (mut front, mut near) = (0, 0);
        for end in 1..=layers {
            let new = end - 1;
            let mut since = end;
            while let Some(last) = queue.get(front..).and_then(<[Begin]>::last).copied() {
                if self.is_better(&stops, new, last.place, last.since.max(end)) {
                    queue.pop();
                    continue;
                }
                near = self.first_better(&stops, new, last.place, last.since.max(end), near + 1);
                since = near;
                break;
            }
            if since <= layers {
                queue.push(Begin { place: new, since });
            }
            while queue.get(front + 1).is_some_and(|next| next.since <= end) {
                front += 1;
            }
            let place = queue.get(front).map_or(new, |begin| begin.place);
            let mut stop = self.stop(&stops, place, end);
            stop.cost = stop.cost.saturating_add(price);
            stop.signed_parts += sign;
            stops.push(stop);
        }
        stops
    }

    /// What it costs to come from `begin` to `end`, without the price of that part.
    fn stop(&self, stops: &[Stop], begin: usize, end: usize) -> Stop {
        let before = stops.get(begin).copied().unwrap_or_default();
        Stop { cost: before.cost.saturating_add(self.weights.weight(begin, end)), ..before }
    }

    fn is_better(&self, stops: &[Stop], new: usize, old: usize, end: usize) -> bool {
        self.reach.get(old).is_none_or(|&furthest| furthest < end)
            || self.stop(stops, new, end) < self.stop(stops, old, end)
    }

    /// The first end after `not` for which the beginning `new` is better than `old`; one behind the last if there is none.
    /// It is looked for around `near`.
    fn first_better(&self, stops: &[Stop], new: usize, old: usize, not: usize, near: usize) -> usize {
        let (mut not, mut better) = (not, self.reach.get(old).map_or(not, |&furthest| furthest) + 1);
        let (mut next, mut step) = (near, 1);
        while not + 1 < better {
            // In steps that grow until it is passed, then by halves.
            if next <= not || next >= better {
                next = not.midpoint(better);
            }
            if self.is_better(stops, new, old, next) {
                better = next;
                next = next.saturating_sub(step);
            } else {
                not = next;
                next += step;
            }
            step *= 2;
        }
        better
    }
}
