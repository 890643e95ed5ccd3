//! Whether the order of a stream plan is enough, however fast each host and each stream happens to be.
//!
//! What is certain to come before what:
//!
//! 1. A host issues its operations in order. What it takes, another has posted before; what it waits for is done.
//! 2. A stream works in the order in which it was told, and on nothing before it is told.
//! 3. A wait for an event holds back what its stream is told afterwards, until the stream of the event has done all that
//!    it was told before the record. The two ends of a copy between devices wait for each other.
//!
//! On that order the plan must satisfy:
//!
//! 4. What is read has been written before, and is written on again only after it has been read.
//! 5. When memory is released, whoever used it has done so before anything that its owner can do from then on, unless the
//!    allocator was told of the user. Memory of the host is exempt: torch's allocator for it knows of every copy.
//! 6. A wait is issued after the record (else it would wait for nothing), and operations of two hosts on one stream are
//!    issued in an order that does not depend on timing.
//!
//! Each host and stream has a clock, a vector with the latest tick that it is certain to follow of every other. So an
//! operation costs constant time, and at most one pass over a vector where it follows somebody else.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use super::plan::{Buffer, Event, Host, Message, Operation, Stream, StreamPlan, Work};
use crate::error::{Error, Result};
use crate::schedule::Action;

/// What carries work out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A host, as it issues.
    Host(Host),
    /// A stream of a device.
    Stream(Stream),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(_) => f.write_str("the host"),
            Self::Stream(stream) => stream.fmt(f),
        }
    }
}

/// An operation of a plan, seen from what it uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The index of the operation.
    pub operation: usize,
    /// Who issues it.
    pub host: Host,
    /// Within which action.
    pub action: Option<Action>,
    /// Where it is done.
    pub place: Place,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "on {} (operation {} of {}", self.place, self.operation, self.host)?;
        self.action.map_or(Ok(()), |action| write!(f, ", in {action}"))?;
        f.write_str(")")
    }
}

/// What may go wrong in a plan, with the two operations that nothing orders.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Hazard {
    /// Memory that is read before it is written, or after it is released.
    #[error("{buffer} is used {at}, but there is nothing in it: it is not written yet, or released")]
    Absent {
        /// The memory.
        buffer: Buffer,
        /// Its user.
        at: Use,
    },
    /// A read that may overtake the write.
    #[error("{buffer} is read {later}, which may come before it is written {earlier}")]
    ReadTooEarly {
        /// The memory.
        buffer: Buffer,
        /// The write.
        earlier: Use,
        /// The read.
        later: Use,
    },
    /// A write that may overtake a use.
    #[error("{buffer} is written {later}, which may come before it is used {earlier}")]
    WrittenTooEarly {
        /// The memory.
        buffer: Buffer,
        /// The use.
        earlier: Use,
        /// The write.
        later: Use,
    },
    /// Memory that its owner may use again while another stream still uses it.
    #[error(
        "{buffer} is released {later} to {owner}, which may use the memory again before it is used {earlier}: wait, or \
         share the memory"
    )]
    ReusedTooEarly {
        /// The memory.
        buffer: Buffer,
        /// The use.
        earlier: Use,
        /// The release.
        later: Use,
        /// Whose memory it is.
        owner: Place,
    },
    /// A wait that may be issued before its event is recorded, and then waits for nothing.
    #[error("the wait {at} for {event} may be issued before the event is recorded")]
    EventNotRecorded {
        /// The event.
        event: Event,
        /// The wait.
        at: Use,
    },
    /// Something that is taken but not posted before.
    #[error("{message} is taken {at}, but is not posted before")]
    MessageNotPosted {
        /// The message.
        message: Message,
        /// Who takes it.
        at: Use,
    },
    /// Two hosts that tell a stream something in an order that depends on timing.
    #[error("what is done {later} may be issued before what is done {earlier}")]
    IssuedInAnyOrder {
        /// The first.
        earlier: Use,
        /// The second.
        later: Use,
    },
}

