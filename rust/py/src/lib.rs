//! The Python module `torchrelay._core`: converts, detaches from the interpreter, calls the core, converts back.

mod errors;

/// Plans for data- and pipeline-parallel training.
#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    use crate::errors::to_py;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// The clocks of the GPipe wavefront.
    #[pyfunction]
    fn clock_cycles(py: Python<'_>, m: usize, n: usize) -> PyResult<Vec<Vec<(usize, usize)>>> {
        py.detach(|| torchrelay_core::clock_cycles(m, n)).map_err(to_py)
    }
}
