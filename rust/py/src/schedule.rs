//! Schedules: `Action`, `Schedule`, `Costs`, `Simulation` and their makers.

use std::time::{Duration, Instant};

use pyo3::exceptions::{PyIndexError, PyKeyboardInterrupt};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use torchrelay_core as core;

use crate::convert::{count, counts, per_rank, per_stage};
use crate::errors::{PlanError, refused, to_py};

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
#[derive(FromPyObject, IntoPyObject)]
pub enum Entry {
    Single(Action),
    Overlap(Action, Action),
}

impl From<core::Entry> for Entry {
    fn from(entry: core::Entry) -> Self {
        match entry {
            core::Entry::Single(action) => Self::Single(action.into()),
            core::Entry::Overlap(first, second) => Self::Overlap(first.into(), second.into()),
        }
    }
}

/// What each rank does in one step, in order.
#[pyclass(frozen, eq, hash, subclass, module = "torchrelay._core")]
#[derive(PartialEq, Eq, Hash)]
pub struct Schedule(core::Schedule);

impl Schedule {
    pub(crate) fn core(&self) -> &core::Schedule {
        &self.0
    }

    /// The exception for what is wrong with this schedule.
    fn refused(&self, error: core::Error) -> PyErr {
        refused(&self.0, error)
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

    /// Raises `ScheduleError` unless the schedule can be carried out, within a limit of memory if there is one.
    ///
    /// `memory_limit` is one number for every rank, or one for each, in the units of the memory of `costs` (by default
    /// one micro-batch's activations of one stage). The error's `reason` is a sentence with the first action at fault, its
    /// `picture` the few lines around it.
    #[pyo3(signature = (*, memory_limit=None, costs=None))]
    fn verify(
        &self,
        py: Python<'_>,
        memory_limit: Option<&Bound<'_, PyAny>>,
        costs: Option<&Bound<'_, Costs>>,
    ) -> PyResult<()> {
        let verdict = if let Some(limit) = memory_limit {
            let limits = per_rank("memory_limit", limit)?;
            let usual = core::Costs::default();
            let costs = costs.map_or(&usual, |costs| &costs.get().0);
            py.detach(|| self.0.verify_within(&limits, costs))
        } else {
            py.detach(|| self.0.verify())
        };
        verdict.map_err(|error| self.refused(error))
    }

    /// The schedule with all that is needed to carry it out on several ranks: sends, receives, reductions.
    ///
    /// `waits=False` leaves out waits for sends and reductions, which torch before 2.15 does not know. `recompute`
    /// (`"never"`, `"except_last"`, `"always"`) says which micro-batches are recomputed before their backward,
    /// `unsharded` how many of its stages a rank may hold unsharded at a time, if their weights are sharded. `merge` makes
    /// a whole backward of every input's gradient that has the weights' gradients right behind it; `copies` has results copied between
    /// lanes of one process instead of sent. Raises `ScheduleError` if the schedule cannot be carried out, `PlanError` if it has been lowered before.
    #[pyo3(signature = (*, waits=true, recompute="never", unsharded=None, merge=false, copies=false))]
    fn lower(
        &self,
        py: Python<'_>,
        waits: bool,
        recompute: &str,
        unsharded: Option<&Bound<'_, PyAny>>,
        merge: bool,
        copies: bool,
    ) -> PyResult<Self> {
        let recompute = recompute.parse().map_err(to_py)?;
        let unsharded = unsharded.map(|limit| count("the number of unsharded stages", limit)).transpose()?;
        py.detach(|| self.0.lower(core::Lowering { waits, recompute, unsharded, merge, copies }))
            .map(Self)
            .map_err(|error| self.refused(error))
    }

    /// What ranks compute, without all else: what was lowered.
    fn computations(&self, py: Python<'_>) -> PyResult<Self> {
        py.detach(|| self.0.computations()).map(Self).map_err(to_py)
    }

    /// The schedule in time.
    #[pyo3(signature = (costs=None))]
    fn simulate(&self, py: Python<'_>, costs: Option<&Bound<'_, Costs>>) -> PyResult<Simulation> {
        let usual = core::Costs::default();
        let costs = costs.map_or(&usual, |costs| &costs.get().0);
        py.detach(|| self.0.simulate(costs)).map(Simulation).map_err(|error| self.refused(error))
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

    /// The schedule in time as a picture of text: a row for each rank.
    ///
    /// At most `width` characters wide: by default as the terminal, or 80 where stdout is none. `colour` says whether with
    /// escape codes for colours; by default if stdout is a terminal that has any. Without `costs` every action takes one
    /// unit of time, but a whole backward two where others are split. A schedule that cannot be carried out is drawn by
    /// position, and says so. Raises `PlanError` for costs that do not fit.
    #[pyo3(signature = (width=None, *, costs=None, colour=None))]
    fn draw<'py>(
        slf: &Bound<'py, Self>,
        width: Option<&Bound<'py, PyAny>>,
        costs: Option<&Bound<'py, Costs>>,
        colour: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let width = width.map(|width| count("the width", width)).transpose()?;
        picture(slf.py(), "terminal", "draw", (slf, width, costs, colour))
    }

    /// The schedule in time as the text of an SVG picture, `width` pixels wide: a row for each rank, and below it what the
    /// rank holds. Bars say on hover what they are, if there are at most 8,000.
    ///
    /// Raises `ScheduleError` if the schedule cannot be carried out, `PlanError` for costs that do not fit or a width below
    /// 200.
    #[pyo3(signature = (costs=None, *, width=1000))]
    fn to_svg<'py>(
        slf: &Bound<'py, Self>,
        costs: Option<&Bound<'py, Costs>>,
        width: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "svg", "svg", (slf, costs, width))
    }

    /// The schedule in time as the text of an HTML page that needs nothing else: the picture, which can be zoomed, and says
    /// of the place that one points at what is done, when, and what is held.
    ///
    /// Raises `ScheduleError` if the schedule cannot be carried out, `PlanError` for costs that do not fit.
    #[pyo3(signature = (costs=None))]
    fn to_html<'py>(
        slf: &Bound<'py, Self>,
        costs: Option<&Bound<'py, Costs>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "page", "page", (slf, costs))
    }

    /// The schedule in time as a PNG picture, `width` pixels wide, drawn by matplotlib.
    ///
    /// Raises `ImportError` if that is not installed, `ScheduleError` if the schedule cannot be carried out, `PlanError` for
    /// costs that do not fit or a width that is not 200 to 20,000.
    #[pyo3(signature = (costs=None, *, width=1600))]
    fn to_png<'py>(
        slf: &Bound<'py, Self>,
        costs: Option<&Bound<'py, Costs>>,
        width: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "png", "png", (slf, costs, width))
    }

    /// The schedule in time as JSON for <https://ui.perfetto.dev> or `chrome://tracing`. `unit` is that of the costs, in
    /// seconds.
    ///
    /// Raises `ScheduleError` if the schedule cannot be carried out, `PlanError` for costs that do not fit.
    #[pyo3(signature = (costs=None, *, unit=1e-6))]
    fn to_perfetto<'py>(
        slf: &Bound<'py, Self>,
        costs: Option<&Bound<'py, Costs>>,
        unit: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "perfetto", "events", (slf, costs, unit))
    }

    /// Writes `path` as its name ends and returns it: `.csv` and `.json` the schedule, `.svg`, `.html` and `.png` a picture,
    /// `.trace.json` for Perfetto.
    ///
    /// Raises what `to_csv`, `to_json`, `to_svg`, `to_html`, `to_png` and `to_perfetto` raise, `PlanError` for another
    /// ending, and `OSError`.
    #[pyo3(signature = (path, costs=None))]
    fn save<'py>(
        slf: &Bound<'py, Self>,
        path: &Bound<'py, PyAny>,
        costs: Option<&Bound<'py, Costs>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "files", "save", (slf, path, costs))
    }

    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "svg", "repr_html", (slf,))
    }

    fn __rich__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        picture(slf.py(), "terminal", "Coloured", (slf,))
    }

    /// The schedule as CSV, as torch reads it: a row for each rank, an action in each cell. The name is not in it.
    fn to_csv(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_csv())
    }

    /// The schedule that was written as CSV, by torch or here, with the given name; raises `PlanError` with line and
    /// column. What it says still has to be verified.
    #[classmethod]
    #[pyo3(signature = (text, *, name="csv"))]
    fn from_csv(_class: &Bound<'_, PyType>, py: Python<'_>, text: &str, name: &str) -> PyResult<Self> {
        py.detach(|| core::Schedule::from_csv(name, text)).map(Self).map_err(to_py)
    }

    /// The schedule as JSON, with costs if there are any.
    #[pyo3(signature = (*, costs=None))]
    fn to_json(&self, py: Python<'_>, costs: Option<&Bound<'_, Costs>>) -> PyResult<String> {
        let costs = costs.map(|costs| &costs.get().0);
        py.detach(|| costs.map_or_else(|| self.0.to_json(), |costs| self.0.to_json_with(costs)))
            .map_err(to_py)
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
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py, None)?,)))
    }
}

