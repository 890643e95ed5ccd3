//! Which rank holds which stage.
//!
//! ```text
//! 3 ranks, 2 stages each     loop  0 1 2 0 1 2     every stage is handed to the next rank, the last rank's to the first
//!                            v     0 1 2 2 1 0     the way turns at the ends, and stays on a rank there
//! ```

use std::str::FromStr;

use super::{MAX_STAGES, checked_ranks};
use crate::error::{Error, Result};

/// The two placements that schedules are made for; any other is a list of ranks, one per stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// Stage `s` on rank `s % ranks`.
    #[default]
    Loop,
    /// Forth over the ranks and back, turning at the ends.
    V,
}

impl Placement {
    /// The rank of each stage, for so many stages on every rank.
    ///
    /// # Errors
    /// [`Error::NotPositive`] without ranks or stages; [`Error::TooLarge`] beyond [`MAX_STAGES`] stages.
    pub fn ranks(self, ranks: usize, per_rank: usize) -> Result<Vec<usize>> {
        checked_ranks(ranks)?;
        if per_rank == 0 {
            return Err(Error::NotPositive { what: "the number of stages per rank", value: 0 });
        }
        let stages = ranks.checked_mul(per_rank).filter(|&stages| stages <= MAX_STAGES);
        let Some(stages) = stages else {
            let value = ranks as u128 * per_rank as u128;
            return Err(Error::TooLarge { what: "the number of stages", value, limit: MAX_STAGES });
        };
        let place = |stage: usize| match (self, stage / ranks % 2) {
            (Self::V, 1) => ranks - 1 - stage % ranks,
            _ => stage % ranks,
        };
        Ok((0..stages).map(place).collect())
    }
}

impl FromStr for Placement {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "loop" => Ok(Self::Loop),
            "v" => Ok(Self::V),
            _ => Err(Error::UnknownOption { what: "placement", given: name.to_owned(), known: "loop, v" }),
        }
    }
}
