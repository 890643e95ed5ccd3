//! From a schedule and the devices of its stages to what each host tells which stream.
//!
//! 1. Each stage on a device has a stream of its own. Each pair of neighbouring stages on different devices has a stream for
//!    its copies in each direction, with an end on each of the two devices, so that no copy waits for another pair's, nor for
//!    computation that it does not need.
//! 2. A value is copied by the lane that needs it. A stream waits for the last operation that wrote what it reads: for
//!    the stage before it, or the copy.
//! 3. In front of each half, a device's streams wait for the caller's: the first stage that works there does, and the
//!    others by way of it, except for a recomputation, which waits for no other stage.
//! 4. Behind the forward, the caller's stream of a device waits for the last stage there, which has waited for all others.
//!    Behind the backward it waits for each partition by itself, as soon as that has its gradients.
//! 5. A copy to the host is waited for by the lane before it computes. A copy from the host may still be reading, when the
//!    forward returns, what is the caller's: so the caller waits for the last of them.
//! 6. Memory that a stream uses and another one owns is shared with it, unless whoever releases it has been waiting for
//!    that use anyway.
//! 7. Nothing is waited for or shared twice: each single such operation is needed.
//! 8. A skip connection goes straight from the stage that stashes to the stage that pops, and its gradient back, by a
//!    stream for that pair; between neighbours it goes with the value. What passed the stages in between is later than the
//!    skip, so that a stage on the same device need not wait for it, nor a host that has waited for one in between.

use std::collections::BTreeMap;

use super::plan::{Buffer, Event, Half, Host, Message, Operation, Stream, StreamPlan, Work};
use crate::error::{Error, Result};
use crate::schedule::{Action, At, Kind, Schedule};

/// The operations that carry `schedule` out in one process, all forwards before all else; stage `j` is on the accelerator
/// `devices[j]`, or on the CPU if that is `None`. Each of `skips` is a pair of the stage that stashes and a later one that
/// pops.
///
/// # Errors
/// Those of [`Schedule::verify`]; [`Error::DevicesDiffer`] unless there is a device for each stage;
/// [`Error::SkipNotForward`] for another pair; [`Error::SplitBackward`] for a schedule that has other actions than F, R
/// and B.
pub fn plan_streams(
    schedule: &Schedule,
    devices: &[Option<u32>],
    skips: &[(u32, u32)],
) -> Result<StreamPlan> {
    let stages = schedule.stages();
    if devices.len() != stages {
        return Err(Error::DevicesDiffer { devices: devices.len(), stages });
    }
    let is_wrong = |&(_, &(from, to)): &(usize, &(u32, u32))| from >= to || to as usize >= stages;
    if let Some((skip, &(from, to))) = skips.iter().enumerate().find(is_wrong) {
        return Err(Error::SkipNotForward { skip, from, to, stages });
    }
    let ordered = schedule.in_order()?;
    let unknown =
        |action: &Action| !matches!(action.kind(), Kind::Forward | Kind::Recompute | Kind::Backward);
    if let Some(action) = ordered.iter().copied().find(unknown) {
        let rank = schedule.rank_of(action.stage()).unwrap_or_default();
        let position = schedule.find(rank, action).unwrap_or_default();
        return Err(Error::SplitBackward { at: At { rank, position, action } });
    }
    let tasks: Vec<_> = ordered.iter().filter_map(|&action| Task::of(schedule, action)).collect();
    let (forwards, backwards): (Vec<_>, Vec<_>) =
        tasks.into_iter().partition(|task| task.kind == Kind::Forward);

    let mut lowering = Lowering::new(schedule, devices, skips, &backwards);
    lowering.enter_forward();
    lowering.half(Half::Forward, &forwards);
    lowering.exit_forward();
    if schedule.backward() {
        lowering.enter_backward();
        lowering.half(Half::Backward, &backwards);
        lowering.exit_backward();
    }
    Ok(StreamPlan::new(lowering.operations))
}

/// An action with its parts at hand.
#[derive(Clone, Copy)]
struct Task {
    action: Action,
    kind: Kind,
    rank: u32,
    stage: u32,
    microbatch: u32,
}

