//! A schedule as text, to be saved and read again, alone or with the costs that it was made for.
//!
//! ```text
//! {"version": 1, "name": ..., "placement": [rank of each stage], "microbatches": ..., "backward": ...,
//!  "actions": [["0F0", "(0F1;0B0)OVERLAP_F_B", ...] per rank], "costs": {"forward": 1.0, "transfer": [0.5, ...], ...}}
//! ```
//!
//! Two actions that overlap are one entry. Costs may be missing, and so may any one of them, which then is as by default.
//! The text may come from anywhere: what it asks for is bounded by its own length and the limits of [`Schedule::new`].

use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::entry::Entry;
use super::{Costs, Schedule};
use crate::error::{Error, Result};

const VERSION: u32 = 1;

#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    name: &'a str,
    placement: &'a [u16],
    microbatches: usize,
    backward: bool,
    actions: Vec<Entries<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    costs: Option<&'a Costs>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    version: u32,
    name: String,
    placement: Vec<usize>,
    microbatches: usize,
    backward: bool,
    actions: Vec<Vec<Entry>>,
    costs: Option<Costs>,
}

/// What tells a schedule from costs.
#[derive(Deserialize)]
struct Peek {
    actions: Option<IgnoredAny>,
}

/// The entries of a rank, written without being gathered.
struct Entries<'a>(&'a Schedule, usize);

impl Serialize for Entries<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.entries(self.1))
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an action such as \"0F0\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Entry, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl Schedule {
    /// The schedule as JSON, in one line.
    ///
    /// # Errors
    /// None that is known: every schedule can be written.
    pub fn to_json(&self) -> Result<String> {
        self.write(None)
    }

    /// The same with costs, which [`Costs::from_json`] takes out again.
    ///
    /// # Errors
    /// Those of [`Costs::check`], for this schedule's stages.
    pub fn to_json_with(&self, costs: &Costs) -> Result<String> {
        costs.check(Some(self.stages()))?;
        self.write(Some(costs))
    }

    /// Reads what [`Schedule::to_json`] or [`Schedule::to_json_with`] wrote, and nothing else: an unknown or repeated
    /// field, another version or anything after the end is an error. The result still has to be verified.
    ///
    /// # Errors
    /// [`Error::Text`], an error of [`Schedule::new`], or one of [`Costs::check`].
    pub fn from_json(text: &str) -> Result<Self> {
        Self::read(text).map(|(schedule, _)| schedule)
    }

    fn write(&self, costs: Option<&Costs>) -> Result<String> {
        let written = Written {
            version: VERSION,
            name: &self.name,
            placement: &self.placement,
            microbatches: self.microbatches,
            backward: self.backward,
            actions: (0..self.ranks()).map(|rank| Entries(self, rank)).collect(),
            costs,
        };
        serde_json::to_string(&written).map_err(|error| refused("a schedule", &error))
    }

    fn read(text: &str) -> Result<(Self, Option<Costs>)> {
        let read: Read = serde_json::from_str(text).map_err(|error| refused("a schedule", &error))?;
        if read.version != VERSION {
            let reason = format!("version {} is not known, only version {VERSION}", read.version);
            return Err(Error::Text { what: "a schedule", line: 1, column: 1, reason });
        }
        let overlaps = read.actions.iter().map(|entries| overlaps(entries)).collect();
        let flat = |entries: Vec<Entry>| entries.into_iter().flat_map(Entry::actions).collect();
        let actions = read.actions.into_iter().map(flat).collect();
        let schedule = Self::new(read.name, &read.placement, read.microbatches, read.backward, actions)?
            .with_overlaps(overlaps)?;
        if let Some(costs) = &read.costs {
            costs.check(Some(schedule.stages()))?;
        }
        Ok((schedule, read.costs))
    }
}

impl Costs {
    /// The costs as JSON, in one line.
    ///
    /// # Errors
    /// Those of [`Costs::check`].
    pub fn to_json(&self) -> Result<String> {
        self.check(None)?;
        serde_json::to_string(self).map_err(|error| refused("costs", &error))
    }

    /// Reads costs by themselves, of which any may be missing, or those of a schedule.
    ///
    /// ```
    /// use torchrelay_core::Costs;
    ///
    /// let costs = Costs::from_json(r#"{"forward": [1, 2], "transfer": 0.5}"#)?;
    /// assert_eq!(costs.forward, vec![1.0, 2.0].into());
    /// assert_eq!(costs.weight_grad, Costs::default().weight_grad);
    /// # Ok::<(), torchrelay_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Text`] for an unknown or repeated field, or a schedule without costs; those of [`Costs::check`].
    pub fn from_json(text: &str) -> Result<Self> {
        if serde_json::from_str::<Peek>(text).is_ok_and(|peek| peek.actions.is_some()) {
            let reason = || "the schedule has no costs".to_owned();
            let missing = || Error::Text { what: "costs", line: 1, column: 1, reason: reason() };
            return Schedule::read(text)?.1.ok_or_else(missing);
        }
        let costs: Self = serde_json::from_str(text).map_err(|error| refused("costs", &error))?;
        costs.check(None)?;
        Ok(costs)
    }
}

/// Where the pairs begin among the actions of all entries.
fn overlaps(entries: &[Entry]) -> Vec<usize> {
    let pairs = entries.iter().enumerate().filter(|(_, entry)| matches!(entry, Entry::Overlap(..)));
    // Each pair before has pushed what follows by one.
    pairs.enumerate().map(|(before, (index, _))| before + index).collect()
}

fn refused(what: &'static str, error: &serde_json::Error) -> Error {
    let place = format!(" at line {} column {}", error.line(), error.column());
    let reason = error.to_string();
    let reason = reason.strip_suffix(&place).unwrap_or(&reason).to_owned();
    Error::Text { what, line: error.line(), column: error.column(), reason }
}