/// Calls what draws in Python, where the libraries for it are.
fn picture<'py>(
    py: Python<'py>,
    module: &str,
    function: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    py.import(format!("torchrelay.planning.pictures.{module}"))?.getattr(function)?.call1(arguments)
}

/// A row of a picture in parts: what stands before it, and its cells with the actions that they show.
type TextRow = (String, Vec<(String, Option<Action>)>);

/// The parts of a picture of text, for who gives them colours: its rows; what to know about it; and how many cells there
/// are for a character, where they are letters, or 0.
#[pyfunction]
pub fn text_picture(
    py: Python<'_>,
    schedule: &Bound<'_, Schedule>,
    costs: Option<&Bound<'_, Costs>>,
    width: usize,
    per_character: usize,
) -> PyResult<(Vec<TextRow>, Vec<String>, usize)> {
    let (schedule, costs) = (schedule.get(), costs.map(|costs| &costs.get().0));
    let picture = py.detach(|| schedule.0.text_picture(costs, width, per_character)).map_err(to_py)?;
    let row = |row: core::TextRow| {
        let cells = row.cells.into_iter().map(|cell| (cell.text, cell.action.map(Action)));
        (row.head, cells.collect())
    };
    Ok((picture.rows.into_iter().map(row).collect(), picture.notes, picture.per_character))
}

