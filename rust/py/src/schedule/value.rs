//! `Schedule`.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyType};
use torchrelay_core as core;

use super::action::{Action, Entry};
use super::costs::Costs;
use super::no_such;
use super::simulation::Simulation;
use crate::convert::{count, counts, per_rank};
use crate::errors::{refused, to_py};

/// What each rank does in one step, in order.
#[pyclass(frozen, eq, hash, subclass, module = "torchrelay._core")]
#[derive(PartialEq, Eq, Hash)]
pub struct Schedule(pub(super) core::Schedule);

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
