//! The verification against a simulator that shares nothing with it: it counts, then tries to carry the schedule out, twice.
//!
//! Random valid schedules of every form are changed at random, 120 000 times, and both must agree on every one. What is
//! lowered must be right for both as well.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use std::collections::{BTreeMap, HashSet, VecDeque};

use torchrelay_core::{Action, Blocked, Error, Kind, Lowering, Maker, Recompute, Schedule};

/// A generator of random numbers (splitmix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % limit as u64).unwrap()
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

fn action(kind: Kind, stage: usize, microbatch: usize) -> Action {
    Action::new(kind, stage, kind.per_microbatch().then_some(microbatch)).unwrap()
}

/// A schedule taken apart, to be changed.
#[derive(Clone)]
struct Parts {
    placement: Vec<usize>,
    microbatches: usize,
    backward: bool,
    lists: Vec<Vec<Action>>,
    overlaps: Vec<Vec<usize>>,
}

impl Parts {
    fn of(schedule: &Schedule) -> Self {
        let ranks = 0..schedule.ranks();
        Self {
            placement: schedule.placement().collect(),
            microbatches: schedule.microbatches(),
            backward: schedule.backward(),
            lists: ranks.clone().map(|rank| schedule.actions(rank).unwrap().to_vec()).collect(),
            overlaps: ranks.map(|rank| schedule.overlaps(rank).to_vec()).collect(),
        }
    }

    fn schedule(&self) -> Schedule {
        let lists = self.lists.clone();
        let schedule = Schedule::new("changed", &self.placement, self.microbatches, self.backward, lists);
        let schedule = schedule.unwrap();
        // What was changed may have taken a pair apart.
        let fits = |rank: usize, position: usize| {
            let mut pairs = vec![Vec::new(); rank + 1];
            pairs[rank].push(position);
            schedule.clone().with_overlaps(pairs).is_ok()
        };
        let mut overlaps = vec![Vec::new(); self.lists.len()];
        for (rank, positions) in self.overlaps.iter().enumerate() {
            let mut free = 0;
            for &position in positions {
                if position >= free && fits(rank, position) {
                    overlaps[rank].push(position);
                    free = position + 2;
                }
            }
        }
        schedule.with_overlaps(overlaps).unwrap()
    }
}

// ---------------------------------------------------------------------------------------------------- the simulator

/// How a send behaves.
#[derive(Clone, Copy, PartialEq)]
enum Sends {
    /// It waits until its receive has been reached, and the other way round.
    Meet,
    /// It waits for nobody, and messages between two ranks keep their order.
    Queue,
}

struct Simulator<'a> {
    schedule: &'a Schedule,
    placement: Vec<usize>,
    explicit: bool,
    copied: bool,
    done: HashSet<Action>,
    gathered: HashSet<usize>,
    sharded: HashSet<usize>,
    queues: BTreeMap<(usize, usize), VecDeque<Action>>,
}

