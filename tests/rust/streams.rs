//! Stream plans: each is in order and has nothing that it could do without; the detector agrees with a model in which
//! everything that can be late is late.

#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)] // helpers of tests, which clippy does not know as such

use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;
use torchrelay_core::{
    Buffer, Error, Event, Gpipe, Host, Message, Operation, Recompute, Stream, StreamPlan, Work, make_gpipe,
    plan_streams,
};

fn options() -> impl Strategy<Value = Gpipe> {
    let recompute = prop::sample::select(&[Recompute::Never, Recompute::ExceptLast, Recompute::Always]);
    (any::<bool>(), any::<bool>(), recompute).prop_map(|(backward, ascending, recompute)| Gpipe {
        backward,
        ascending,
        recompute,
    })
}

/// A device for each stage, among few, so that several stages share one and values go forth and back.
fn devices(stages: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Option<u32>>> {
    proptest::collection::vec(proptest::option::weighted(0.75, 0u32..3), stages)
}

/// A device for each stage, and some skips from stage to later stage, of which several may be the same pair.
fn pipelines(
    stages: std::ops::Range<usize>,
    skips: std::ops::Range<usize>,
) -> impl Strategy<Value = (Vec<Option<u32>>, Vec<(u32, u32)>)> {
    let pairs =
        proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), skips);
    (devices(stages), pairs).prop_map(|(devices, pairs)| {
        let stages = u32::try_from(devices.len()).unwrap();
        let pair = |(a, b): (prop::sample::Index, prop::sample::Index)| {
            let (a, b) = (a.index(devices.len()), b.index(devices.len()));
            (u32::try_from(a.min(b)).unwrap(), u32::try_from(a.max(b)).unwrap())
        };
        let skips = pairs.into_iter().map(pair).filter(|&(from, to)| from < to && to < stages).collect();
        (devices, skips)
    })
}

fn plan((devices, skips): &(Vec<Option<u32>>, Vec<(u32, u32)>), m: usize, options: Gpipe) -> StreamPlan {
    plan_streams(&make_gpipe(devices.len(), m, options).unwrap(), devices, skips).unwrap()
}

fn without(plan: &StreamPlan, gone: &[usize]) -> StreamPlan {
    let kept = plan.operations().iter().enumerate().filter(|(index, _)| !gone.contains(index));
    StreamPlan::new(kept.map(|(_, operation)| operation.clone()).collect())
}

/// What orders: without any of these a plan must not pass.
fn orders(operation: &Operation) -> bool {
    matches!(operation.work, Work::Wait { .. } | Work::Record { .. } | Work::Share { .. })
}

fn ordering(plan: &StreamPlan) -> Vec<usize> {
    plan.operations()
        .iter()
        .enumerate()
        .filter(|(_, operation)| orders(operation))
        .map(|(index, _)| index)
        .collect()
}

// ---- the model

/// What a place has been told and has not done yet.
enum Item {
    /// Use memory: the life of each buffer, and whether it is written.
    Use {
        operation: usize,
        uses: Vec<(usize, bool)>,
    },
    /// Nothing before the record with this number is done.
    Await {
        record: usize,
    },
    Done {
        record: usize,
    },
    /// The end of a copy between devices: both ends do the copy together.
    Meet {
        operation: usize,
        uses: Vec<(usize, bool)>,
        other: Stream,
    },
    /// The owner takes released memory for something else.
    Reuse {
        life: usize,
        exempt: HashSet<Stream>,
    },
}

/// Carries a plan out with one operation held back for ever, either before its host issues it or before its stream does
/// it, and everything else as early as it can be. A conflict shows as a use that comes while one that the plan has before
/// it is not done.
struct Model<'a> {
    operations: &'a [Operation],
    /// By operation: the uses of memory, each the number of a life, and whether it is written.
    uses: Vec<Vec<(usize, bool)>>,
    /// By life: every use in the plan's order (operation, written, where), and where it is owned.
    lives: Vec<Vec<(usize, bool, Option<Stream>)>>,
    owners: Vec<Option<Stream>>,
    done: HashSet<usize>,
    queues: HashMap<Stream, VecDeque<Item>>,
    recorded: HashMap<Event, usize>,
    records_done: HashSet<usize>,
    posted: HashSet<Message>,
    shared: HashMap<usize, HashSet<Stream>>,
    issued: HashSet<usize>,
    violated: bool,
}

