//! Schedules by name, whole or one rank's part.

use pyo3::prelude::*;
use torchrelay_core as core;

use super::action::Entry;
use super::value::Schedule;
use crate::convert::count;
use crate::errors::to_py;

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

/// The names that `make_schedule` knows.
#[pyfunction]
pub fn schedule_names() -> Vec<&'static str> {
    core::Maker::ALL.iter().map(|maker| maker.name()).collect()
}