/// What the actions of each stage cost.
#[pyclass(frozen, eq, module = "torchrelay._core")]
#[derive(PartialEq)]
pub struct Costs(core::Costs);

#[pymethods]
impl Costs {
    #[new]
    #[pyo3(signature = (
        forward=None, input_grad=None, weight_grad=None, *, backward=None, recompute=None, overlap=1.0, transfer=None,
        latency=None, links="parallel", forward_memory=None, input_grad_memory=None, weight_grad_memory=None,
    ))]
    #[allow(clippy::too_many_arguments)] // all but three by name
    fn new(
        forward: Option<&Bound<'_, PyAny>>,
        input_grad: Option<&Bound<'_, PyAny>>,
        weight_grad: Option<&Bound<'_, PyAny>>,
        backward: Option<&Bound<'_, PyAny>>,
        recompute: Option<&Bound<'_, PyAny>>,
        overlap: f64,
        transfer: Option<&Bound<'_, PyAny>>,
        latency: Option<&Bound<'_, PyAny>>,
        links: &str,
        forward_memory: Option<&Bound<'_, PyAny>>,
        input_grad_memory: Option<&Bound<'_, PyAny>>,
        weight_grad_memory: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let given = |what: &str, object: Option<&Bound<'_, PyAny>>| {
            object.map(|object| per_stage(&format!("the cost {what}"), object)).transpose()
        };
        let usual = core::Costs::default();
        let costs = core::Costs {
            forward: given("forward", forward)?.unwrap_or(usual.forward),
            input_grad: given("input_grad", input_grad)?.unwrap_or(usual.input_grad),
            weight_grad: given("weight_grad", weight_grad)?.unwrap_or(usual.weight_grad),
            backward: given("backward", backward)?,
            recompute: given("recompute", recompute)?,
            overlap,
            transfer: given("transfer", transfer)?.unwrap_or(usual.transfer),
            latency: given("latency", latency)?.unwrap_or(usual.latency),
            links: links.parse().map_err(to_py)?,
            forward_memory: given("forward_memory", forward_memory)?.unwrap_or(usual.forward_memory),
            input_grad_memory: given("input_grad_memory", input_grad_memory)?
                .unwrap_or(usual.input_grad_memory),
            weight_grad_memory: given("weight_grad_memory", weight_grad_memory)?
                .unwrap_or(usual.weight_grad_memory),
        };
        costs.check(None).map_err(to_py)?;
        Ok(Self(costs))
    }

    /// The costs as JSON.
    fn to_json(&self) -> PyResult<String> {
        self.0.to_json().map_err(to_py)
    }

    /// The costs that were written as JSON, by themselves or with a schedule.
    #[classmethod]
    fn from_json(_class: &Bound<'_, PyType>, py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| core::Costs::from_json(text)).map(Self).map_err(to_py)
    }

    #[getter]
    fn forward<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.forward)
    }

    #[getter]
    fn input_grad<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.input_grad)
    }

    #[getter]
    fn weight_grad<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.weight_grad)
    }

    #[getter]
    fn backward<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0.backward.as_ref().map(|costs| numbers(py, costs)).transpose()
    }

    #[getter]
    fn recompute<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0.recompute.as_ref().map(|costs| numbers(py, costs)).transpose()
    }

    #[getter]
    fn overlap(&self) -> f64 {
        self.0.overlap
    }

    #[getter]
    fn transfer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.transfer)
    }

    #[getter]
    fn latency<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.latency)
    }

    #[getter]
    fn links(&self) -> &'static str {
        self.0.links.name()
    }

    #[getter]
    fn forward_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.forward_memory)
    }

    #[getter]
    fn input_grad_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.input_grad_memory)
    }

    #[getter]
    fn weight_grad_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numbers(py, &self.0.weight_grad_memory)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ((), named) = self.__getnewargs_ex__(py)?;
        let parts: PyResult<Vec<_>> =
            named.iter().map(|(name, value)| Ok(format!("{name}={}", value.repr()?))).collect();
        Ok(format!("Costs({})", parts?.join(", ")))
    }

    /// The three times, and whatever is not as by default.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        let named = PyDict::new(py);
        let (costs, usual) = (&self.0, core::Costs::default());
        for (name, value) in [
            ("forward", &costs.forward),
            ("input_grad", &costs.input_grad),
            ("weight_grad", &costs.weight_grad),
        ] {
            named.set_item(name, numbers(py, value)?)?;
        }
        for (name, value) in [("backward", &costs.backward), ("recompute", &costs.recompute)] {
            if let Some(value) = value {
                named.set_item(name, numbers(py, value)?)?;
            }
        }
        for (name, value, usual) in [
            ("transfer", &costs.transfer, &usual.transfer),
            ("latency", &costs.latency, &usual.latency),
            ("forward_memory", &costs.forward_memory, &usual.forward_memory),
            ("input_grad_memory", &costs.input_grad_memory, &usual.input_grad_memory),
            ("weight_grad_memory", &costs.weight_grad_memory, &usual.weight_grad_memory),
        ] {
            if value != usual {
                named.set_item(name, numbers(py, value)?)?;
            }
        }
        if costs.overlap.to_bits() != usual.overlap.to_bits() {
            named.set_item("overlap", costs.overlap)?;
        }
        if costs.links != usual.links {
            named.set_item("links", costs.links.name())?;
        }
        Ok(((), named))
    }
}

