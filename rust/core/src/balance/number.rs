//! Costs as exact integers, whatever their magnitudes.

use crate::error::{Error, Result};

/// What a layer costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cost {
    /// Say in bytes.
    Whole(u64),
    /// Say in seconds; finite and not negative.
    Real(f64),
}

impl From<u64> for Cost {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<f64> for Cost {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

/// `mantissa * 2^exponent`, where the exponent is not negative, and 0 for the finest of the costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Binary {
    pub mantissa: u64,
    pub exponent: u32,
}

impl Binary {
    /// All the costs on one scale.
    pub fn all(costs: impl Iterator<Item = Cost>) -> Result<Vec<Self>> {
        let parsed = costs
            .enumerate()
            .map(|(position, cost)| match cost {
                Cost::Whole(value) => Ok(odd(value, 0)),
                Cost::Real(value) => float(value).ok_or(Error::BadLayerCost { position, value }),
            })
            .collect::<Result<Vec<_>>>()?;
        let finest = parsed.iter().filter(|(mantissa, _)| *mantissa > 0).map(|&(_, exponent)| exponent).min();
        let scaled = |(mantissa, exponent): (u64, i32)| Self {
            mantissa,
            exponent: finest.map_or(0, |finest| exponent.saturating_sub(finest).unsigned_abs()),
        };
        Ok(parsed
            .into_iter()
            .map(|pair| if pair.0 == 0 { scaled((0, finest.unwrap_or(0))) } else { scaled(pair) })
            .collect())
    }

    /// Whether twice a sum of so many costs like this fits in a [`Natural`] of so many limbs.
    pub fn fits(self, limbs: usize, count: usize) -> bool {
        let bits = u64::from(u64::BITS - self.mantissa.leading_zeros()) + u64::from(self.exponent);
        bits + u64::from(usize::BITS - count.leading_zeros()) < 64 * limbs as u64
    }

    /// The nearest multiple of `2^shift`, counted in those.
    pub fn rounded(self, shift: u32) -> u64 {
        match shift.checked_sub(self.exponent) {
            None | Some(0) => self.mantissa << (self.exponent - shift),
            Some(drop @ 1..=64) => {
                let halved = (u128::from(self.mantissa) + (1 << (drop - 1))) >> drop;
                u64::try_from(halved).unwrap_or(u64::MAX) // it fits: at least one bit was dropped
            }
            Some(_) => 0,
        }
    }
}

fn float(value: f64) -> Option<(u64, i32)> {
    const FRACTION: u32 = f64::MANTISSA_DIGITS - 1;
    const SCALE: i32 = f64::MAX_EXP - 1 + FRACTION.cast_signed();
    if !value.is_finite() || value < 0.0 {
        return None;
    }
    let bits = value.abs().to_bits(); // -0.0 is 0
    let (field, fraction) = ((bits >> FRACTION) as i32, bits & ((1 << FRACTION) - 1));
    // Numbers too small for the leading one are on the scale of the smallest that have it.
    let mantissa = if field == 0 { fraction } else { fraction | 1 << FRACTION };
    Some(odd(mantissa, field.max(1) - SCALE))
}

/// Without zeros at the end, so that what is coarse does not look fine.
fn odd(mantissa: u64, exponent: i32) -> (u64, i32) {
    let zeros = if mantissa == 0 { 0 } else { mantissa.trailing_zeros() };
    (mantissa >> zeros, exponent + zeros.cast_signed())
}

/// Limbs that are enough for costs as they are measured.
pub(super) const NARROW: usize = 2;
/// Limbs that are enough for all: from 2^-1074 to 2^1024 are 2098 bits, and 2^24 of those are summed.
pub(super) const WIDE: usize = 34;

/// A natural number of `64 * N` bits; the largest limb is first, so that numbers are ordered as arrays are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Natural<const N: usize>([u64; N]);

impl<const N: usize> Natural<N> {
    pub const ZERO: Self = Self([0; N]);

    pub fn new(cost: Binary) -> Self {
        let mut limbs = [0; N];
        let (limb, bit) = (cost.exponent / 64, cost.exponent % 64);
        let high = if bit == 0 { 0 } else { cost.mantissa >> (64 - bit) };
        for (limb, value) in limbs.iter_mut().rev().skip(limb as usize).zip([cost.mantissa << bit, high]) {
            *limb = value;
        }
        Self(limbs)
    }

    pub fn plus(mut self, other: &Self) -> Self {
        let mut carry = false;
        for (limb, &more) in self.0.iter_mut().zip(&other.0).rev() {
            let (sum, first) = limb.overflowing_add(more);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            (*limb, carry) = (sum, first | second);
        }
        self
    }

    /// The difference to a number that is not larger.
    pub fn minus(mut self, other: &Self) -> Self {
        let mut borrow = false;
        for (limb, &less) in self.0.iter_mut().zip(&other.0).rev() {
            let (rest, first) = limb.overflowing_sub(less);
            let (rest, second) = rest.overflowing_sub(u64::from(borrow));
            (*limb, borrow) = (rest, first | second);
        }
        self
    }

    /// Rounded down.
    pub fn half(mut self) -> Self {
        let mut above = 0;
        for limb in &mut self.0 {
            (above, *limb) = (*limb << 63, above | *limb >> 1);
        }
        self
    }

    /// The number of bits without leading zeros.
    pub fn bits(&self) -> u32 {
        let mut bits = 0;
        for (limb, below) in self.0.iter().rev().zip((0..).step_by(64)) {
            if *limb != 0 {
                bits = below + u64::BITS - limb.leading_zeros();
            }
        }
        bits
    }
}