impl Task {
    fn of(schedule: &Schedule, action: Action) -> Option<Self> {
        Some(Self {
            action,
            kind: action.kind(),
            rank: u32::try_from(schedule.rank_of(action.stage())?).ok()?,
            stage: u32::try_from(action.stage()).ok()?,
            microbatch: u32::try_from(action.microbatch()?).ok()?,
        })
    }
}

/// What is known of a stage.
#[derive(Clone, Copy, Default)]
struct Stage {
    device: Option<u32>,
    rank: u32,
    /// Whether it is the first, and the last, on its device.
    is_first: bool,
    is_last: bool,
    /// Whether a stage on the CPU comes later, so that its lane has waited for all that came before.
    cpu_follows: bool,
    /// The latest event behind its computation.
    computed: Option<Event>,
    /// How many of its forwards and backwards are left.
    forwards: u32,
    backwards: u32,
}

/// What stage `from` wrote into `source` and another stage reads from `used`, which is the same where nothing is copied.
#[derive(Clone, Copy)]
struct Arrival {
    from: u32,
    source: Buffer,
    used: Buffer,
}

struct Lowering {
    operations: Vec<Operation>,
    stages: Vec<Stage>,
    /// From which stage to which.
    skips: Vec<(u32, u32)>,
    /// Behind the latest copy that each pair of stages has made from memory of the host in forward.
    read_host: BTreeMap<(u32, u32), Event>,
    /// Every device once, by the first stage on it.
    devices: Vec<u32>,
    /// By device, the caller's event in front of the half.
    entered: Vec<(u32, Event)>,
    /// Behind the computation of each pair of stage and micro-batch, in the current half.
    computed: Vec<Option<Event>>,
    recomputed: Vec<bool>,
    /// By stage: whether its part of the current half has begun.
    begun: Vec<bool>,
    microbatches: u32,
    backward: bool,
    events: u32,
    host: Host,
    action: Option<Action>,
}

impl Lowering {
    fn new(schedule: &Schedule, devices: &[Option<u32>], skips: &[(u32, u32)], backwards: &[Task]) -> Self {
        let microbatches = u32::try_from(schedule.microbatches()).unwrap_or(u32::MAX);
        let mut lowering = Self {
            operations: Vec::new(),
            stages: vec![Stage::default(); devices.len()],
            skips: skips.to_vec(),
            read_host: BTreeMap::new(),
            devices: Vec::new(),
            entered: Vec::new(),
            computed: vec![None; schedule.stages() * schedule.microbatches()],
            recomputed: vec![false; schedule.stages() * schedule.microbatches()],
            begun: vec![false; devices.len()],
            microbatches,
            backward: schedule.backward(),
            events: 0,
            host: Host::Caller,
            action: None,
        };
        let mut seen = std::collections::HashSet::new();
        for (index, (stage, &device)) in lowering.stages.iter_mut().zip(devices).enumerate() {
            stage.device = device;
            stage.forwards = microbatches;
            stage.rank = u32::try_from(schedule.rank_of(index).unwrap_or_default()).unwrap_or_default();
            if let Some(device) = device.filter(|&device| seen.insert(device)) {
                stage.is_first = true;
                lowering.devices.push(device);
            }
        }
        seen.clear();
        let mut cpu_follows = false;
        for stage in lowering.stages.iter_mut().rev() {
            stage.is_last = stage.device.is_some_and(|device| seen.insert(device));
            stage.cpu_follows = cpu_follows;
            cpu_follows |= stage.device.is_none();
        }
        for task in backwards {
            let cell = lowering.cell(task.stage, task.microbatch);
            if task.kind == Kind::Recompute {
                if let Some(entry) = lowering.recomputed.get_mut(cell) {
                    *entry = true;
                }
            } else if let Some(stage) = lowering.stages.get_mut(task.stage as usize) {
                stage.backwards += 1;
            }
        }
        lowering
    }

    // ---- small things

    fn emit(&mut self, work: Work) {
        self.operations.push(Operation { host: self.host, action: self.action, work });
    }

    fn cell(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.microbatches as usize + microbatch as usize
    }

    fn stage(&self, stage: u32) -> Stage {
        self.stages.get(stage as usize).copied().unwrap_or_default()
    }

    fn last(&self) -> u32 {
        u32::try_from(self.stages.len() - 1).unwrap_or(u32::MAX)
    }

    fn compute(&self, stage: u32) -> Option<Stream> {
        self.stage(stage).device.map(|device| Stream::Compute { stage, device })
    }

