//! Who is told how a search goes, and says whether it is to go on.

/// How far a search has come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// What the best schedule costs that is known; infinite before there is one.
    pub cost: f64,
    /// No schedule within the limit costs less.
    pub lower_bound: f64,
}

/// The progress, and who is asked.
pub(super) struct Watch<'a> {
    ask: &'a mut dyn FnMut(Progress) -> bool,
    progress: Progress,
    stopped: bool,
}

impl<'a> Watch<'a> {
    pub(super) fn new(ask: &'a mut dyn FnMut(Progress) -> bool, lower_bound: f64) -> Self {
        Self { ask, progress: Progress { cost: f64::INFINITY, lower_bound }, stopped: false }
    }

    /// Whether to go on, now that a schedule of this cost is known. Once told to stop, nobody is asked again: an
    /// interruption is said once.
    pub(super) fn keep_on(&mut self, cost: f64) -> bool {
        self.progress.cost = self.progress.cost.min(cost);
        self.stopped = self.stopped || !(self.ask)(self.progress);
        !self.stopped
    }

    /// Takes note of a bound that has been proven.
    pub(super) const fn prove(&mut self, lower_bound: f64) {
        self.progress.lower_bound = self.progress.lower_bound.max(lower_bound);
    }

    pub(super) const fn progress(&self) -> Progress {
        self.progress
    }
}