impl Simulator<'_> {
    fn has(&self, kind: Kind, stage: usize, microbatch: usize) -> bool {
        self.done.contains(&action(kind, stage, microbatch))
    }

    fn has_grad(&self, stage: usize, microbatch: usize) -> bool {
        self.has(Kind::Backward, stage, microbatch) || self.has(Kind::InputGrad, stage, microbatch)
    }

    fn here(&self, a: usize, b: usize) -> bool {
        self.placement[a] == self.placement[b]
    }

    /// Whether an action can begin, as far as its own rank can tell.
    fn can_begin(&self, wanted: Action) -> bool {
        let (s, i) = (wanted.stage(), wanted.microbatch().unwrap_or_default());
        let last = self.placement.len() - 1;
        let computes = matches!(
            wanted.kind(),
            Kind::Forward | Kind::Backward | Kind::InputGrad | Kind::WeightGrad | Kind::Recompute
        );
        if computes && self.sharded.contains(&s) && !self.gathered.contains(&s) {
            return false;
        }
        match wanted.kind() {
            Kind::Forward if s == 0 => true,
            Kind::Forward if self.explicit && !self.here(s, s - 1) => self.has(Kind::RecvForward, s, i),
            Kind::Forward if self.copied && !self.here(s, s - 1) => self.has(Kind::WaitCopyForward, s, i),
            Kind::Forward | Kind::CopyForward => self.has(Kind::Forward, s - 1, i),
            Kind::CopyBackward => self.has_grad(s + 1, i),
            Kind::WaitCopyForward => self.has(Kind::CopyForward, s, i),
            Kind::WaitCopyBackward => self.has(Kind::CopyBackward, s, i),
            Kind::Backward | Kind::InputGrad => {
                let grad = if s == last {
                    true
                } else if self.explicit && !self.here(s, s + 1) {
                    self.has(Kind::RecvBackward, s, i)
                } else if self.copied && !self.here(s, s + 1) {
                    self.has(Kind::WaitCopyBackward, s, i)
                } else {
                    self.has_grad(s + 1, i)
                };
                grad && self.has(Kind::Forward, s, i)
            }
            Kind::WeightGrad => self.has(Kind::InputGrad, s, i),
            Kind::Recompute => self.has(Kind::Forward, s, i) && !self.has_grad(s, i),
            Kind::SendForward => self.has(Kind::Forward, s, i),
            Kind::SendBackward => self.has_grad(s, i),
            Kind::RecvForward | Kind::RecvBackward => true,
            Kind::WaitSendForward => self.has(Kind::SendForward, s, i),
            Kind::WaitSendBackward => self.has(Kind::SendBackward, s, i),
            Kind::Unshard => !self.gathered.contains(&s),
            Kind::Reshard => self.gathered.contains(&s),
            Kind::ReduceGrad => (0..self.schedule.microbatches())
                .all(|i| self.has(Kind::Backward, s, i) || self.has(Kind::WeightGrad, s, i)),
            Kind::WaitReduceGrad => self.done.contains(&action(Kind::ReduceGrad, s, 0)),
        }
    }

    fn end(&mut self, ended: Action) {
        match ended.kind() {
            Kind::Unshard => {
                self.gathered.insert(ended.stage());
            }
            Kind::Reshard => {
                self.gathered.remove(&ended.stage());
            }
            _ => {}
        }
        self.done.insert(ended);
    }

    /// The other end of a transfer.
    fn other_end(&self, end: Action) -> Option<(usize, Action)> {
        let (kind, stage) = match end.kind() {
            Kind::SendForward => (Kind::RecvForward, end.stage() + 1),
            Kind::RecvForward => (Kind::SendForward, end.stage() - 1),
            Kind::SendBackward => (Kind::RecvBackward, end.stage() - 1),
            Kind::RecvBackward => (Kind::SendBackward, end.stage() + 1),
            _ => return None,
        };
        Some((self.placement[stage], action(kind, stage, end.microbatch().unwrap())))
    }

    /// Whether every rank reaches its end. Tries every rank again until none moves.
    fn runs(&mut self, sends: Sends) -> bool {
        let lists: Vec<Vec<Action>> =
            (0..self.schedule.ranks()).map(|rank| self.schedule.actions(rank).unwrap().to_vec()).collect();
        let mut heads = vec![0; lists.len()];
        loop {
            let before: usize = heads.iter().sum();
            for rank in 0..lists.len() {
                let Some(&first) = lists[rank].get(heads[rank]) else { continue };
                let pair = self.schedule.overlaps(rank).contains(&heads[rank]);
                let entry = if pair { vec![first, lists[rank][heads[rank] + 1]] } else { vec![first] };
                if !entry.iter().all(|&action| self.can_begin(action)) {
                    continue;
                }
                let is_send = matches!(first.kind(), Kind::SendForward | Kind::SendBackward);
                match (self.other_end(first), sends) {
                    (None, _) => {}
                    (Some((other, wanted)), Sends::Meet) => {
                        if lists[other].get(heads[other]) != Some(&wanted) || !self.can_begin(wanted) {
                            continue;
                        }
                        heads[other] += 1;
                        self.end(wanted);
                    }
                    (Some((other, _)), Sends::Queue) if is_send => {
                        self.queues.entry((rank, other)).or_default().push_back(first);
                    }
                    (Some((other, wanted)), Sends::Queue) => {
                        let queue = self.queues.entry((other, rank)).or_default();
                        if queue.front() != Some(&wanted) {
                            continue;
                        }
                        queue.pop_front();
                    }
                }
                heads[rank] += entry.len();
                for action in entry {
                    self.end(action);
                }
            }
            if heads.iter().sum::<usize>() == before {
                return heads.iter().zip(&lists).all(|(&head, list)| head == list.len());
            }
        }
    }
}

