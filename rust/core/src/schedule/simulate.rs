//! When each action of a schedule would begin and end, for given costs, and what that means for time and memory.
//!
//! 1. A rank does its actions in their order, one at a time, each as soon as the rank is free and what it needs is there.
//! 2. What an action needs of a stage on another rank is there when that action has ended and its transfer is through.
//! 3. Memory depends on a rank's order alone: an action that adds does so at its start, one that frees at its end.
//!
//! Every action costs constant time.

use super::Schedule;
use super::action::{Action, Kind};
use super::costs::{Costs, Links};
use super::walk::walk;
use crate::error::{Error, Result};

/// An action in time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What is done.
    pub action: Action,
    /// When it begins; the first action of all begins at 0.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// When what it needs of another stage was there; `None` if it needs nothing of another.
    pub ready: Option<f64>,
}

/// Why a rank has nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its next action needs one that has not ended.
    Waits(Action),
    /// Its next action needs what is on its way.
    Transfer(Action),
    /// It is held up by its own transfer.
    Sends(Action),
    /// It has done all that it had to.
    Done,
}

/// A time in which a rank has nothing to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Idle {
    /// From then.
    pub start: f64,
    /// To then.
    pub end: f64,
    /// Why.
    pub cause: Cause,
}

/// A schedule in time.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    spans: Vec<Vec<Span>>,
    /// What each rank's actions take together, but for recomputations.
    work: Vec<f64>,
    /// The same with recomputations.
    busy: Vec<f64>,
    /// How a rank's memory changes, in time.
    memory: Vec<Vec<(f64, f64)>>,
    peak_memory: Vec<f64>,
    stages: usize,
    microbatches: usize,
    /// Where the pairs that overlap begin.
    overlaps: Vec<Vec<usize>>,
}

impl Simulation {
    /// What a rank does and when, in order; `None` if there is no such rank.
    pub fn spans(&self, rank: usize) -> Option<&[Span]> {
        self.spans.get(rank).map(Vec::as_slice)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.spans.len()
    }

    /// When the last action of all ends.
    pub fn makespan(&self) -> f64 {
        self.spans.iter().filter_map(|spans| spans.last()).fold(0.0, |latest, span| latest.max(span.end))
    }

    /// The longest time from the start of a rank's first action to the end of its last.
    pub fn cost(&self) -> f64 {
        let length = |spans: &Vec<Span>| Some(spans.last()?.end - spans.first()?.start);
        self.spans.iter().filter_map(length).fold(0.0, f64::max)
    }

    /// (cost - m(F+I+W)) / cost, with the cost of [`Simulation::cost`] and, where ranks have unequal work, that of the rank
    /// that has most; recomputations are no work. 0 if nothing takes time.
    pub fn bubble_rate(&self) -> f64 {
        let (cost, work) = (self.cost(), self.work.iter().copied().fold(0.0, f64::max));
        if cost > 0.0 { (cost - work) / cost } else { 0.0 }
    }

    /// For each rank, how long its actions take together, but for recomputations.
    pub fn work(&self) -> &[f64] {
        &self.work
    }

    /// For each rank, how long it has nothing to do until the last rank is done.
    pub fn bubble(&self) -> Vec<f64> {
        let makespan = self.makespan();
        self.busy.iter().map(|busy| makespan - busy).collect()
    }

    /// For each rank, the most memory that it holds at a time.
    pub fn peak_memory(&self) -> &[f64] {
        &self.peak_memory
    }

    /// What a rank holds from each time on, in order; `None` if there is no such rank.
    pub fn memory(&self, rank: usize) -> Option<&[(f64, f64)]> {
        self.memory.get(rank).map(Vec::as_slice)
    }

