//! Schedules: `Action`, `Schedule`, `Costs`, `Simulation` and their makers.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};
use torchrelay_core as core;

use crate::convert::{count, counts};
use crate::errors::to_py;

/// One thing that a rank does.
#[pyclass(frozen, eq, hash, from_py_object, module = "torchrelay._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action(core::Action);

impl From<core::Action> for Action {
    fn from(action: core::Action) -> Self {
        Self(action)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // methods of a Python object take it by reference
#[pymethods]
impl Action {
    #[new]
    #[pyo3(signature = (kind, stage, microbatch=None))]
    fn new(kind: &str, stage: &Bound<'_, PyAny>, microbatch: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let stage = count("the stage", stage)?;
        let microbatch = microbatch.map(|object| count("the micro-batch", object)).transpose()?;
        let action = kind.parse().and_then(|kind| core::Action::new(kind, stage, microbatch));
        action.map(Self).map_err(to_py)
    }

    /// The action that is written like this.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        text.parse().map(Self).map_err(to_py)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind().text()
    }

    #[getter]
    fn stage(&self) -> usize {
        self.0.stage()
    }

    #[getter]
    fn microbatch(&self) -> Option<usize> {
        self.0.microbatch()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let microbatch = self.0.microbatch().map_or_else(String::new, |microbatch| format!(", {microbatch}"));
        format!("Action('{}', {}{microbatch})", self.kind(), self.stage())
    }

    fn __getnewargs__(&self) -> (&'static str, usize, Option<usize>) {
        (self.kind(), self.stage(), self.microbatch())
    }
}

/// What stands in a rank's list: an action, or a tuple of two that overlap.
#[derive(FromPyObject)]
enum Entry {
    Single(Action),
    Overlap(Action, Action),
}

/// What each rank does in one step, in order.
#[pyclass(frozen, eq, hash, module = "torchrelay._core")]
#[derive(PartialEq, Eq, Hash)]
pub struct Schedule(core::Schedule);

impl Schedule {
    pub(crate) fn core(&self) -> &core::Schedule {
        &self.0
    }
}

#[pymethods]
impl Schedule {
    #[new]
    #[pyo3(signature = (name, placement, microbatches, actions, *, backward=true))]
    fn new(
        name: String,
        placement: &Bound<'_, PyAny>,
        microbatches: &Bound<'_, PyAny>,
        actions: Vec<Vec<Entry>>,
        backward: bool,
    ) -> PyResult<Self> {
        let placement = counts("the rank of the stage", placement)?;
        let microbatches = count("the number of micro-batches", microbatches)?;
        let (mut lists, mut overlaps) =
            (Vec::with_capacity(actions.len()), Vec::with_capacity(actions.len()));
        for entries in actions {
            let (mut list, mut pairs) = (Vec::with_capacity(entries.len()), Vec::new());
            for entry in entries {
                match entry {
                    Entry::Single(action) => list.push(action.0),
                    Entry::Overlap(first, second) => {
                        pairs.push(list.len());
                        list.extend([first.0, second.0]);
                    }
                }
            }
            lists.push(list);
            overlaps.push(pairs);
        }
        core::Schedule::new(name, &placement, microbatches, backward, lists)
            .and_then(|schedule| schedule.with_overlaps(overlaps))
            .map(Self)
            .map_err(to_py)
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn ranks(&self) -> usize {
        self.0.ranks()
    }

    #[getter]
    fn stages(&self) -> usize {
        self.0.stages()
    }

    #[getter]
    fn microbatches(&self) -> usize {
        self.0.microbatches()
    }

    #[getter]
    fn backward(&self) -> bool {
        self.0.backward()
    }

    /// What a rank does, in order.
    fn actions<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let rank = count("the rank", rank)?;
        let actions = self.0.actions(rank).ok_or_else(|| no_such("rank", rank, self.0.ranks()))?;
        PyList::new(py, actions.iter().map(|&action| Action(action)))
    }

    /// Where a rank's overlapping pairs begin.
    fn overlaps<'py>(&self, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = rank.py();
        let rank = count("the rank", rank)?;
        if rank >= self.0.ranks() {
            return Err(no_such("rank", rank, self.0.ranks()));
        }
        PyList::new(py, self.0.overlaps(rank))
    }