const TRANSFERS: [Kind; 6] = [
    Kind::SendForward,
    Kind::RecvForward,
    Kind::SendBackward,
    Kind::RecvBackward,
    Kind::WaitSendForward,
    Kind::WaitSendBackward,
];

const COPIES: [Kind; 4] =
    [Kind::CopyForward, Kind::CopyBackward, Kind::WaitCopyForward, Kind::WaitCopyBackward];

/// Whether there is as much of everything as there must be, all of it where it belongs.
fn counts_are_right(schedule: &Schedule) -> bool {
    let placement: Vec<_> = schedule.placement().collect();
    let (stages, m) = (placement.len(), schedule.microbatches());
    let mut count: BTreeMap<(Kind, usize, usize), usize> = BTreeMap::new();
    let mut kinds = HashSet::new();
    for rank in 0..schedule.ranks() {
        for action in schedule.actions(rank).unwrap() {
            let (stage, microbatch) = (action.stage(), action.microbatch().unwrap_or_default());
            if stage >= stages || placement[stage] != rank || microbatch >= m {
                return false;
            }
            if !schedule.backward() && action.kind().of_backward() {
                return false;
            }
            kinds.insert(action.kind());
            *count.entry((action.kind(), stage, microbatch)).or_default() += 1;
        }
    }
    let of = |kind, stage, microbatch| count.get(&(kind, stage, microbatch)).copied().unwrap_or_default();
    let explicit = TRANSFERS.iter().any(|kind| kinds.contains(kind));
    let copied = COPIES.iter().any(|kind| kinds.contains(kind));
    if explicit && copied {
        return false;
    }
    let waits = kinds.contains(&Kind::WaitSendForward) || kinds.contains(&Kind::WaitSendBackward);
    let backwards = usize::from(schedule.backward());
    for stage in 0..stages {
        for i in 0..m {
            let to_next = stage + 1 < stages && placement[stage + 1] != placement[stage];
            let to_last = stage > 0 && placement[stage - 1] != placement[stage];
            let (copy_next, copy_last) = (usize::from(copied && to_next), usize::from(copied && to_last));
            let (to_next, to_last) = (usize::from(explicit && to_next), usize::from(explicit && to_last));
            let wanted = [
                (Kind::SendForward, to_next),
                (Kind::RecvForward, to_last),
                (Kind::SendBackward, to_last * backwards),
                (Kind::RecvBackward, to_next * backwards),
                (Kind::WaitSendForward, to_next * usize::from(waits)),
                (Kind::WaitSendBackward, to_last * backwards * usize::from(waits)),
                (Kind::CopyForward, copy_last),
                (Kind::WaitCopyForward, copy_last),
                (Kind::CopyBackward, copy_next * backwards),
                (Kind::WaitCopyBackward, copy_next * backwards),
                (Kind::Forward, 1),
                (Kind::WeightGrad, of(Kind::InputGrad, stage, i)),
            ];
            if wanted.iter().any(|&(kind, wanted)| of(kind, stage, i) != wanted)
                || of(Kind::Backward, stage, i) + of(Kind::InputGrad, stage, i) != backwards
                || of(Kind::Recompute, stage, i) > 1
            {
                return false;
            }
        }
        for kind in [Kind::ReduceGrad, Kind::WaitReduceGrad] {
            if of(kind, stage, 0) != usize::from(kinds.contains(&kind)) {
                return false;
            }
        }
        if of(Kind::Unshard, stage, 0) != of(Kind::Reshard, stage, 0) {
            return false;
        }
    }
    true
}

/// What the verification must say. Also checks what it relies on: where sends meet, queues are no harder.
fn can_be_carried_out(schedule: &Schedule) -> bool {
    if !counts_are_right(schedule) {
        return false;
    }
    let all = || (0..schedule.ranks()).flat_map(|rank| schedule.actions(rank).unwrap());
    let simulator = || Simulator {
        schedule,
        placement: schedule.placement().collect(),
        explicit: all().any(|action| TRANSFERS.contains(&action.kind())),
        copied: all().any(|action| COPIES.contains(&action.kind())),
        done: HashSet::new(),
        gathered: HashSet::new(),
        sharded: all().filter(|action| action.kind() == Kind::Unshard).map(|action| action.stage()).collect(),
        queues: BTreeMap::new(),
    };
    let (meet, queue) = (simulator().runs(Sends::Meet), simulator().runs(Sends::Queue));
    assert!(queue || !meet, "{}", schedule.to_csv());
    meet && queue
}

