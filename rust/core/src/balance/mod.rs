//! The best division of a sequence of layers into contiguous parts.
//!
//! ```text
//! costs of the layers     1   1   1   1  10      three parts
//!                         1 | 1   1   1 |10      largest cost 10, which nothing can change
//!                         1   1 | 1   1 |10      the same, and more even
//! ```
//!
//! 1. Every layer is in exactly one part; parts are contiguous, in order and not empty.
//! 2. No division has a smaller largest cost. Sums are exact, whatever the costs: nothing is rounded.
//! 3. Among those divisions it is one of the most even: the sum of the squares of the parts' costs is the smallest, then
//!    that of the squares of their numbers of layers (which decides where costs are zero). For this alone costs are
//!    rounded, to a unit of about the total / 2^63 * the number of layers, and not at all if they are multiples of it.
//! 4. What is left to choose is decided for the earlier parts, which have as many layers as they can.

mod bottleneck;
mod even;
mod number;
mod price;

pub use number::Cost;

use crate::error::{Error, Result};
use crate::limits::MAX_CELLS;
use even::Weights;
use number::{Binary, NARROW, WIDE};

/// How many places for cuts there must be, for each layer, that it pays to look for fewer.
const WIDE_WINDOWS: usize = 8;

/// The number of layers of each of `parts` parts.
///
/// ```
/// let costs = [1.0, 1.0, 1.0, 1.0, 10.0];
/// assert_eq!(torchrelay_core::balance(&costs, 3)?, [2, 2, 1]);
/// assert_eq!(torchrelay_core::balance(&[0u64, 0, 3, 0], 3)?, [2, 1, 1]);
/// # Ok::<(), torchrelay_core::Error>(())
/// ```
///
/// It takes a time of about layers + parts * log(layers) * the bits in a cost, for invariant 2, and for invariant 3 about
/// layers * log(layers), whatever the costs; only where sums of squares need more than 126 bits layers * parts.
///
/// # Errors
/// [`Error::NotPositive`] for no parts, [`Error::TooManyParts`] for more parts than layers, [`Error::BadLayerCost`] for
/// the first cost that is negative, infinite or not a number, [`Error::TooLarge`] where there would be more than
/// [`MAX_CELLS`] layers or places for cuts.
pub fn balance<C: Copy + Into<Cost>>(costs: &[C], parts: usize) -> Result<Vec<usize>> {
    let layers = costs.len();
    if parts == 0 {
        return Err(Error::NotPositive { what: "the number of parts", value: 0 });
    }
    if parts > layers {
        return Err(Error::TooManyParts { parts, layers });
    }
    if layers > MAX_CELLS {
        return Err(too_large("the number of layers", layers));
    }
    let costs = Binary::all(costs.iter().map(|&cost| cost.into()))?;
    let (reach, bits) = if costs.iter().all(|cost| cost.fits(NARROW, layers)) {
        bottleneck::reach::<NARROW>(&costs, parts)
    } else {
        bottleneck::reach::<WIDE>(&costs, parts)
    };
    let windows = windows(&reach, parts);
    let places = windows.iter().map(|&(first, last)| last - first + 1).sum();
    if places > MAX_CELLS {
        return Err(too_large("the number of places where the parts can be cut", places));
    }
    let weights = Weights::new(&costs, bits);
    let narrowed =
        if places > WIDE_WINDOWS * layers { price::narrow(&weights, &reach, &windows) } else { None };
    Ok(even::sizes(&weights, &reach, &narrowed.unwrap_or(windows)))
}

fn too_large(what: &'static str, value: usize) -> Error {
    Error::TooLarge { what, value: value as u128, limit: MAX_CELLS }
}

/// Where the end of each part can be, given the furthest end for each beginning: a first and a last place. Every place
/// in between is possible too, since a part can be cut further.
fn windows(reach: &[usize], parts: usize) -> Vec<(usize, usize)> {
    let layers = reach.len().saturating_sub(1);
    let furthest = |begin: usize| reach.get(begin).copied().unwrap_or(layers);
    let mut windows = Vec::with_capacity(parts);
    let mut last = 0;
    for part in 1..=parts {
        last = furthest(last).min(layers - (parts - part));
        windows.push((last, last));
    }
    let mut first = layers;
    for (part, window) in windows.iter_mut().enumerate().rev() {
        window.0 = first;
        // The first beginning from which a part can end there; part many layers must stay before it.
        first = reach.partition_point(|&end| end < first).max(part);
    }
    windows
}
