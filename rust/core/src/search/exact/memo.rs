//! States that have been looked at, so that none is looked at twice, nor one that is later in everything.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::state::State;

/// How many numbers are remembered at most; beyond that, nothing more is.
const ROOM: usize = 16 << 20;
/// How many states of which the same has been done.
const ALIKE: usize = 12;

/// What has been done, and when: several states, one after the other.
#[derive(Default)]
pub(super) struct Memo {
    seen: HashMap<Box<[u64]>, Vec<f64>, BuildHasherDefault<Mix>>,
    numbers: usize,
    key: Vec<u64>,
    times: Vec<f64>,
}

impl Memo {
    /// Whether no state before did the same by the same times; it is remembered if so.
    pub(super) fn admits(&mut self, state: &State<'_>) -> bool {
        state.what(&mut self.key);
        state.when(&mut self.times);
        let length = self.times.len();
        let times = &self.times;
        let no_later = |other: &[f64]| other.iter().zip(times).all(|(other, time)| other <= time);
        match self.seen.get_mut(self.key.as_slice()) {
            Some(known) => {
                if known.chunks_exact(length).any(no_later) {
                    return false;
                }
                if known.len() < ALIKE * length && self.numbers < ROOM {
                    known.extend_from_slice(times);
                    self.numbers += length;
                }
            }
            None if self.numbers < ROOM => {
                self.seen.insert(self.key.as_slice().into(), times.clone());
                self.numbers += length + self.key.len() + 8; // what else an entry takes
            }
            None => {}
        }
        true
    }
}

/// Mixes numbers; what is hashed comes from no stranger.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, &from)| *to = from);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 29;
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}