/// The buffers that an operation uses, in the order in which their lives begin and end.
fn buffers(work: &Work) -> Vec<(Buffer, bool)> {
    match work {
        Work::Run { reads, writes, .. } => {
            let only_read = reads.iter().filter(|buffer| !writes.contains(buffer));
            only_read
                .map(|&buffer| (buffer, false))
                .chain(writes.iter().map(|&buffer| (buffer, true)))
                .collect()
        }
        Work::Copy { buffer, copy, within, .. } => [(*buffer, false), (*copy, true)]
            .into_iter()
            .chain(within.map(|memory| (memory, false)))
            .collect(),
        _ => Vec::new(),
    }
}

impl<'a> Model<'a> {
    fn new(plan: &'a StreamPlan) -> Self {
        let (mut current, mut lives, mut owners) = (HashMap::new(), Vec::new(), Vec::new());
        let mut uses = Vec::new();
        for (index, operation) in plan.operations().iter().enumerate() {
            let place = match operation.work {
                Work::Run { stream, .. } => stream,
                Work::Copy { from, to, .. } => to.or(from),
                _ => None,
            };
            let mut mine = Vec::new();
            for (buffer, written) in buffers(&operation.work) {
                let life = *current.entry(buffer).or_insert_with(|| {
                    lives.push(Vec::new());
                    // A copy to the host is in memory of the host.
                    owners.push(if matches!(operation.work, Work::Copy { to: None, .. }) {
                        None
                    } else {
                        place
                    });
                    lives.len() - 1
                });
                let place = match operation.work {
                    Work::Copy { from: Some(from), .. } if !written => Some(from),
                    _ => place,
                };
                lives[life].push((index, written, place));
                mine.push((life, written));
            }
            match operation.work {
                Work::Release { buffer } => mine.extend(current.remove(&buffer).map(|life| (life, true))),
                Work::Share { buffer, .. } => mine.extend(current.get(&buffer).map(|&life| (life, false))),
                _ => {}
            }
            uses.push(mine);
        }
        Self {
            operations: plan.operations(),
            uses,
            lives,
            owners,
            done: HashSet::new(),
            queues: plan.streams().into_iter().map(|stream| (stream, VecDeque::new())).collect(),
            recorded: HashMap::new(),
            records_done: HashSet::new(),
            posted: HashSet::new(),
            shared: HashMap::new(),
            issued: HashSet::new(),
            violated: false,
        }
    }

    /// Whether something conflicts when `held` is held back.
    fn conflicts(mut self, held: usize, before_issue: bool) -> bool {
        let hosts: HashSet<_> = self.operations.iter().map(|operation| operation.host).collect();
        let streams: Vec<_> = self.queues.keys().copied().collect();
        let mut heads: HashMap<Host, usize> = hosts.iter().map(|&host| (host, 0)).collect();
        loop {
            let mut moved = false;
            for host in &hosts {
                while let Some(next) = self.next_of(*host, heads[host]) {
                    if (before_issue && next == held) || !self.issue(next, held) {
                        break;
                    }
                    heads.insert(*host, next + 1);
                    moved = true;
                }
            }
            for &stream in &streams {
                while self.advance(stream, held) {
                    moved = true;
                }
            }
            if !moved {
                return self.violated;
            }
        }
    }

    fn next_of(&self, host: Host, from: usize) -> Option<usize> {
        (from..self.operations.len()).find(|&index| self.operations[index].host == host)
    }

    fn tell(&mut self, stream: Stream, item: Item) {
        self.queues.get_mut(&stream).unwrap().push_back(item);
    }