/// A number, or a list of one per stage.
fn numbers<'py>(py: Python<'py>, costs: &core::PerStage) -> PyResult<Bound<'py, PyAny>> {
    Ok(match costs {
        core::PerStage::All(value) => value.into_pyobject(py)?.into_any(),
        core::PerStage::Each(values) => PyList::new(py, values)?.into_any(),
    })
}

/// A schedule in time.
#[pyclass(frozen, module = "torchrelay._core")]
pub struct Simulation(core::Simulation);

/// A rank, what it does, and when that starts and ends.
type Step = (usize, Action, f64, f64);

/// When a rank has nothing to do, why, and the action that is to blame.
type Idle = (f64, f64, &'static str, Option<Action>);

#[pymethods]
impl Simulation {
    #[getter]
    fn makespan(&self) -> f64 {
        self.0.makespan()
    }

    #[getter]
    fn cost(&self) -> f64 {
        self.0.cost()
    }

    #[getter]
    fn bubble_rate(&self) -> f64 {
        self.0.bubble_rate()
    }

    #[getter]
    fn bubble(&self) -> Vec<f64> {
        self.0.bubble()
    }

    #[getter]
    fn peak_memory(&self) -> Vec<f64> {
        self.0.peak_memory().to_vec()
    }

    #[getter]
    fn critical_path(&self, py: Python<'_>) -> Vec<Step> {
        let path = py.detach(|| self.0.critical_path());
        path.into_iter().map(|(rank, span)| (rank, Action(span.action), span.start, span.end)).collect()
    }

    /// What a rank does, and when it starts and ends.
    fn spans<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let rank = count("the rank", rank)?;
        let spans = self.0.spans(rank).ok_or_else(|| self.no_such(rank))?;
        let tuples: PyResult<Vec<Bound<'py, PyTuple>>> =
            spans.iter().map(|span| (Action(span.action), span.start, span.end).into_pyobject(py)).collect();
        PyList::new(py, tuples?)
    }

    /// When a rank has nothing to do, and why.
    fn idle(&self, py: Python<'_>, rank: &Bound<'_, PyAny>) -> PyResult<Vec<Idle>> {
        let rank = count("the rank", rank)?;
        let idle = py.detach(|| self.0.idle(rank)).ok_or_else(|| self.no_such(rank))?;
        let tuple = |idle: core::Idle| {
            let (cause, action) = match idle.cause {
                core::Cause::Waits(action) => ("waits", Some(Action(action))),
                core::Cause::Transfer(action) => ("transfer", Some(Action(action))),
                core::Cause::Sends(action) => ("sends", Some(Action(action))),
                core::Cause::Done => ("done", None),
            };
            (idle.start, idle.end, cause, action)
        };
        Ok(idle.into_iter().map(tuple).collect())
    }

    /// What a rank holds from each time on.
    fn memory(&self, rank: &Bound<'_, PyAny>) -> PyResult<Vec<(f64, f64)>> {
        let rank = count("the rank", rank)?;
        self.0.memory(rank).map(<[_]>::to_vec).ok_or_else(|| self.no_such(rank))
    }

    fn __repr__(&self) -> String {
        format!("<Simulation: makespan {}, bubble rate {:.4}>", self.makespan(), self.bubble_rate())
    }
}

