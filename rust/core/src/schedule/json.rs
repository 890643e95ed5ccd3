//! A schedule as text, to be saved and read again.
//!
//! `{"format": 1, "name": ..., "placement": [rank of each stage], "microbatches": ..., "backward": ..., "actions":
//! [["0F0", ...] per rank]}`. The text may come from anywhere: what it asks for is bounded by its own length and the
//! limits of [`Schedule::new`].

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Schedule;
use super::action::Action;
use crate::error::{Error, Result};

const FORMAT: u32 = 1;

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    name: &'a str,
    placement: &'a [u16],
    microbatches: usize,
    backward: bool,
    actions: &'a [Vec<Action>],
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    format: u32,
    name: String,
    placement: Vec<usize>,
    microbatches: usize,
    backward: bool,
    actions: Vec<Vec<Action>>,
}

impl Serialize for Action {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Action {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Action;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an action such as \"0F0\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Action, E> {
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
            format: FORMAT,
            name: &self.name,
            placement: &self.placement,
            microbatches: self.microbatches,
            backward: self.backward,
            actions: &self.actions,
        };
        serde_json::to_string(&written).map_err(|error| refused(&error))
    }

    /// Reads what [`Schedule::to_json`] wrote, and nothing else: an unknown or repeated field, another format or anything
    /// after the end is an error. The result still has to be verified.
    ///
    /// # Errors
    /// [`Error::Json`], or an error of [`Schedule::new`].
    pub fn from_json(text: &str) -> Result<Self> {
        let read: Read = serde_json::from_str(text).map_err(|error| refused(&error))?;
        if read.format != FORMAT {
            let reason = format!("format {} is not known, only format {FORMAT}", read.format);
            return Err(Error::Json { line: 1, column: 1, reason });
        }
        Self::new(read.name, &read.placement, read.microbatches, read.backward, read.actions)
    }
}

fn refused(error: &serde_json::Error) -> Error {
    let place = format!(" at line {} column {}", error.line(), error.column());
    let reason = error.to_string();
    let reason = reason.strip_suffix(&place).unwrap_or(&reason).to_owned();
    Error::Json { line: error.line(), column: error.column(), reason }
}
