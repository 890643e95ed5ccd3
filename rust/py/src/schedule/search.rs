//! The search, and what it finds: `Found`.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use torchrelay_core as core;

use super::costs::Costs;
use super::value::Schedule;
use crate::convert::{count, counts, per_stage};
use crate::errors::{PlanError, to_py};

/// A schedule that was searched, and how good it is known to be.
#[pyclass(frozen, extends = Schedule, module = "torchrelay._core")]
pub struct Found {
    cost: f64,
    lower_bound: f64,
    gap: f64,
}

#[pymethods]
impl Found {
    #[getter]
    fn cost(&self) -> f64 {
        self.cost
    }

    #[getter]
    fn lower_bound(&self) -> f64 {
        self.lower_bound
    }

    #[getter]
    fn gap(&self) -> f64 {
        self.gap
    }

    /// Whether no schedule within the limit costs less.
    #[getter]
    fn proven(&self) -> bool {
        self.gap <= 0.0
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let py = slf.py();
        let schedule = slf.as_super().get();
        let (name, found) = (schedule.0.name().into_pyobject(py)?.repr()?, slf.get());
        let (ranks, microbatches) = (schedule.0.ranks(), schedule.0.microbatches());
        // Sums in their last digits tell nothing.
        let short = |value: f64| value.into_pyobject(py)?.call_method1("__format__", (".6g",));
        let cost = short(found.cost)?;
        let known = if found.proven() {
            "proven to be the best".to_owned()
        } else {
            format!("bound {}, gap {:.2} %", short(found.lower_bound)?, 100.0 * found.gap)
        };
        Ok(format!("<Found {name}: {ranks} ranks, {microbatches} micro-batches, cost {cost}, {known}>"))
    }
}

/// How often `progress` is called while nothing changes.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The best schedule that is found for these costs, until so many seconds have passed or, without a limit, a fixed number
/// of schedules has been tried or, if it is to be `exact`, the best is proven to be that. Ctrl-C ends it early.
///
/// `progress` is called with the cost of the best schedule so far, the bound, and the seconds since the start: whenever one
/// of the former two changes, and several times a second; what it raises ends the search.
#[pyfunction]
#[pyo3(signature = (
    placement, microbatches, costs, *, memory_limit=None, exact=false, time_limit=None, progress=None
))]
#[allow(clippy::too_many_arguments)] // all but three by name
pub fn search_schedule<'py>(
    placement: &Bound<'py, PyAny>,
    microbatches: &Bound<'py, PyAny>,
    costs: &Bound<'py, Costs>,
    memory_limit: Option<&Bound<'py, PyAny>>,
    exact: bool,
    time_limit: Option<f64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, Found>> {
    let py = placement.py();
    let placement = counts("the rank of the stage", placement)?;
    let microbatches = count("the number of micro-batches", microbatches)?;
    let limit = memory_limit.map(|limit| per_stage("the memory limit", limit)).transpose()?;
    let deadline = match time_limit {
        // Beyond a century there is no difference.
        Some(seconds) if seconds >= 0.0 => Some(Instant::now() + Duration::from_secs_f64(seconds.min(3e9))),
        Some(seconds) => {
            return Err(PlanError::new_err(format!(
                "the time limit is {seconds} s, but must not be negative"
            )));
        }
        None => None,
    };
    let mut watcher = Watcher { progress, deadline, start: Instant::now(), told: None, raised: None };
    let costs = &costs.get().0;
    // Before a proof, no longer than without a limit.
    let effort = deadline.filter(|_| !exact).map(|_| usize::MAX);
    let options = core::Search { effort, exact };
    let found = py.detach(|| {
        let mut watch = |progress| watcher.keep_on(progress);
        core::search(&placement, microbatches, costs, limit.as_ref(), options, &mut watch)
    });
    if let Some(error) = watcher.raised {
        return Err(error);
    }
    let found = found.map_err(to_py)?;
    let known = Found { cost: found.simulation.cost(), lower_bound: found.lower_bound, gap: found.gap() };
    Bound::new(py, PyClassInitializer::from(Schedule(found.schedule)).add_subclass(known))
}

/// Who ends a search, and is told how it goes.
struct Watcher {
    progress: Option<Py<PyAny>>,
    deadline: Option<Instant>,
    start: Instant,
    /// What was told last, and when.
    told: Option<(core::Progress, Instant)>,
    raised: Option<PyErr>,
}

impl Watcher {
    fn keep_on(&mut self, progress: core::Progress) -> bool {
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return false;
        }
        Python::attach(|py| {
            if let Err(error) = self.tell(py, progress, now) {
                // A Ctrl-C is not passed on, wherever it falls: there is a result.
                self.raised = Some(error).filter(|error| !error.is_instance_of::<PyKeyboardInterrupt>(py));
                return false;
            }
            py.check_signals().is_ok()
        })
    }

    fn tell(&mut self, py: Python<'_>, progress: core::Progress, now: Instant) -> PyResult<()> {
        let Some(callback) = &self.progress else { return Ok(()) };
        let is_news = self
            .told
            .is_none_or(|(before, then)| before != progress || now.duration_since(then) >= PROGRESS_INTERVAL);
        if is_news {
            let seconds = now.duration_since(self.start).as_secs_f64();
            callback.call1(py, (progress.cost, progress.lower_bound, seconds))?;
            self.told = Some((progress, Instant::now()));
        }
        Ok(())
    }
}