// ------------------------------------------------------------------------------------------- valid schedules to change

/// A valid schedule of a random form, by doing again and again any of the things that can be done.
fn random_valid(random: &mut Random) -> Parts {
    let ranks = 1 + random.below(4);
    let stages = 1 + random.below(5);
    let m = 1 + random.below(3);
    let placement: Vec<usize> = (0..stages).map(|_| random.below(ranks)).collect();
    let (explicit, waits) = (random.coin(), random.coin());
    let copied = !explicit && random.coin();
    let (backward, reduce, reduce_waits) = (random.below(5) > 0, random.coin(), random.coin());
    let mut lists = vec![Vec::new(); ranks];
    let mut missing_grads = vec![m; stages];
    // What can be done: actions, each on the rank of its stage. A send brings its receive along.
    let mut open: Vec<Action> = (0..m).map(|i| action(Kind::Forward, 0, i)).collect();
    while !open.is_empty() {
        let chosen = open.swap_remove(random.below(open.len()));
        let (s, i) = (chosen.stage(), chosen.microbatch().unwrap_or_default());
        lists[placement[s]].push(chosen);
        let mut backward_of = |s: usize| {
            let kind = [Kind::Backward, Kind::InputGrad, Kind::Recompute][random.below(3)];
            action(kind, s, i)
        };
        let copied = |t: usize| copied && placement[s] != placement[t];
        let over = |t: usize| explicit && placement[s] != placement[t];
        match chosen.kind() {
            Kind::Forward if s + 1 < stages && over(s + 1) => open.push(action(Kind::SendForward, s, i)),
            Kind::Forward if s + 1 < stages && copied(s + 1) => {
                open.push(action(Kind::CopyForward, s + 1, i));
            }
            Kind::CopyForward => open.push(action(Kind::WaitCopyForward, s, i)),
            Kind::WaitCopyForward => open.push(action(Kind::Forward, s, i)),
            Kind::CopyBackward => open.push(action(Kind::WaitCopyBackward, s, i)),
            Kind::WaitCopyBackward => open.push(backward_of(s)),
            Kind::Forward if s + 1 < stages => open.push(action(Kind::Forward, s + 1, i)),
            Kind::Forward if backward => open.push(backward_of(s)),
            Kind::Recompute => open.push(action(Kind::Backward, s, i)),
            Kind::Backward | Kind::InputGrad => {
                if s > 0 && over(s - 1) {
                    open.push(action(Kind::SendBackward, s, i));
                } else if s > 0 && copied(s - 1) {
                    open.push(action(Kind::CopyBackward, s - 1, i));
                } else if s > 0 {
                    open.push(backward_of(s - 1));
                }
                if chosen.kind() == Kind::InputGrad {
                    open.push(action(Kind::WeightGrad, s, i));
                }
            }
            Kind::SendForward => {
                lists[placement[s + 1]].push(action(Kind::RecvForward, s + 1, i));
                open.push(action(Kind::Forward, s + 1, i));
            }
            Kind::SendBackward => {
                lists[placement[s - 1]].push(action(Kind::RecvBackward, s - 1, i));
                open.push(backward_of(s - 1));
            }
            Kind::ReduceGrad if reduce_waits => open.push(action(Kind::WaitReduceGrad, s, 0)),
            _ => {}
        }
        match chosen.kind() {
            Kind::SendForward if waits => open.push(action(Kind::WaitSendForward, s, i)),
            Kind::SendBackward if waits => open.push(action(Kind::WaitSendBackward, s, i)),
            Kind::Backward | Kind::WeightGrad => {
                missing_grads[s] -= 1;
                if missing_grads[s] == 0 && reduce {
                    open.push(action(Kind::ReduceGrad, s, 0));
                }
            }
            _ => {}
        }
    }
    for (stage, &rank) in placement.iter().enumerate() {
        if random.below(4) == 0 {
            shard(&mut lists[rank], stage, random);
        }
    }
    let overlaps = vec![Vec::new(); ranks];
    Parts { placement, microbatches: m, backward, lists, overlaps }
}