    /// The host issues an operation, if it need not wait.
    fn issue(&mut self, index: usize, held: usize) -> bool {
        let uses = self.uses[index].clone();
        match &self.operations[index].work {
            Work::Take(message) if !self.posted.contains(message) => return false,
            Work::Wait { stream: None, event }
                if self.recorded.get(event).is_some_and(|record| !self.records_done.contains(record)) =>
            {
                return false;
            }
            Work::Run { stream: None, .. } if index == held => return false,
            Work::Run { stream: None, .. } => self.use_memory(index, &uses),
            Work::Run { stream: Some(stream), .. } => {
                self.tell(*stream, Item::Use { operation: index, uses });
            }
            Work::Copy { from: Some(from), to: Some(to), .. } => {
                self.tell(*from, Item::Meet { operation: index, uses: uses.clone(), other: *to });
                self.tell(*to, Item::Meet { operation: index, uses, other: *from });
            }
            Work::Copy { from, to, .. } => {
                self.tell(from.or(*to).unwrap(), Item::Use { operation: index, uses });
            }
            Work::Record { stream, event } => {
                self.recorded.insert(*event, index);
                self.tell(*stream, Item::Done { record: index });
            }
            Work::Wait { stream: Some(stream), event } => {
                if let Some(&record) = self.recorded.get(event) {
                    self.tell(*stream, Item::Await { record });
                }
            }
            Work::Share { stream, .. } => {
                for (life, _) in uses {
                    self.shared.entry(life).or_default().insert(*stream);
                }
            }
            Work::Release { .. } => {
                for (life, _) in uses {
                    self.violated |= self.lives[life].iter().any(|(index, ..)| !self.issued.contains(index));
                    let exempt = self.shared.get(&life).cloned().unwrap_or_default();
                    if let Some(owner) = self.owners[life] {
                        self.tell(owner, Item::Reuse { life, exempt });
                    }
                }
            }
            Work::Post(message) => {
                self.posted.insert(*message);
            }
            Work::Take(_) | Work::Wait { .. } => {}
        }
        self.issued.insert(index);
        true
    }

    /// A stream does the next thing that it was told, if it can.
    fn advance(&mut self, stream: Stream, held: usize) -> bool {
        let Some(item) = self.queues.get_mut(&stream).unwrap().pop_front() else { return false };
        let can = match &item {
            Item::Use { operation, .. } => *operation != held,
            Item::Await { record } => self.records_done.contains(record),
            Item::Meet { operation, other, .. } => {
                let there = self.queues[other].front();
                let is_there = matches!(there, Some(Item::Meet { operation: with, .. }) if with == operation);
                *operation != held && (is_there || self.done.contains(operation))
            }
            Item::Done { .. } | Item::Reuse { .. } => true,
        };
        if !can {
            self.queues.get_mut(&stream).unwrap().push_front(item);
            return false;
        }
        match item {
            Item::Meet { operation, .. } if self.done.contains(&operation) => {}
            Item::Use { operation, uses } | Item::Meet { operation, uses, .. } => {
                self.use_memory(operation, &uses);
            }
            Item::Done { record } => {
                self.records_done.insert(record);
            }
            Item::Reuse { life, exempt } => {
                let late = |&&(index, _, place): &&(usize, bool, Option<Stream>)| {
                    !self.done.contains(&index) && place.is_none_or(|place| !exempt.contains(&place))
                };
                self.violated |= self.lives[life].iter().find(late).is_some();
            }
            Item::Await { .. } => {}
        }
        true
    }

    fn use_memory(&mut self, operation: usize, uses: &[(usize, bool)]) {
        for &(life, written) in uses {
            let earlier = self.lives[life].iter().take_while(|(index, ..)| *index < operation);
            let conflict = |&&(index, other, _): &&(usize, bool, Option<Stream>)| {
                (written || other) && !self.done.contains(&index)
            };
            self.violated |= earlier.clone().any(|entry| conflict(&entry));
        }
        self.done.insert(operation);
    }
}

/// Whether anything can go wrong, found by holding back each operation in turn.
fn can_go_wrong(plan: &StreamPlan) -> bool {
    (0..plan.operations().len())
        .any(|held| [false, true].into_iter().any(|before| Model::new(plan).conflicts(held, before)))
}

// ---- properties