impl StreamPlan {
    /// Says whether everything that has to be ordered is; see the invariants at the top of this file.
    ///
    /// # Errors
    /// [`Error::Hazard`] with the first pair of operations that nothing orders.
    pub fn verify(&self) -> Result<()> {
        let mut detector = Detector::new(self);
        let mut operations = self.operations().iter().enumerate();
        let fault = operations.try_for_each(|(index, operation)| detector.step(index, operation));
        fault.map_err(|hazard| Error::Hazard(Box::new(hazard)))
    }
}

type Found<T = ()> = std::result::Result<T, Hazard>;

/// By the index of a place: the latest of its ticks that is certain to be over.
type Clock = Vec<u32>;

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// A tick of a place.
#[derive(Clone, Copy)]
struct Tick {
    place: usize,
    at: u32,
}

impl Tick {
    fn is_before(self, clock: &Clock) -> bool {
        clock.get(self.place).is_some_and(|&known| self.at <= known)
    }
}

/// A use, when it is done and when it was issued.
#[derive(Clone, Copy)]
struct Access {
    done: Tick,
    issued: Tick,
    seen: Use,
}

/// Memory between its first write and its release.
struct Memory {
    owner: Access,
    write: Access,
    /// Since the last write, the last of each place.
    reads: Vec<Access>,
    shared: Vec<usize>,
}

#[derive(Default)]
struct PlaceState {
    clock: Clock,
    /// Of a stream: what it was told last.
    last: Option<Access>,
    /// Of a host: how often it has learnt from others.
    learnt: u64,
    /// Of a stream: how much of its last host's learning it knows.
    passed_on: u64,
}

/// A clock that others learn from, until all have.
struct Published {
    clock: Clock,
    issued: Tick,
    readers: usize,
}

struct Detector {
    indices: HashMap<Place, usize>,
    places: Vec<PlaceState>,
    memory: HashMap<Buffer, Memory>,
    events: HashMap<Event, Published>,
    messages: HashMap<Message, Published>,
    readers: (HashMap<Event, usize>, HashMap<Message, usize>),
}

impl Detector {
    fn new(plan: &StreamPlan) -> Self {
        let mut indices = HashMap::new();
        let mut readers = (HashMap::new(), HashMap::new());
        let streams = plan.streams().into_iter().map(Place::Stream);
        let hosts = plan.operations().iter().map(|operation| Place::Host(operation.host));
        for place in streams.chain(hosts) {
            let next = indices.len();
            indices.entry(place).or_insert(next);
        }
        for operation in plan.operations() {
            match operation.work {
                Work::Wait { event, .. } => *readers.0.entry(event).or_default() += 1,
                Work::Take(message) => *readers.1.entry(message).or_default() += 1,
                _ => {}
            }
        }
        let places = indices.len();
        let state = || PlaceState { clock: vec![0; places], ..PlaceState::default() };
        Self {
            indices,
            places: std::iter::repeat_with(state).take(places).collect(),
            memory: HashMap::new(),
            events: HashMap::new(),
            messages: HashMap::new(),
            readers,
        }
    }