/// Puts UNSHARD before all of a stage's actions and RESHARD after them, and perhaps once more the two in between.
fn shard(list: &mut Vec<Action>, stage: usize, random: &mut Random) {
    let (gather, drop) = (action(Kind::Unshard, stage, 0), action(Kind::Reshard, stage, 0));
    list.insert(0, gather);
    list.push(drop);
    if random.coin() {
        let position = 1 + random.below(list.len() - 1);
        list.splice(position..position, [drop, gather]);
    }
}

/// A valid schedule: of a maker, or random.
fn valid(random: &mut Random) -> Parts {
    if random.below(4) > 0 {
        return random_valid(random);
    }
    let maker = Maker::ALL[random.below(Maker::ALL.len())];
    let (ranks, m) = (1 + random.below(3), 1 + random.below(5));
    let Ok(schedule) = maker.make(ranks, m, None) else { return random_valid(random) };
    let recompute = [Recompute::Never, Recompute::ExceptLast, Recompute::Always][random.below(3)];
    let unsharded = [None, Some(2), Some(3)][random.below(3)];
    let options = Lowering { recompute, unsharded, ..Lowering::default() };
    match random.below(4) {
        0 => Parts::of(&schedule),
        1 => Parts::of(&schedule.lower(Lowering { copies: true, ..options }).unwrap()),
        kind => Parts::of(&schedule.lower(Lowering { waits: kind == 2, ..options }).unwrap()),
    }
}

/// One change. Many of them leave a schedule valid, or break a single rule.
fn change(parts: &mut Parts, random: &mut Random) {
    let ranks = parts.lists.len();
    let rank = random.below(ranks);
    let length = parts.lists[rank].len();
    if length == 0 {
        return;
    }
    let (at, to) = (random.below(length), random.below(length));
    let list = &mut parts.lists[rank];
    match random.below(18) {
        0 => {
            list.remove(at);
        }
        1 => list.insert(to, list[at]),
        2 => list.swap(at, to),
        3..=5 if at + 1 < length => list.swap(at, at + 1),
        6 | 7 => {
            let moved = list.remove(at);
            list.insert(to.min(list.len()), moved);
        }
        8 => {
            let kind = Kind::ALL[random.below(Kind::ALL.len())];
            list[at] = action(kind, list[at].stage(), list[at].microbatch().unwrap_or_default());
        }
        9 => {
            let stage = random.below(parts.placement.len() + 1);
            list[at] = action(list[at].kind(), stage, list[at].microbatch().unwrap_or_default());
        }
        10 => {
            let microbatch = random.below(parts.microbatches + 1);
            list[at] = action(list[at].kind(), list[at].stage(), microbatch);
        }
        11 => {
            let moved = list.remove(at);
            let other = &mut parts.lists[random.below(ranks)];
            let to = random.below(other.len() + 1);
            other.insert(to, moved);
        }
        12 => {
            // Of all ranks, all that is of one kind.
            let kind = list[at].kind();
            parts.lists.iter_mut().for_each(|list| list.retain(|action| action.kind() != kind));
        }
        13 => {
            let other = random.below(parts.microbatches);
            // Two micro-batches trade places on this rank: right by itself, perhaps out of step with others.
            let one = list[at].microbatch().unwrap_or_default();
            for action in list.iter_mut().filter(|action| action.microbatch().is_some()) {
                let i = action.microbatch().unwrap();
                let traded = if i == one {
                    other
                } else if i == other {
                    one
                } else {
                    i
                };
                *action = self::action(action.kind(), action.stage(), traded);
            }
        }
        14 => parts.backward = !parts.backward,
        15 | 16 => {
            // A send and a receive side by side trade places: harmless, unless both ranks then send first.
            let is_receive = |action: Action| matches!(action.kind(), Kind::RecvForward | Kind::RecvBackward);
            let is_send = |action: Action| matches!(action.kind(), Kind::SendForward | Kind::SendBackward);
            let meets = |&at: &usize| is_receive(list[at]) && is_send(list[at + 1]);
            let meetings: Vec<_> = (0..length - 1).filter(meets).collect();
            if !meetings.is_empty() {
                let at = meetings[random.below(meetings.len())];
                list.swap(at, at + 1);
            }
        }
        _ => {
            let pairs = &mut parts.overlaps[rank];
            match pairs.binary_search(&at) {
                Ok(index) => drop(pairs.remove(index)),
                Err(index) => pairs.insert(index, at),
            }
        }
    }
}