proptest! {
    #[test]
    fn plans_are_in_order(pipeline in pipelines(1..9, 0..6), m in 1usize..9, options in options()) {
        let plan = plan(&pipeline, m, options);
        prop_assert_eq!(plan.verify(), Ok(()), "{}", plan);
    }

    /// Invariant 7 of the lowering.
    #[test]
    fn nothing_can_be_left_out(pipeline in pipelines(1..6, 0..4), m in 1usize..4, options in options()) {
        let plan = plan(&pipeline, m, options);
        for index in ordering(&plan) {
            let fault = without(&plan, &[index]).verify();
            prop_assert!(matches!(fault, Err(Error::Hazard(_))), "{index}: {}\n{plan}", plan.operations()[index]);
        }
    }

    #[test]
    fn nothing_can_be_left_out_of_a_large_plan(
        pipeline in pipelines(5..17, 0..9), m in 4usize..33, options in options(), random in any::<prop::sample::Index>()
    ) {
        let plan = plan(&pipeline, m, options);
        let orders = ordering(&plan);
        if !orders.is_empty() {
            let index = orders[random.index(orders.len())];
            prop_assert!(without(&plan, &[index]).verify().is_err(), "{index}: {}", plan.operations()[index]);
        }
    }

    #[test]
    fn the_detector_agrees_with_a_model(
        pipeline in pipelines(1..5, 0..3),
        m in 1usize..3,
        options in options(),
        gone in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let plan = plan(&pipeline, m, options);
        let orders = ordering(&plan);
        let gone: Vec<_> = gone.iter().filter(|_| !orders.is_empty()).map(|i| orders[i.index(orders.len())]).collect();
        let changed = without(&plan, &gone);
        prop_assert_eq!(changed.verify().is_err(), can_go_wrong(&changed), "{:?} {}", changed.verify(), changed);
    }
}

// ---- skip connections

proptest! {
    #[test]
    fn a_skip_and_its_gradient_are_copied_once_and_straight(
        pipeline in pipelines(2..9, 1..6), m in 1usize..5, options in options()
    ) {
        let plan = plan(&pipeline, m, options);
        let (devices, skips) = &pipeline;
        for (k, &(from, to)) in (0..).zip(skips) {
            let crosses = devices[from as usize] != devices[to as usize];
            for i in 0..u32::try_from(m).unwrap() {
                let copies = |wanted: Buffer| {
                    plan.operations().iter().filter(move |o| matches!(o.work, Work::Copy { buffer, .. } if buffer == wanted))
                };
                for (buffer, from, to, exists) in [
                    (Buffer::Skip(k, i), from, to, crosses),
                    (Buffer::SkipGradient(k, i), to, from, crosses && options.backward),
                ] {
                    prop_assert_eq!(copies(buffer).count(), usize::from(exists), "{}\n{}", buffer, plan);
                    for copy in copies(buffer) {
                        prop_assert_eq!(copy.host, Host::Lane(to));
                        let Work::Copy { from: sending, to: receiving, .. } = copy.work else { unreachable!() };
                        let end = |stage: u32| devices[stage as usize].map(|device| Stream::Copy { from, to, device });
                        prop_assert_eq!((sending, receiving), (end(from), end(to)));
                    }
                }
            }
        }
    }
}

#[test]
fn a_skip_past_a_partition_goes_by_a_stream_of_its_own() {
    let pipeline = (vec![Some(0), Some(1), Some(2)], vec![(0, 2)]);
    let text = plan(&pipeline, 1, Gpipe { backward: false, ..Gpipe::default() }).to_string();
    let lines: Vec<_> = text
        .lines()
        .filter(|line| ["skip", "0>2", "for e7"].iter().any(|part| line.contains(part)))
        .collect();
    assert_eq!(
        lines,
        [
            "lane 0 | 0F0 | run on compute[0]@0: reads input state[0]; writes value[0,0] skip[0,0]",
            "lane 2 | 2F0 | wait on copy[0>2]@0 for e3",
            "lane 2 | 2F0 | share skip[0,0] with copy[0>2]@0",
            "lane 2 | 2F0 | copy skip[0,0] to skip_copy[0,0] on copy[0>2]@0 > copy[0>2]@2",
            "lane 2 | 2F0 | record e7 on copy[0>2]@2",
            "lane 2 | 2F0 | wait on compute[2]@2 for e7",
            "lane 2 | 2F0 | share skip_copy[0,0] with compute[2]@2",
            "lane 2 | 2F0 | run on compute[2]@2: reads value_copy[2,0] state[2] skip_copy[0,0]; \
             writes value[2,0] value_copy[2,0] skip_copy[0,0]",
            "lane 2 | 2F0 | release skip[0,0]",
            "lane 2 | 2F0 | release skip_copy[0,0]",
        ]
    );
}

#[test]
fn a_skip_that_leads_nowhere_is_refused() {
    let schedule = make_gpipe(2, 1, Gpipe::default()).unwrap();
    for (from, to) in [(1, 0), (1, 1), (0, 2)] {
        let fault = plan_streams(&schedule, &[Some(0); 2], &[(0, 1), (from, to)]);
        assert_eq!(fault, Err(Error::SkipNotForward { skip: 1, from, to, stages: 2 }));
    }
}
