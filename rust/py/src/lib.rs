//! The Python module `torchrelay._core`: converts, detaches from the interpreter, calls the core, converts back.

mod balance;
mod buckets;
mod contents;
mod convert;
mod errors;

mod partition;
mod readiness;
mod schedule;
mod skip;
mod streams;
mod taker;

/// Plans for data- and pipeline-parallel training.
#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    use crate::convert::count;
    use crate::errors::to_py;

    #[pymodule_export]
    use crate::balance::balance;
    #[pymodule_export]
    use crate::buckets::{
        agreed_order, assign_buckets, buckets_by_arrival, pieces, reduction_end, verify_buckets,
    };
    #[pymodule_export]
    use crate::contents::same_contents;
    #[pymodule_export]
    use crate::partition::verify_partition;
    #[pymodule_export]
    use crate::readiness::{Readiness, ReadinessHook};
    #[pymodule_export]
    use crate::schedule::{
        Action, Costs, Found, Schedule, Simulation, make_gpipe, make_gpipe_rank, make_rank, make_schedule,
        schedule_names, search_schedule, text_picture,
    };
    #[pymodule_export]
    use crate::skip::verify_skips;
    #[pymodule_export]
    use crate::streams::{StreamOperation, StreamPlan, plan_streams};
    #[pymodule_export]
    use crate::taker::Taker;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// The clocks of the GPipe wavefront.
    #[pyfunction]
    fn clock_cycles(m: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<(usize, usize)>>> {
        let py = m.py();
        let (m, n) = (count("the number of micro-batches", m)?, count("the number of partitions", n)?);
        py.detach(|| torchrelay_core::clock_cycles(m, n)).map_err(to_py)
    }
}