    fn step(&mut self, index: usize, operation: &Operation) -> Found {
        let seen = |place| Use { operation: index, host: operation.host, action: operation.action, place };
        let host = Place::Host(operation.host);
        let issued = self.tick(self.index(host));
        let on = |stream: Option<Stream>| seen(stream.map_or(host, Place::Stream));
        match &operation.work {
            Work::Run { stream, reads, writes } => {
                let access = self.issue(on(*stream), issued)?;
                reads.iter().try_for_each(|&buffer| self.read(buffer, access))?;
                writes.iter().try_for_each(|&buffer| self.write(buffer, access))
            }
            Work::Copy { buffer, copy, from, to, within } => {
                let ends = [*from, *to].into_iter().flatten();
                let done = ends.map(|end| self.issue(on(Some(end)), issued)).collect::<Found<Vec<_>>>()?;
                self.meet(&done);
                // An end on the host does nothing: the other end reads or writes its memory.
                let (Some(&reader), Some(&writer)) = (done.first(), done.last()) else { return Ok(()) };
                [Some(*buffer), *within].into_iter().flatten().try_for_each(|b| self.read(b, reader))?;
                self.write(*copy, writer)?;
                if to.is_none()
                    && let Some(memory) = self.memory.get_mut(copy)
                {
                    memory.owner = Access { done: issued, issued, seen: on(None) };
                }
                Ok(())
            }
            Work::Record { stream, event } => {
                let access = self.issue(on(Some(*stream)), issued)?;
                if let Some(&readers) = self.readers.0.get(event) {
                    let clock = self.clock(access.done.place).clone();
                    self.events.insert(*event, Published { clock, issued, readers });
                }
                Ok(())
            }
            Work::Wait { stream, event } => {
                let access = self.issue(on(*stream), issued)?;
                let host = self.clock(issued.place);
                if !self.events.get(event).is_some_and(|record| record.issued.is_before(host)) {
                    return Err(Hazard::EventNotRecorded { event: *event, at: access.seen });
                }
                learn(&mut self.places, access.done.place, &mut self.events, *event);
                Ok(())
            }
            Work::Share { buffer, stream } => {
                let owned = self.memory.get_mut(buffer);
                let memory = owned.ok_or(Hazard::Absent { buffer: *buffer, at: on(None) })?;
                memory.shared.extend(self.indices.get(&Place::Stream(*stream)));
                Ok(())
            }
            Work::Release { buffer } => self.release(*buffer, issued, on(None)),
            Work::Post(message) => {
                if let Some(&readers) = self.readers.1.get(message) {
                    let clock = self.clock(issued.place).clone();
                    self.messages.insert(*message, Published { clock, issued, readers });
                }
                Ok(())
            }
            Work::Take(message) => {
                if !self.messages.contains_key(message) {
                    return Err(Hazard::MessageNotPosted { message: *message, at: on(None) });
                }
                learn(&mut self.places, issued.place, &mut self.messages, *message);
                Ok(())
            }
        }
    }

    // ---- clocks

    fn index(&self, place: Place) -> usize {
        self.indices.get(&place).copied().unwrap_or_default() // every place of the plan is there
    }

    fn clock(&self, place: usize) -> &Clock {
        static NONE: Clock = Vec::new();
        self.places.get(place).map_or(&NONE, |state| &state.clock)
    }

    fn tick(&mut self, place: usize) -> Tick {
        let entry = self.places.get_mut(place).and_then(|state| state.clock.get_mut(place));
        let at = entry.map_or(0, |tick| {
            *tick += 1;
            *tick
        });
        Tick { place, at }
    }

    /// A place is told something by a host. Invariants 2 and 6.
    fn issue(&mut self, seen: Use, issued: Tick) -> Found<Access> {
        let place = self.index(seen.place);
        if place == issued.place {
            return Ok(Access { done: issued, issued, seen });
        }
        let Ok([stream, host]) = self.places.get_disjoint_mut([place, issued.place]) else {
            return Ok(Access { done: issued, issued, seen });
        };
        let same_host = match stream.last {
            Some(last) if !last.issued.is_before(&host.clock) => {
                return Err(Hazard::IssuedInAnyOrder { earlier: last.seen, later: seen });
            }
            Some(last) => last.issued.place == issued.place,
            None => false,
        };
        if same_host && stream.passed_on == host.learnt {
            // All that the host knows by now, the stream knows already, but for the host's own progress.
            if let Some(entry) = stream.clock.get_mut(issued.place) {
                *entry = issued.at;
            }
        } else {
            join(&mut stream.clock, &host.clock);
            stream.passed_on = host.learnt;
        }
        let done = self.tick(place);
        let access = Access { done, issued, seen };
        if let Some(stream) = self.places.get_mut(place) {
            stream.last = Some(access);
        }
        Ok(access)
    }

