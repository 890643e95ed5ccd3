//! A schedule as text, to be saved and read again.
//!
//! `{"version": 1, "name": ..., "placement": [rank of each stage], "microbatches": ..., "backward": ..., "actions":
//! [["0F0", ...] per rank]}`, where two actions that overlap are one entry, `"(0F1;0B0)OVERLAP_F_B"`. The text may come from anywhere: what it asks for is bounded by its own length and the
//! limits of [`Schedule::new`].

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Schedule;
use super::entry::Entry;
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
        let written = Written {
            version: VERSION,
            name: &self.name,
            placement: &self.placement,
            microbatches: self.microbatches,
            backward: self.backward,
            actions: (0..self.ranks()).map(|rank| Entries(self, rank)).collect(),
        };
        serde_json::to_string(&written).map_err(|error| refused(&error))
    }

    /// Reads what [`Schedule::to_json`] wrote, and nothing else: an unknown or repeated field, another version or anything
    /// after the end is an error. The result still has to be verified.
    ///
    /// # Errors
    /// [`Error::Text`], or an error of [`Schedule::new`].
    pub fn from_json(text: &str) -> Result<Self> {
        let read: Read = serde_json::from_str(text).map_err(|error| refused(&error))?;
        if read.version != VERSION {
            let reason = format!("version {} is not known, only version {VERSION}", read.version);
            return Err(Error::Text { line: 1, column: 1, reason });
        }
        let overlaps = read.actions.iter().map(|entries| overlaps(entries)).collect();
        let flat = |entries: Vec<Entry>| entries.into_iter().flat_map(Entry::actions).collect();
        let actions = read.actions.into_iter().map(flat).collect();
        Self::new(read.name, &read.placement, read.microbatches, read.backward, actions)?
            .with_overlaps(overlaps)
    }
}

/// Where the pairs begin among the actions of all entries.
fn overlaps(entries: &[Entry]) -> Vec<usize> {
    let pairs = entries.iter().enumerate().filter(|(_, entry)| matches!(entry, Entry::Overlap(..)));
    // Each pair before has pushed what follows by one.
    pairs.enumerate().map(|(before, (index, _))| before + index).collect()
}

fn refused(error: &serde_json::Error) -> Error {
    let place = format!(" at line {} column {}", error.line(), error.column());
    let reason = error.to_string();
    let reason = reason.strip_suffix(&place).unwrap_or(&reason).to_owned();
    Error::Text { line: error.line(), column: error.column(), reason }
}