    /// When a rank has nothing to do, and why, in order; `None` if there is no such rank.
    pub fn idle(&self, rank: usize) -> Option<Vec<Idle>> {
        let spans = self.spans(rank)?;
        let places = self.places();
        let mut found = Vec::new();
        let mut push = |start: f64, end: f64, cause| {
            if start < end {
                found.push(Idle { start, end, cause });
            }
        };
        let mut previous: Option<&Span> = None;
        for (index, first) in spans.iter().enumerate() {
            if self.pair(rank, index).is_some_and(|(first, _)| first != index) {
                continue; // seen with the first of the two
            }
            let (last, span) = match self.pair(rank, index) {
                Some((_, last)) => {
                    (last, self.blamed(rank, index).and_then(|at| spans.get(at)).unwrap_or(first))
                }
                None => (index, first),
            };
            let ready = |span: &Span| span.ready.unwrap_or(0.0);
            let free = previous.map_or(0.0, |span| span.end);
            // Until then the rank was held up by what it needs; if it began later, by its own transfer.
            let there = ready(span).max(free);
            if let Some(needed) = self.needed(span, &places) {
                let ended = needed.end.clamp(free, there);
                push(free, ended, Cause::Waits(needed.action));
                push(ended, there, Cause::Transfer(needed.action));
            }
            if let Some(previous) = previous {
                push(there, span.start, Cause::Sends(previous.action));
            }
            previous = spans.get(last);
        }
        push(previous.map_or(0.0, |span| span.end), self.makespan(), Cause::Done);
        Some(found)
    }

    /// Actions that determine the makespan, each with its rank, in time: any of them later, the end is later. What lies
    /// between two of them is a transfer.
    pub fn critical_path(&self) -> Vec<(usize, Span)> {
        let places = self.places();
        let ends = self
            .spans
            .iter()
            .enumerate()
            .filter_map(|(rank, spans)| Some((rank, spans.len().checked_sub(1)?)));
        let end = |&(rank, index): &(usize, usize)| self.span(rank, index).map_or(0.0, |span| span.end);
        let mut next = ends.max_by(|a, b| end(a).total_cmp(&end(b)));
        let mut path = Vec::new();
        while let Some((rank, reached)) = next {
            let index = self.blamed(rank, reached).unwrap_or(reached);
            let (Some(&first), Some(&span)) = (self.span(rank, reached), self.span(rank, index)) else {
                break;
            };
            path.push((rank, first));
            if index != reached {
                path.push((rank, span));
            }
            let begin = self.pair(rank, index).map_or(index, |(first, _)| first);
            let previous = begin.checked_sub(1).map(|index| (rank, index));
            let waited = span.ready.is_some_and(|ready| ready >= span.start)
                && previous.as_ref().map_or(0.0, end) < span.start;
            next = if waited { self.needed_place(&span, &places) } else { previous };
        }
        path.reverse();
        path
    }

    /// Where the two of a pair stand that overlap, given either.
    fn pair(&self, rank: usize, index: usize) -> Option<(usize, usize)> {
        let overlaps = self.overlaps.get(rank)?;
        let begins = |index: &usize| overlaps.binary_search(index).is_ok();
        [Some(index), index.checked_sub(1)].into_iter().flatten().find(begins).map(|first| (first, first + 1))
    }

    /// Which of two that overlap could begin later.
    fn blamed(&self, rank: usize, index: usize) -> Option<usize> {
        let (first, second) = self.pair(rank, index)?;
        let ready = |index| self.span(rank, index).and_then(|span| span.ready).unwrap_or(0.0);
        Some(if ready(second) > ready(first) { second } else { first })
    }

    fn span(&self, rank: usize, index: usize) -> Option<&Span> {
        self.spans.get(rank)?.get(index)
    }

    /// Where the forward and the backward of each pair of stage and micro-batch stand.
    fn places(&self) -> Places {
        let cells = self.stages * self.microbatches;
        let mut places = Places { forwards: vec![(0, 0); cells], backwards: vec![(0, 0); cells] };
        for (rank, spans) in self.spans.iter().enumerate() {
            for (index, span) in spans.iter().enumerate() {
                let table = match span.action.kind() {
                    Kind::Forward => &mut places.forwards,
                    Kind::Backward | Kind::InputGrad => &mut places.backwards,
                    _ => continue,
                };
                let cell =
                    span.action.stage() * self.microbatches + span.action.microbatch().unwrap_or_default();
                if let Some(entry) = table.get_mut(cell) {
                    *entry = (rank, index);
                }
            }
        }
        places
    }