    /// The ends of a copy wait for each other.
    fn meet(&mut self, ends: &[Access]) {
        let &[a, b] = ends else { return };
        if let Ok([first, second]) = self.places.get_disjoint_mut([a.done.place, b.done.place]) {
            join(&mut first.clock, &second.clock);
            second.clock.clone_from(&first.clock);
        }
    }

    // ---- memory

    /// Invariant 4.
    fn read(&mut self, buffer: Buffer, access: Access) -> Found {
        let clock = self.places.get(access.done.place).map(|state| &state.clock);
        let (Some(memory), Some(clock)) = (self.memory.get_mut(&buffer), clock) else {
            return Err(Hazard::Absent { buffer, at: access.seen });
        };
        if !memory.write.done.is_before(clock) {
            return Err(Hazard::ReadTooEarly { buffer, earlier: memory.write.seen, later: access.seen });
        }
        match memory.reads.iter_mut().find(|read| read.done.place == access.done.place) {
            Some(read) => *read = access,
            None => memory.reads.push(access),
        }
        Ok(())
    }

    /// Invariant 4, and the allocation where there is nothing yet.
    fn write(&mut self, buffer: Buffer, access: Access) -> Found {
        let Some(clock) = self.places.get(access.done.place).map(|state| &state.clock) else { return Ok(()) };
        match self.memory.entry(buffer) {
            Entry::Vacant(place) => {
                place.insert(Memory { owner: access, write: access, reads: Vec::new(), shared: Vec::new() });
            }
            Entry::Occupied(mut place) => {
                let memory = place.get_mut();
                let late = |earlier: &&Access| !earlier.done.is_before(clock);
                if let Some(earlier) = memory.reads.iter().chain([&memory.write]).find(late) {
                    return Err(Hazard::WrittenTooEarly {
                        buffer,
                        earlier: earlier.seen,
                        later: access.seen,
                    });
                }
                memory.write = access;
                memory.reads.clear();
            }
        }
        Ok(())
    }

    /// Invariant 5. What the owner does next follows what it was told already, as far as the host knows of that, and
    /// follows the release, whoever tells it.
    fn release(&mut self, buffer: Buffer, issued: Tick, later: Use) -> Found {
        let Some(memory) = self.memory.remove(&buffer) else {
            return Err(Hazard::Absent { buffer, at: later });
        };
        let host = self.clock(issued.place);
        let owner = memory.owner.done.place;
        let told = self.places.get(owner).and_then(|state| state.last);
        let of_owner =
            if told.is_some_and(|last| last.issued.is_before(host)) { self.clock(owner) } else { host };
        for earlier in memory.reads.iter().chain([&memory.write]) {
            let place = earlier.done.place;
            let is_issued = earlier.issued.is_before(host);
            let is_exempt = place == owner
                || matches!(memory.owner.seen.place, Place::Host(_))
                || memory.shared.contains(&place);
            let is_over = || earlier.done.is_before(host) || earlier.done.is_before(of_owner);
            if !(is_issued && (is_exempt || is_over())) {
                let (earlier, owner) = (earlier.seen, memory.owner.seen.place);
                return Err(Hazard::ReusedTooEarly { buffer, earlier, later, owner });
            }
        }
        Ok(())
    }
}

/// A place learns what was published, which is dropped when all have.
fn learn<K: Eq + std::hash::Hash>(
    places: &mut [PlaceState],
    place: usize,
    all: &mut HashMap<K, Published>,
    key: K,
) {
    let (Some(state), Entry::Occupied(mut entry)) = (places.get_mut(place), all.entry(key)) else { return };
    join(&mut state.clock, &entry.get().clock);
    state.learnt += 1;
    entry.get_mut().readers = entry.get().readers.saturating_sub(1);
    if entry.get().readers == 0 {
        entry.remove();
    }
}