impl Simulation {
    fn no_such(&self, rank: usize) -> PyErr {
        no_such("rank", rank, self.0.ranks())
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

/// What one rank of that schedule does.
#[pyfunction]
#[pyo3(signature = (name, ranks, microbatches, rank, *, stages_per_rank=None))]
pub fn make_rank(
    name: &str,
    ranks: &Bound<'_, PyAny>,
    microbatches: &Bound<'_, PyAny>,
    rank: &Bound<'_, PyAny>,
    stages_per_rank: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Entry>> {
    let py = ranks.py();
    let maker: core::Maker = name.parse().map_err(to_py)?;
    let (ranks, microbatches) =
        (count("the number of ranks", ranks)?, count("the number of micro-batches", microbatches)?);
    let rank = count("the rank", rank)?;
    let stages_per_rank =
        stages_per_rank.map(|given| count("the number of stages per rank", given)).transpose()?;
    let entries = py.detach(|| maker.make_rank(ranks, microbatches, stages_per_rank, rank)).map_err(to_py)?;
    Ok(entries.into_iter().map(Entry::from).collect())
}

/// What one rank of a GPipe schedule does.
#[pyfunction]
#[pyo3(signature = (ranks, microbatches, rank, *, backward=true, ascending=false, recompute="never"))]
pub fn make_gpipe_rank(
    ranks: &Bound<'_, PyAny>,
    microbatches: &Bound<'_, PyAny>,
    rank: &Bound<'_, PyAny>,
    backward: bool,
    ascending: bool,
    recompute: &str,
) -> PyResult<Vec<Entry>> {
    let (ranks, microbatches) =
        (count("the number of ranks", ranks)?, count("the number of micro-batches", microbatches)?);
    let rank = count("the rank", rank)?;
    let recompute = recompute.parse().map_err(to_py)?;
    let options = core::Gpipe { backward, ascending, recompute };
    let entries = core::make_gpipe_rank(ranks, microbatches, options, rank).map_err(to_py)?;
    Ok(entries.into_iter().map(Entry::from).collect())
}

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

/// The names that `make_schedule` knows.
#[pyfunction]
pub fn schedule_names() -> Vec<&'static str> {
    core::Maker::ALL.iter().map(|maker| maker.name()).collect()
}

fn no_such(what: &str, given: usize, count: usize) -> PyErr {
    PyIndexError::new_err(format!("there is no {what} {given}, only {count}"))
}