    /// The action of another stage that an action needs.
    fn needed(&self, span: &Span, places: &Places) -> Option<&Span> {
        let (rank, index) = self.needed_place(span, places)?;
        self.span(rank, index)
    }

    fn needed_place(&self, span: &Span, places: &Places) -> Option<(usize, usize)> {
        span.ready?;
        let cell = span.action.stage() * self.microbatches + span.action.microbatch()?;
        match span.action.kind() {
            Kind::Forward => places.forwards.get(cell.checked_sub(self.microbatches)?).copied(),
            _ => places.backwards.get(cell + self.microbatches).copied(),
        }
    }
}

/// A rank and a position in its list, for each pair of stage and micro-batch.
struct Places {
    forwards: Vec<(usize, usize)>,
    backwards: Vec<(usize, usize)>,
}

/// How what a stage makes reaches a neighbouring one.
#[derive(Clone, Copy)]
struct Way {
    transfer: f64,
    latency: f64,
    /// Which link it takes.
    link: usize,
}

/// The state of a simulation.
struct Clock<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// What each action takes, where that is not a matter of the costs.
    durations: Option<&'a [Vec<f64>]>,
    /// From each stage to the next, and back; `None` on one rank.
    ways: Vec<Option<[Way; 2]>>,
    /// When each link is free.
    links: Vec<f64>,
    /// When each rank is free.
    free: Vec<f64>,
    /// The first of two actions that overlap, with when it could begin and what it takes alone.
    pending: Vec<Option<(Action, Option<f64>, f64)>>,
    /// When the output of a pair is where it is needed, and its input's gradient.
    outputs: Vec<f64>,
    input_grads: Vec<f64>,
    /// Pairs that are recomputed.
    recomputed: Vec<bool>,
    level: Vec<f64>,
    done: Simulation,
}

impl Schedule {
    /// The schedule in time.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`] and, for this schedule's stages, of [`Costs::check`]; [`Error::CostsOverflow`] if the
    /// sum of times, or of memory, is not finite.
    pub fn simulate(&self, costs: &Costs) -> Result<Simulation> {
        costs.check(Some(self.stages()))?;
        self.verify_lists()?;
        self.run(Clock::new(self, costs, None))
    }

    /// The schedule in time if every action took as long as given, say as long as it was measured to take: for each rank
    /// a duration for each of its actions, in order. Transfers take no time, and memory is counted as by default.
    ///
    /// # Errors
    /// Those of [`Schedule::verify`]; [`Error::DurationsDiffer`] if there is not one duration for each action;
    /// [`Error::BadCost`] for one that is negative, infinite or not a number.
    pub fn replay(&self, durations: &[Vec<f64>]) -> Result<Simulation> {
        let lengths = |rank: usize| {
            let given = durations.get(rank).map_or(0, Vec::len);
            let actions = self.actions(rank).map_or(0, <[Action]>::len);
            (given != actions).then_some(Error::DurationsDiffer { rank, given, actions })
        };
        if let Some(error) = (0..self.ranks().max(durations.len())).find_map(lengths) {
            return Err(error);
        }
        if let Some(&value) = durations.iter().flatten().find(|value| !value.is_finite() || **value < 0.0) {
            return Err(Error::BadCost { what: "of an action", value });
        }
        self.verify_lists()?;
        self.run(Clock::new(self, &Costs::default(), Some(durations)))
    }

    fn run(&self, mut clock: Clock<'_>) -> Result<Simulation> {
        walk(self, |rank, action| clock.advance(rank, action)).map_err(|cycle| Error::Deadlock { cycle })?;
        let sums = [&clock.free, &clock.done.busy, &clock.level, &clock.done.peak_memory];
        if sums.into_iter().flatten().all(|sum| sum.is_finite()) {
            Ok(clock.done)
        } else {
            Err(Error::CostsOverflow)
        }
    }
}

