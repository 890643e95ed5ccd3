//! Building blocks: the times of one micro-batch on every rank, in a V, repeated every six units of time.
//!
//! ```text
//! time      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17          4 ranks, all offsets and gaps 1
//! rank 0 | F0  .  .  .  .  .  . F1 I1  . W1  .  .  .  . I0  . W0
//! rank 1 |  . F0  .  .  .  . F1  .  . I1 W1  .  .  . I0  .  . W0
//! rank 2 |  .  . F0  .  . F1  .  .  .  . I1  . W1 I0  . W0  .  .
//! rank 3 |  .  .  . F0 F1  .  .  .  .  .  . I1 I0 W1 W0  .  .  .
//! ```
//!
//! A micro-batch goes down the ranks and up again, and its gradient the same way; each of the four ways has an offset from
//! rank to rank, each turn a gap. Where no two of a rank's six actions fall on the same time modulo six, the block can be
//! repeated every six units, one micro-batch after the other, and every rank is always busy in between. The shorter the
//! block, the less memory; the longer, the less the bubble at both ends. From "Pipeline Parallelism with Controllable
//! Memory" (2024).

use super::super::action::{Action, Kind};
use super::Shape;

/// Units of time after which the next micro-batch does the same.
pub(super) const PERIOD: usize = 6;
/// The kinds of a block, and the rank's first or second stage; the order of everything below.
const PARTS: [(Kind, usize); PERIOD] = [
    (Kind::Forward, 0),
    (Kind::Forward, 1),
    (Kind::InputGrad, 1),
    (Kind::InputGrad, 0),
    (Kind::WeightGrad, 1),
    (Kind::WeightGrad, 0),
];
/// What a part adds to the memory of its rank.
const ADDS: [isize; PERIOD] = [1, 1, 0, 0, -1, -1];

/// When each rank does each part of the first micro-batch.
type Block = Vec<[usize; PERIOD]>;

/// How far apart the ranks are on each of the four ways.
pub(super) type Offsets = [usize; 4];

/// The blocks with these offsets, for all gaps that fit, the shortest first.
pub(super) fn blocks(p: usize, offsets: Offsets) -> Vec<Block> {
    let gaps = (0..PERIOD.pow(3)).map(|n| [n / 36 % 6 + 1, n / 6 % 6 + 1, n % 6 + 1]);
    let mut gaps: Vec<_> = gaps.collect();
    gaps.sort_by_key(|gaps| (gaps.iter().sum::<usize>(), *gaps));
    gaps.into_iter().filter_map(|gaps| block(p, offsets, gaps)).collect()
}

fn block(p: usize, [down, up, back_down, back_up]: Offsets, gaps: [usize; 3]) -> Option<Block> {
    let last = p - 1;
    let turn = last * down + gaps[0];
    let top = turn + last * up + gaps[1];
    let back_turn = top + last * back_down + gaps[2];
    let rank = |rank: usize| {
        let times = [
            rank * down,
            turn + (last - rank) * up,
            top + rank * back_down,
            back_turn + (last - rank) * back_up,
        ];
        let mut taken = [false; PERIOD];
        for time in times {
            let slot = taken.get_mut(time % PERIOD)?;
            if std::mem::replace(slot, true) {
                return None;
            }
        }
        let [forward, second_forward, second_input, input] = times;
        let slots: Vec<_> = (0..PERIOD).filter(|&slot| taken.get(slot) == Some(&false)).collect();
        let [a, b] = slots.as_slice() else { return None };
        let behind = |time: usize, slot: usize| time + 1 + (slot + PERIOD - (time + 1) % PERIOD) % PERIOD;
        let either = [(*a, *b), (*b, *a)].map(|(x, y)| (behind(second_input, x), behind(input, y)));
        let (second_weight, weight) = either.into_iter().min_by_key(|(x, y)| x + y)?;
        Some([forward, second_forward, second_input, input, second_weight, weight])
    };
    (0..p).map(rank).collect()
}

/// The most stages' activations that a rank holds at a time when a block is repeated for ever.
pub(super) fn peak(block: &Block) -> usize {
    let of_rank = |times: &[usize; PERIOD]| {
        let [forward, second_forward, _, _, second_weight, weight] = *times;
        // What is held at a time that is like `now` modulo the period: the micro-batches begun by then and not yet ended.
        let held = |now: usize| {
            let far = now + PERIOD * (weight + second_weight);
            let begun = |start: usize| (far - start) / PERIOD + 1;
            let ended = |end: usize| (far - end - 1) / PERIOD + usize::from(far > end);
            (begun(forward) + begun(second_forward)).saturating_sub(ended(weight) + ended(second_weight))
        };
        (0..PERIOD).map(held).max().unwrap_or(0)
    };
    block.iter().map(of_rank).max().unwrap_or(0)
}