/// Every entry waits for something that stands at or behind the head of the next.
fn is_a_cycle(schedule: &Schedule, cycle: &[Blocked]) -> bool {
    let next = cycle.iter().cycle().skip(1);
    !cycle.is_empty()
        && cycle.iter().zip(next).all(|(blocked, next)| {
            let list = schedule.actions(blocked.needs.rank).unwrap();
            blocked.needs.rank == next.at.rank
                // An action that overlaps is held up by the other one, which may be the one before or behind.
                && blocked.needs.position + 1 >= next.at.position
                && list[blocked.needs.position] == blocked.needs.action
        })
}

#[test]
fn the_verification_and_the_simulator_agree_on_random_changes() {
    let mut random = Random(1);
    let (mut accepted, mut refused) = (0, BTreeMap::<String, usize>::new());
    for _ in 0..40_000 {
        let base = valid(&mut random);
        let schedule = base.schedule();
        assert_eq!(schedule.verify(), Ok(()), "{}", schedule.to_csv());
        assert!(can_be_carried_out(&schedule), "{}", schedule.to_csv());
        for _ in 0..3 {
            let mut parts = base.clone();
            for _ in 0..=random.below(3) {
                change(&mut parts, &mut random);
            }
            let schedule = parts.schedule();
            let verdict = schedule.verify();
            assert_eq!(verdict.is_ok(), can_be_carried_out(&schedule), "{verdict:?}\n{}", schedule.to_csv());
            match verdict {
                Ok(()) => accepted += 1,
                Err(error) => {
                    if let Error::Deadlock { cycle } | Error::Rendezvous { cycle } = &error {
                        assert!(is_a_cycle(&schedule, cycle), "{error}\n{}", schedule.to_csv());
                    }
                    let variant = format!("{error:?}");
                    let name = variant.split([' ', '(']).next().unwrap().to_owned();
                    *refused.entry(name).or_default() += 1;
                }
            }
        }
    }
    println!("{accepted} accepted, refused: {refused:?}");
    // A change that says nothing of a rule would make this test blind to it.
    assert!(accepted > 10_000, "{accepted}");
    let all = [
        "Deadlock",
        "MessageOrder",
        "Misplaced",
        "Missing",
        "NoPeer",
        "CopiedAndSent",
        "NoSuchMicrobatch",
        "NoSuchStage",
        "OutOfOrder",
        "OverlapNeeds",
        "Rendezvous",
        "Repeated",
        "Sharded",
        "ShardedTwice",
        "UnexpectedBackward",
        "WholeAndSplit",
    ];
    for name in all {
        assert!(refused.get(name).is_some_and(|&count| count > 20), "{name}: {refused:?}");
    }
    assert_eq!(refused.len(), all.len(), "{refused:?}");
}

#[test]
fn whatever_can_be_carried_out_can_be_lowered() {
    let mut random = Random(2);
    let mut lowered = 0;
    for _ in 0..4_000 {
        let mut parts = valid(&mut random);
        for rank in 0..parts.lists.len() {
            // Some pairs that overlap, wherever that is possible.
            let fits = |at: usize| {
                let mut paired = parts.clone();
                paired.overlaps[rank].push(at);
                paired.schedule().verify().is_ok().then_some(paired)
            };
            if let Some(paired) = (0..parts.lists[rank].len()).find_map(fits) {
                parts = paired;
            }
        }
        let schedule = parts.schedule();
        let options = Lowering {
            waits: random.coin(),
            recompute: [Recompute::Never, Recompute::Always][random.below(2)],
            copies: random.below(4) == 0,
            ..Lowering::default()
        };
        match schedule.lower(options) {
            Ok(result) => {
                assert_eq!(result.verify(), Ok(()), "{}", result.to_csv());
                assert!(can_be_carried_out(&result), "{}", result.to_csv());
                lowered += 1;
            }
            Err(Error::Lowered { .. }) => {}
            Err(error) => panic!("{error}\n{}", schedule.to_csv()),
        }
    }
    assert!(lowered > 1_000, "{lowered}");
}