impl<'a> Clock<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs, durations: Option<&'a [Vec<f64>]>) -> Self {
        let (ranks, stages, microbatches) = (schedule.ranks(), schedule.stages(), schedule.microbatches);
        let cells = stages * microbatches;
        let (ways, links) = ways(schedule, costs);
        let with_room = |actions: &Vec<Action>| Vec::with_capacity(actions.len());
        let mut recomputed = Vec::new();
        for action in schedule.actions.iter().flatten().filter(|action| action.kind() == Kind::Recompute) {
            recomputed.resize(cells, false);
            if let Some(entry) = schedule.cell(*action).and_then(|cell| recomputed.get_mut(cell)) {
                *entry = true;
            }
        }
        Self {
            schedule,
            costs,
            durations,
            ways,
            links: vec![0.0; links],
            free: vec![0.0; ranks],
            pending: vec![None; ranks],
            outputs: vec![0.0; cells],
            input_grads: vec![0.0; cells],
            recomputed,
            level: vec![0.0; ranks],
            done: Simulation {
                spans: schedule.actions.iter().map(with_room).collect(),
                work: vec![0.0; ranks],
                busy: vec![0.0; ranks],
                memory: schedule.actions.iter().map(|_| vec![(0.0, 0.0)]).collect(),
                peak_memory: vec![0.0; ranks],
                stages,
                microbatches,
                overlaps: schedule.overlaps.clone(),
            },
        }
    }

    fn duration(&self, rank: usize, action: Action) -> f64 {
        if let Some(durations) = self.durations {
            let is_second = self.pending.get(rank).is_some_and(Option::is_some);
            let position = self.done.spans.get(rank).map_or(0, Vec::len) + usize::from(is_second);
            return durations.get(rank).and_then(|list| list.get(position)).copied().unwrap_or(0.0);
        }
        let stage = action.stage();
        match action.kind() {
            Kind::Forward => self.costs.forward.of(stage),
            Kind::Backward => self.costs.backward_of(stage),
            Kind::InputGrad => self.costs.input_grad.of(stage),
            Kind::WeightGrad => self.costs.weight_grad.of(stage),
            Kind::Recompute => self.costs.recompute_of(stage),
            _ => 0.0,
        }
    }

    /// Does the next action of a rank.
    fn advance(&mut self, rank: usize, action: Action) {
        let ready = self.ready(action);
        let duration = self.duration(rank, action);
        if let Some(first) = self.pending.get_mut(rank) {
            let position = self.done.spans.get(rank).map_or(0, Vec::len);
            if self.schedule.overlaps(rank).binary_search(&position).is_ok() && first.is_none() {
                *first = Some((action, ready, duration));
                return;
            }
            if let Some(first) = first.take() {
                self.together(rank, [first, (action, ready, duration)]);
                return;
            }
        }
        let Some(&free) = self.free.get(rank) else { return };
        let start = ready.map_or(free, |ready| ready.max(free));
        self.finish(rank, Span { action, start, end: start + duration, ready }, duration);
    }

    /// Does two actions that overlap, each with when it could begin and what it takes alone.
    fn together(&mut self, rank: usize, pair: [(Action, Option<f64>, f64); 2]) {
        let free = self.free.get(rank).copied().unwrap_or_default();
        let start = pair.iter().filter_map(|&(_, ready, _)| ready).fold(free, f64::max);
        let alone: f64 = pair.iter().map(|&(_, _, duration)| duration).sum();
        // What was measured is what each took beside the other.
        let longest = || pair.iter().map(|&(_, _, duration)| duration).fold(0.0, f64::max);
        let taken = if self.durations.is_some() { longest() } else { alone * self.costs.overlap };
        for (action, ready, duration) in pair {
            let share = if alone > 0.0 { taken * (duration / alone) } else { 0.0 };
            self.finish(rank, Span { action, start, end: start + taken, ready }, share);
        }
    }

    /// When what an action needs of another stage is there.
    fn ready(&self, action: Action) -> Option<f64> {
        let (m, stages) = (self.schedule.microbatches, self.schedule.stages());
        let cell = self.schedule.cell(action)?;
        match action.kind() {
            Kind::Forward => cell.checked_sub(m).and_then(|before| self.outputs.get(before)).copied(),
            // Beyond the last stage there is nothing, and the rank's own forward has ended.
            Kind::Backward | Kind::InputGrad if action.stage() + 1 < stages => {
                self.input_grads.get(cell + m).copied()
            }
            _ => None,
        }
    }

    /// Notes an action that keeps its rank busy for so long, which is less than it takes where another overlaps.
    fn finish(&mut self, rank: usize, span: Span, busy: f64) {
        let Span { action, start, end, .. } = span;
        if let Some(free) = self.free.get_mut(rank) {
            *free = free.max(end);
        }
        if let Some(spans) = self.done.spans.get_mut(rank) {
            spans.push(span);
        }
        let is_work = action.kind() != Kind::Recompute;
        for (sums, counts) in [(&mut self.done.busy, true), (&mut self.done.work, is_work)] {
            if let Some(sum) = sums.get_mut(rank).filter(|_| counts) {
                *sum += busy;
            }
        }
        let cell = self.schedule.cell(action).unwrap_or_default();
        self.hold(rank, action, cell, start, end);
        self.hand_over(rank, action, cell, end);
    }

    /// What an action means for memory.
    fn hold(&mut self, rank: usize, action: Action, cell: usize, start: f64, end: f64) {
        let stage = action.stage();
        let costs = self.costs;
        let backward = [costs.input_grad_memory.of(stage), costs.weight_grad_memory.of(stage)];
        let is_recomputed = self.recomputed.get(cell).copied().unwrap_or(false);
        let effects = match action.kind() {
            Kind::Forward if is_recomputed => return,
            Kind::Forward | Kind::Recompute => [costs.forward_memory.of(stage), 0.0],
            Kind::InputGrad => [backward[0], 0.0],
            Kind::WeightGrad => [backward[1], 0.0],
            Kind::Backward => backward,
            _ => return,
        };
        let (Some(level), Some(peak), Some(curve)) =
            (self.level.get_mut(rank), self.done.peak_memory.get_mut(rank), self.done.memory.get_mut(rank))
        else {
            return;
        };
        for effect in effects {
            if effect == 0.0 {
                continue;
            }
            *level += effect;
            *peak = peak.max(*level);
            let time = if effect > 0.0 { start } else { end };
            // A whole backward may free before it adds; a curve does not go back in time.
            let time = curve.last().map_or(time, |&(before, _)| time.max(before));
            curve.push((time, *level));
        }
    }

    /// Makes what an action leaves for a neighbouring stage be there in time.
    fn hand_over(&mut self, rank: usize, action: Action, cell: usize, end: f64) {
        let (boundary, direction, table) = match action.kind() {
            Kind::Forward => (Some(action.stage()), 0, &mut self.outputs),
            Kind::Backward | Kind::InputGrad => (action.stage().checked_sub(1), 1, &mut self.input_grads),
            _ => return,
        };
        let way = boundary.and_then(|boundary| self.ways.get(boundary)?.as_ref()?.get(direction));
        let mut arrival = end;
        if let Some(way) = way {
            let link = self.links.get_mut(way.link).filter(|_| self.costs.links == Links::Serial);
            let through = link.as_ref().map_or(end, |link| link.max(end)) + way.transfer;
            if let Some(link) = link {
                *link = through;
            }
            if self.costs.links == Links::Blocking
                && let Some(free) = self.free.get_mut(rank)
            {
                *free = free.max(through);
            }
            arrival = through + way.latency;
        }
        if let Some(entry) = table.get_mut(cell) {
            *entry = arrival;
        }
    }
}

/// For each stage the ways to the next and back, and how many links there are.
fn ways(schedule: &Schedule, costs: &Costs) -> (Vec<Option<[Way; 2]>>, usize) {
    let mut links = std::collections::HashMap::new();
    let mut link = |from: u16, to: u16| {
        let next = links.len();
        *links.entry((from, to)).or_insert(next)
    };
    let neighbours = schedule.placement.iter().zip(schedule.placement.iter().skip(1));
    let ways = neighbours.enumerate().map(|(stage, (&here, &there))| {
        let (transfer, latency) = (costs.transfer.of(stage), costs.latency.of(stage));
        let mut way = |from, to| Way { transfer, latency, link: link(from, to) };
        (here != there).then(|| [way(here, there), way(there, here)])
    });
    let ways = ways.collect();
    (ways, links.len())
}