/// Repeats a block for all micro-batches and squeezes it: every rank does, in each unit of time, the first of what is left
/// that can be done without holding more than `limit` then or later; once it has no forwards left, gradients of inputs
/// before those of weights. `None` if that comes to a halt. Also how long the rank that takes longest takes. With `only` a
/// rank the others' lists stay empty, and memory is that rank's own, and a few numbers for each.
pub(super) fn squeezed(
    shape: Shape,
    block: &Block,
    limit: usize,
    only: Option<usize>,
) -> Option<(Vec<Vec<Action>>, usize)> {
    let Shape { p, m, .. } = shape;
    // How many micro-batches each rank was through with before now, of each part.
    let mut done = vec![[0; PERIOD]; p];
    let mut ranks: Vec<Rank> = block.iter().map(|&times| Rank::new(times)).collect();
    let (mut now, mut left) = (0, PERIOD * m * p);
    // What a rank can do changes only with what it or a neighbour has done just before.
    let mut awake: Vec<usize> = (0..p).collect();
    let mut woken = vec![0; p];
    while left > 0 {
        let (mut next_awake, mut acted) = (Vec::new(), Vec::new());
        for index in awake {
            let rank = ranks.get_mut(index)?;
            let Some(part) = rank.choose(index, shape, limit, &done) else { continue };
            let next = rank.next.get_mut(part)?;
            if only.is_none_or(|only| only == index) {
                let (kind, second) = *PARTS.get(part)?;
                let stage = if second == 1 { 2 * p - 1 - index } else { index };
                let action = Action::known(kind, u16::try_from(stage).ok()?, u32::try_from(*next).ok()?);
                rank.actions.push(action);
            }
            *next += 1;
            acted.push((index, part));
            rank.level += ADDS.get(part)?;
            rank.start = rank.start.min(now);
            rank.end = now + 1;
            left -= 1;
            for near in index.saturating_sub(1)..(index + 2).min(p) {
                if std::mem::replace(woken.get_mut(near)?, now + 1) != now + 1 {
                    next_awake.push(near);
                }
            }
        }
        // Whatever was begun is done by now: if nothing was, nothing will be.
        if next_awake.is_empty() {
            return None;
        }
        for (index, part) in acted {
            *done.get_mut(index)?.get_mut(part)? += 1;
        }
        awake = next_awake;
        now += 1;
    }
    let cost = ranks.iter().map(|rank| rank.end - rank.start).max()?;
    Some((ranks.into_iter().map(|rank| rank.actions).collect(), cost))
}

struct Rank {
    times: [usize; PERIOD],
    /// The next micro-batch of each part.
    next: [usize; PERIOD],
    level: isize,
    actions: Vec<Action>,
    start: usize,
    end: usize,
}

impl Rank {
    fn new(times: [usize; PERIOD]) -> Self {
        Self { times, next: [0; PERIOD], level: 0, actions: Vec::new(), start: usize::MAX, end: 0 }
    }

    /// When the block has a micro-batch of a part.
    fn time(&self, part: usize, microbatch: usize) -> usize {
        self.times.get(part).map_or(usize::MAX, |time| time + PERIOD * microbatch)
    }

    fn choose(
        &self,
        rank: usize,
        Shape { p, m, .. }: Shape,
        limit: usize,
        done: &[[usize; PERIOD]],
    ) -> Option<usize> {
        let forwards_left = self.next.iter().take(2).any(|&next| next < m);
        let is_done = |rank: usize, part: usize, i: usize| {
            done.get(rank).and_then(|done| done.get(part)).is_some_and(|&count| count > i)
        };
        let last = p - 1;
        let ready = |part: usize, i: usize| match part {
            0 => rank == 0 || is_done(rank - 1, 0, i),
            1 if rank == last => is_done(last, 0, i),
            1 => is_done(rank + 1, 1, i),
            2 if rank == 0 => is_done(0, 1, i),
            2 => is_done(rank - 1, 2, i) && is_done(rank, 1, i),
            3 if rank == last => is_done(last, 2, i),
            3 => is_done(rank + 1, 3, i),
            4 => is_done(rank, 2, i),
            _ => is_done(rank, 3, i),
        };
        let open = self
            .next
            .iter()
            .enumerate()
            .filter(|&(part, &i)| i < m && ready(part, i) && (part > 1 || self.fits(part, i, limit, m)));
        let order = |&(part, &i): &(usize, &usize)| (!forwards_left && part > 3, self.time(part, i));
        open.min_by_key(order).map(|(part, _)| part)
    }

    /// Whether a forward can be done now without more than the limit until its turn.
    fn fits(&self, part: usize, microbatch: usize, limit: usize, m: usize) -> bool {
        let limit = isize::try_from(limit).unwrap_or(isize::MAX);
        let turn = self.time(part, microbatch);
        let (mut level, mut next) = (self.level + 1, self.next);
        while level <= limit {
            let left = next.iter().enumerate().filter(|&(other, &i)| i < m && self.time(other, i) < turn);
            let Some(first) = left.min_by_key(|&(other, &i)| self.time(other, i)).map(|(other, _)| other)
            else {
                return true;
            };
            level += ADDS.get(first).copied().unwrap_or(0);
            if let Some(entry) = next.get_mut(first) {
                *entry += 1;
            }
        }
        false
    }
}