    /// The rank of each stage.
    #[getter]
    fn placement<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.placement())
    }

    /// The rank that holds a stage.
    fn rank_of(&self, stage: &Bound<'_, PyAny>) -> PyResult<usize> {
        let stage = count("the stage", stage)?;
        self.0.rank_of(stage).ok_or_else(|| no_such("stage", stage, self.0.stages()))
    }

    /// Raises `ScheduleError` unless the schedule can be carried out.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.verify()).map_err(to_py)
    }

    /// The schedule in time.
    #[pyo3(signature = (costs=None))]
    fn simulate(&self, py: Python<'_>, costs: Option<&Bound<'_, Costs>>) -> PyResult<Simulation> {
        let costs = costs.map_or_else(core::Costs::default, |costs| costs.get().0);
        py.detach(|| self.0.simulate(&costs)).map(Simulation).map_err(to_py)
    }

    /// The schedule in time, given how long each action takes: a list for each rank.
    fn replay(&self, py: Python<'_>, durations: Vec<Vec<f64>>) -> PyResult<Simulation> {
        py.detach(move || self.0.replay(&durations)).map(Simulation).map_err(to_py)
    }

    /// What each rank holds for later, after each of its actions.
    fn held<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let rank = count("the rank", rank)?;
        let held = self.0.held(rank).map_err(to_py)?;
        let held = held.ok_or_else(|| no_such("rank", rank, self.0.ranks()))?;
        PyList::new(py, held.into_iter().map(|held| (held.inputs, held.activations)))
    }

    /// The schedule as a picture in plain text.
    #[pyo3(signature = (width=80))]
    fn draw(&self, py: Python<'_>, width: usize) -> String {
        py.detach(|| self.0.draw(width))
    }

    /// The schedule as CSV, as torch reads it.
    fn to_csv(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_csv())
    }

    /// The schedule that was written as CSV, by torch or here.
    #[classmethod]
    #[pyo3(signature = (text, *, name="csv"))]
    fn from_csv(_class: &Bound<'_, PyType>, py: Python<'_>, text: &str, name: &str) -> PyResult<Self> {
        py.detach(|| core::Schedule::from_csv(name, text)).map(Self).map_err(to_py)
    }

    /// The schedule as JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.0.to_json()).map_err(to_py)
    }

    /// The schedule that was written as JSON.
    #[classmethod]
    fn from_json(_class: &Bound<'_, PyType>, py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| core::Schedule::from_json(text)).map(Self).map_err(to_py)
    }

    fn __str__(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.draw(80))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = self.name().into_pyobject(py)?.repr()?;
        let (ranks, stages, microbatches) = (self.ranks(), self.stages(), self.microbatches());
        Ok(format!("<Schedule {name}: {ranks} ranks, {stages} stages, {microbatches} micro-batches>"))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }
}

/// The time that a rank takes for one micro-batch.
#[pyclass(frozen, eq, module = "torchrelay._core")]
#[derive(PartialEq)]
pub struct Costs(core::Costs);

#[pymethods]
impl Costs {
    #[new]
    #[pyo3(signature = (forward=1.0, input_grad=1.0, weight_grad=1.0))]
    fn new(forward: f64, input_grad: f64, weight_grad: f64) -> PyResult<Self> {
        core::Costs::new(forward, input_grad, weight_grad).map(Self).map_err(to_py)
    }

    #[getter]
    fn forward(&self) -> f64 {
        self.0.forward()
    }

    #[getter]
    fn input_grad(&self) -> f64 {
        self.0.input_grad()
    }

    #[getter]
    fn weight_grad(&self) -> f64 {
        self.0.weight_grad()
    }

    fn __repr__(&self) -> String {
        let (forward, input_grad, weight_grad) = self.__getnewargs__();
        format!("Costs(forward={forward:?}, input_grad={input_grad:?}, weight_grad={weight_grad:?})")
    }

    fn __getnewargs__(&self) -> (f64, f64, f64) {
        (self.forward(), self.input_grad(), self.weight_grad())
    }
}

/// A schedule in time.
#[pyclass(frozen, module = "torchrelay._core")]
pub struct Simulation(core::Simulation);

#[pymethods]
impl Simulation {
    #[getter]
    fn makespan(&self) -> f64 {
        self.0.makespan()
    }

    #[getter]
    fn bubble_rate(&self) -> f64 {
        self.0.bubble_rate()
    }

    /// What a rank does, and when it starts and ends.
    fn spans<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let rank = count("the rank", rank)?;
        let spans = self.0.spans(rank).ok_or_else(|| no_such("rank", rank, self.0.ranks()))?;
        let tuples: PyResult<Vec<Bound<'py, PyTuple>>> =
            spans.iter().map(|span| (Action(span.action), span.start, span.end).into_pyobject(py)).collect();
        PyList::new(py, tuples?)
    }

    fn __repr__(&self) -> String {
        format!("<Simulation: makespan {}, bubble rate {:.4}>", self.makespan(), self.bubble_rate())
    }
}

/// The GPipe schedule.
#[pyfunction]
#[pyo3(signature = (ranks, microbatches, *, backward=true, ascending=false, recompute="never"))]
pub fn make_gpipe(
    ranks: &Bound<'_, PyAny>,
    microbatches: &Bound<'_, PyAny>,
    backward: bool,
    ascending: bool,
    recompute: &str,
) -> PyResult<Schedule> {
    let py = ranks.py();
    let (ranks, microbatches) =
        (count("the number of ranks", ranks)?, count("the number of micro-batches", microbatches)?);
    let recompute = recompute.parse().map_err(to_py)?;
    let options = core::Gpipe { backward, ascending, recompute };
    py.detach(|| core::make_gpipe(ranks, microbatches, options)).map(Schedule).map_err(to_py)
}

/// The schedule of that name.
#[pyfunction]
#[pyo3(signature = (name, ranks, microbatches, *, stages_per_rank=None))]
pub fn make_schedule(
    name: &str,
    ranks: &Bound<'_, PyAny>,
    microbatches: &Bound<'_, PyAny>,
    stages_per_rank: Option<&Bound<'_, PyAny>>,
) -> PyResult<Schedule> {
    let py = ranks.py();
    let maker: core::Maker = name.parse().map_err(to_py)?;
    let (ranks, microbatches) =
        (count("the number of ranks", ranks)?, count("the number of micro-batches", microbatches)?);
    let stages_per_rank =
        stages_per_rank.map(|given| count("the number of stages per rank", given)).transpose()?;
    py.detach(|| maker.make(ranks, microbatches, stages_per_rank)).map(Schedule).map_err(to_py)
}

/// The names that `make_schedule` knows.
#[pyfunction]
pub fn schedule_names() -> Vec<&'static str> {
    core::Maker::ALL.iter().map(|maker| maker.name()).collect()
}

fn no_such(what: &str, given: usize, count: usize) -> PyErr {
    PyIndexError::new_err(format!("there is no {what} {given}, only {count}"))
}
