//! Numbers that look random and are always the same.

/// A generator (xorshift).
pub(super) struct Random(pub(super) u64);

impl Random {
    #[allow(clippy::cast_possible_truncation)] // less than `limit`
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    /// Less than so many tenths.
    pub(super) fn tenths(&mut self, limit: u8) -> f64 {
        f64::from(u8::try_from(self.below(limit.into())).unwrap_or(0)) / 10.0
    }
}