    /// The caller's stream on a stage's device.
    fn caller(&self, stage: u32) -> Option<Stream> {
        self.stage(stage).device.map(Stream::Caller)
    }

    fn record(&mut self, stream: Stream) -> Event {
        let event = Event(self.events);
        self.events += 1;
        self.emit(Work::Record { stream, event });
        event
    }

    /// The stages on a device, or on the CPU.
    fn stages_on(&self, device: Option<u32>) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.stages).filter(move |(_, stage)| stage.device == device).map(|(index, _)| index)
    }

    // ---- the caller

    fn as_caller(&mut self) {
        (self.host, self.action) = (Host::Caller, None);
    }

    /// The caller's own work between the halves: it may read and write whatever is its own.
    fn callers_work(
        &mut self,
        reads: &[Buffer],
        reads_on: Option<u32>,
        writes: &[Buffer],
        writes_on: Option<u32>,
    ) {
        let devices: Vec<_> = self.devices.iter().map(|&device| Some(device)).chain([None]).collect();
        for device in devices {
            let states: Vec<_> = self.stages_on(device).map(Buffer::State).collect();
            let mut written = if device == writes_on { writes.to_vec() } else { Vec::new() };
            written.extend(states);
            let read = if device == reads_on { reads.to_vec() } else { Vec::new() };
            if !(written.is_empty() && read.is_empty()) {
                self.emit(Work::Run { stream: device.map(Stream::Caller), reads: read, writes: written });
            }
        }
    }

    /// A mark in the caller's stream of each device, and the start of the lanes. Invariant 3.
    fn enter(&mut self, half: Half, given: Buffer, taker: u32, share: bool) {
        // First where the given is, which in a backward is elsewhere known than the rest.
        let mut devices = self.devices.clone();
        devices.sort_by_key(|&device| Some(device) != self.stage(taker).device);
        self.entered.clear();
        for device in devices {
            let event = self.record(Stream::Caller(device));
            self.entered.push((device, event));
            if let Some(stream) = self.compute(taker).filter(|stream| share && stream.device() == device) {
                self.emit(Work::Share { buffer: given, stream });
            }
        }
        self.emit(Work::Post(Message::Begin(half)));
        self.begun.fill(false);
        self.computed.fill(None);
    }

    fn enter_forward(&mut self) {
        self.as_caller();
        self.callers_work(&[], None, &[Buffer::Input], self.stage(0).device);
        // Without a backward the caller releases its input, after it has waited for the lanes.
        self.enter(Half::Forward, Buffer::Input, 0, self.backward);
    }

    fn exit_forward(&mut self) {
        self.as_caller();
        let last = self.last();
        self.take_ends(Half::Forward);
        let outputs: Vec<_> = (0..self.microbatches).map(|i| Buffer::Value(last, i)).collect();
        for i in 0..self.microbatches {
            self.emit(Work::Take(Message::Value(last, i)));
        }
        for index in 0..=last {
            let stage = self.stage(index);
            // Invariant 4, and 5: from the last CPU on, nothing has been waited for.
            if let Some(event) = stage.computed.filter(|_| stage.is_last && !stage.cpu_follows) {
                self.emit(Work::Wait { stream: self.caller(index), event });
            }
            let pairs = self.read_host.iter().filter(|((_, to), _)| *to == index && !stage.cpu_follows);
            let events: Vec<_> = pairs.map(|(_, &event)| event).collect();
            for event in events {
                self.emit(Work::Wait { stream: None, event });
            }
        }
        if let Some(stream) = self.caller(last) {
            for &buffer in &outputs {
                self.emit(Work::Share { buffer, stream });
            }
        }
        let (first, on) = (self.stage(0).device, self.stage(last).device);
        self.callers_work(&outputs, on, &[Buffer::Input], first);
        for buffer in outputs {
            self.emit(Work::Release { buffer });
        }
        if !self.backward {
            self.emit(Work::Release { buffer: Buffer::Input });
        }
    }

    fn enter_backward(&mut self) {
        self.as_caller();
        let last = self.last();
        self.emit(Work::Run {
            stream: self.caller(last),
            reads: Vec::new(),
            writes: vec![Buffer::OutputGradient],
        });
        self.enter(Half::Backward, Buffer::OutputGradient, last, true);
    }

    fn exit_backward(&mut self) {
        self.as_caller();
        for index in (0..=self.last()).rev() {
            self.emit(Work::Take(Message::End(Half::Backward, self.stage(index).rank)));
            let mut taken = vec![Buffer::ParameterGradient(index)];
            if index == 0 {
                for i in 0..self.microbatches {
                    self.emit(Work::Take(Message::Gradient(0, i)));
                    taken.push(Buffer::Gradient(0, i));
                }
            }
            let stream = self.caller(index);
            if let (Some(event), Some(stream)) = (self.stage(index).computed, stream) {
                self.emit(Work::Wait { stream: Some(stream), event });
                for &buffer in &taken {
                    self.emit(Work::Share { buffer, stream });
                }
            }
            self.emit(Work::Run { stream, reads: taken.clone(), writes: vec![] });
            for buffer in taken {
                self.emit(Work::Release { buffer });
            }
        }
        self.callers_work(&[], None, &[], None);
    }

    fn take_ends(&mut self, half: Half) {
        let mut ranks: Vec<_> = self.stages.iter().map(|stage| stage.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            self.emit(Work::Take(Message::End(half, rank)));
        }
    }

    // ---- the lanes

    fn half(&mut self, half: Half, tasks: &[Task]) {
        let ranks = self.stages.iter().map(|stage| stage.rank as usize + 1).max().unwrap_or_default();
        let (mut left, mut begun) = (vec![0usize; ranks], vec![false; ranks]);
        for task in tasks {
            if let Some(count) = left.get_mut(task.rank as usize) {
                *count += 1;
            }
        }
        for task in tasks {
            let rank = task.rank as usize;
            (self.host, self.action) = (Host::Lane(task.rank), Some(task.action));
            if let Some(begun) = begun.get_mut(rank).filter(|begun| !**begun) {
                *begun = true;
                self.emit(Work::Take(Message::Begin(half)));
            }
            match task.kind {
                Kind::Forward => self.forward(task),
                Kind::Recompute => self.recompute(task),
                _ => self.whole_backward(task),
            }
            if let Some(count) = left.get_mut(rank) {
                *count -= 1;
                if *count == 0 {
                    self.emit(Work::Post(Message::End(half, task.rank)));
                }
            }
        }
    }

    /// Invariant 3: what `stage` does in front of its first action of a half.
    fn begin(&mut self, index: u32, waits: bool) {
        let first = self.begun.get_mut(index as usize).is_some_and(|begun| !std::mem::replace(begun, true));
        let device = self.stage(index).device;
        let entered = self.entered.iter().find(|(known, _)| Some(*known) == device);
        if let Some(&(_, event)) = entered.filter(|_| first && waits) {
            self.emit(Work::Wait { stream: self.compute(index), event });
        }
    }

    /// What a stage reads of the stage before it.
    fn input_of(&self, stage: u32, microbatch: u32) -> Buffer {
        match stage.checked_sub(1) {
            None => Buffer::Input,
            Some(before) if self.stage(before).device == self.stage(stage).device => {
                Buffer::Value(before, microbatch)
            }
            Some(_) => Buffer::ValueCopy(stage, microbatch),
        }
    }

    fn forward(&mut self, task: &Task) {
        let Task { stage, microbatch, .. } = *task;
        self.begin(stage, self.stage(stage).is_first);
        let input = self.input_of(stage, microbatch);
        let popped = self.popped(stage, microbatch);
        if let Some(before) = stage.checked_sub(1) {
            self.emit(Work::Take(Message::Value(before, microbatch)));
            let value = Arrival { from: before, source: Buffer::Value(before, microbatch), used: input };
            self.arrive(stage, microbatch, &[&[value], popped.as_slice()].concat());
        }
        let mut writes = vec![Buffer::Value(stage, microbatch)];
        if input != Buffer::Input {
            writes.push(input); // layers may work in place; of the mini-batch each task has a part of its own
        }
        writes.extend(popped.iter().map(|skip| skip.used));
        writes.extend(self.stashed(stage).map(|skip| Buffer::Skip(skip, microbatch)));
        let is_recomputed = self.recomputed.get(self.cell(stage, microbatch)).is_some_and(|&entry| entry);
        if self.backward && !is_recomputed {
            writes.push(Buffer::Saved(stage, microbatch));
        }
        let mut reads = vec![input, Buffer::State(stage)];
        reads.extend(popped.iter().map(|skip| skip.used));
        self.emit(Work::Run { stream: self.compute(stage), reads, writes });
        self.release_source(Buffer::Value(stage.wrapping_sub(1), microbatch), input, stage > 0);
        for skip in &popped {
            self.release_source(skip.source, skip.used, true);
        }
        if !self.backward && stage > 0 {
            self.emit(Work::Release { buffer: input });
            for skip in &popped {
                self.emit(Work::Release { buffer: skip.used });
            }
        }
        let left = self.stages.get_mut(stage as usize).map_or(0, |entry| {
            entry.forwards = entry.forwards.saturating_sub(1);
            entry.forwards
        });
        self.mark(task, stage < self.last() || left == 0);
        self.emit(Work::Post(Message::Value(stage, microbatch)));
    }

    fn recompute(&mut self, task: &Task) {
        let Task { stage, microbatch, .. } = *task;
        self.begin(stage, true);
        let mut reads = vec![self.input_of(stage, microbatch), Buffer::State(stage)];
        reads.extend(self.popped(stage, microbatch).iter().map(|skip| skip.used));
        self.emit(Work::Run {
            stream: self.compute(stage),
            reads,
            writes: vec![Buffer::Saved(stage, microbatch)],
        });
    }

    fn whole_backward(&mut self, task: &Task) {
        let Task { stage, microbatch, .. } = *task;
        let last = self.last();
        self.begin(stage, self.stage(stage).is_last);
        let (after, arrived) = (stage.wrapping_add(1), Buffer::Gradient(stage.wrapping_add(1), microbatch));
        let gradient = match () {
            () if stage == last => Buffer::OutputGradient,
            () if self.stage(after).device == self.stage(stage).device => arrived,
            () => Buffer::GradientCopy(stage, microbatch),
        };
        let stashed = self.gradients_of_stashed(stage, microbatch);
        let popped = self.popped(stage, microbatch);
        if stage < last {
            self.emit(Work::Take(Message::Gradient(after, microbatch)));
            let value = Arrival { from: after, source: arrived, used: gradient };
            self.arrive(stage, microbatch, &[&[value], stashed.as_slice()].concat());
        }
        let (saved, input) = (Buffer::Saved(stage, microbatch), self.input_of(stage, microbatch));
        let mut reads = vec![gradient, saved, input, Buffer::State(stage)];
        reads.extend(stashed.iter().chain(&popped).map(|skip| skip.used));
        let mut writes = vec![Buffer::Gradient(stage, microbatch), Buffer::ParameterGradient(stage)];
        writes.extend(self.numbers_of_popped(stage).map(|skip| Buffer::SkipGradient(skip, microbatch)));
        self.emit(Work::Run { stream: self.compute(stage), reads, writes });
        let left = self.stages.get_mut(stage as usize).map_or(0, |entry| {
            entry.backwards = entry.backwards.saturating_sub(1);
            entry.backwards
        });
        self.emit(Work::Release { buffer: saved });
        self.release_source(arrived, gradient, stage < last);
        if stage < last || left == 0 {
            self.emit(Work::Release { buffer: gradient });
        }
        if stage > 0 || left == 0 {
            self.emit(Work::Release { buffer: input });
        }
        for skip in &stashed {
            self.release_source(skip.source, skip.used, true);
        }
        for skip in stashed.iter().chain(&popped) {
            self.emit(Work::Release { buffer: skip.used });
        }
        self.mark(task, stage > 0 || left == 0);
        self.emit(Work::Post(Message::Gradient(stage, microbatch)));
    }

    /// Behind a computation, if somebody waits for it.
    fn mark(&mut self, task: &Task, wanted: bool) {
        let Some(stream) = self.compute(task.stage).filter(|_| wanted) else { return };
        let event = self.record(stream);
        let cell = self.cell(task.stage, task.microbatch);
        if let Some(entry) = self.computed.get_mut(cell) {
            *entry = Some(event);
        }
        if let Some(stage) = self.stages.get_mut(task.stage as usize) {
            stage.computed = Some(event);
        }
    }

    /// Invariant 6: the original of a copy is not needed any more.
    fn release_source(&mut self, source: Buffer, used: Buffer, exists: bool) {
        if exists && source != used {
            self.emit(Work::Release { buffer: source });
        }
    }

    /// Makes what other stages wrote readable for stage `to`. Invariants 2, 5, 6 and 8.
    fn arrive(&mut self, to: u32, microbatch: u32, arrivals: &[Arrival]) {
        let mut origins: Vec<u32> = Vec::new();
        for arrival in arrivals {
            if !origins.contains(&arrival.from) {
                origins.push(arrival.from);
            }
        }
        let groups: Vec<_> = origins
            .into_iter()
            .map(|from| {
                let group: Vec<_> = arrivals.iter().copied().filter(|a| a.from == from).collect();
                (self.copy_all(to, microbatch, from, &group), group)
            })
            .collect();
        let reader = self.compute(to);
        for (ready, group) in groups {
            if let Some(event) = ready {
                self.emit(Work::Wait { stream: reader, event });
            }
            if let Some(stream) = reader {
                for arrival in group {
                    self.emit(Work::Share { buffer: arrival.used, stream });
                }
            }
        }
    }

    /// Copies what stage `from` wrote, where stage `to` is elsewhere; gives what is to be waited for.
    fn copy_all(&mut self, to: u32, microbatch: u32, from: u32, group: &[Arrival]) -> Option<Event> {
        let written = self.computed.get(self.cell(from, microbatch)).copied().flatten();
        let is_neighbour = from.abs_diff(to) == 1;
        if self.stage(from).device == self.stage(to).device {
            return written.filter(|_| is_neighbour);
        }
        let end = |stage: u32| self.stage(stage).device.map(|device| Stream::Copy { from, to, device });
        let (sending, receiving) = (end(from), end(to));
        let mut between = from.min(to) + 1..from.max(to);
        let host_has_waited = between.any(|stage| self.stage(stage).device.is_none());
        if let (Some(event), Some(stream)) = (written.filter(|_| !host_has_waited), sending) {
            self.emit(Work::Wait { stream: Some(stream), event });
        }
        for &Arrival { source, used, .. } in group {
            if let (Some(stream), Some(_)) = (sending, receiving) {
                self.emit(Work::Share { buffer: source, stream });
            }
            let within = match source {
                Buffer::Value(..) | Buffer::Skip(..) if sending.is_none() => {
                    let all_cpu =
                        self.stages.iter().take(from as usize + 1).all(|stage| stage.device.is_none());
                    Some(if all_cpu { Buffer::Input } else { Buffer::State(from) })
                }
                _ => None,
            };
            self.emit(Work::Copy { buffer: source, copy: used, from: sending, to: receiving, within });
            if within.is_some() {
                self.read_host.insert((from, to), Event(self.events)); // the one that is recorded next
            }
        }
        receiving.or(sending).map(|end| self.record(end))
    }

    // ---- skip connections

    fn stashed(&self, stage: u32) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.skips).filter(move |(_, (from, _))| *from == stage).map(|(skip, _)| skip)
    }

    fn numbers_of_popped(&self, stage: u32) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.skips).filter(move |(_, (_, to))| *to == stage).map(|(skip, _)| skip)
    }

    fn crosses(&self, skip: u32) -> ((u32, u32), bool) {
        let (from, to) = self.skips.get(skip as usize).copied().unwrap_or_default();
        ((from, to), self.stage(from).device != self.stage(to).device)
    }

    /// The skips that a stage pops.
    fn popped(&self, stage: u32, microbatch: u32) -> Vec<Arrival> {
        let arrival = |skip: u32| {
            let ((from, _), is_copied) = self.crosses(skip);
            let source = Buffer::Skip(skip, microbatch);
            let used = if is_copied { Buffer::SkipCopy(skip, microbatch) } else { source };
            Arrival { from, source, used }
        };
        self.numbers_of_popped(stage).map(arrival).collect()
    }

    /// The gradients of the skips that a stage stashed.
    fn gradients_of_stashed(&self, stage: u32, microbatch: u32) -> Vec<Arrival> {
        let arrival = |skip: u32| {
            let ((_, to), is_copied) = self.crosses(skip);
            let source = Buffer::SkipGradient(skip, microbatch);
            let used = if is_copied { Buffer::SkipGradientCopy(skip, microbatch) } else { source };
            Arrival { from: to, source, used }
        };
        self.stashed(stage).map(arrival).collect()
    }
}
