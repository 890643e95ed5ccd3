//! Readiness for Python: a tracker shared by the hooks of all parameters of a wrapper.
//!
//! The hot path is [`ReadinessHook::__call__`]: torch calls it once for each parameter of each backward. It takes a
//! lock, counts, and calls into Python only at a backward's first gradient and when buckets have become launchable.
//! The lock is never held while Python runs, so that a callback may call back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;
use torchrelay_core::{Phase, Readiness as Tracker};

use crate::errors::to_py;
use crate::taker::Taker;

struct Shared {
    tracker: Mutex<Tracker>,
    begin: Py<PyAny>,
    launch: Py<PyAny>,
    take: Option<Py<PyAny>>,
    lock: Option<Py<PyAny>>,
    takers: Mutex<Arc<[Place]>>,
    records: Py<PyAny>,
}

/// What takes a piece, and the piece's number there. It refers to parameters, whose hooks are here: so it is not kept.
struct Place {
    taker: Py<PyWeakrefReference>,
    number: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Tracker> {
        // Nothing panics under the lock; if something did, the tracker's numbers are still numbers.
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        if self.lock().phase() == Phase::Idle {
            self.begin.call0(py)?;
        }
        let progress = self.lock().mark(index);
        if let Some(piece) = progress.piece {
            self.take_piece(py, piece)?;
        }
        if let Some(stop) = progress.stop {
            self.launch.call1(py, (stop,))?;
        }
        Ok(())
    }

    fn take_piece(&self, py: Python<'_>, piece: usize) -> PyResult<()> {
        let takers = Arc::clone(&self.takers.lock().unwrap_or_else(PoisonError::into_inner));
        let found = match takers.get(piece) {
            Some(place) => place.taker.bind(py).upgrade_as::<Taker>()?.map(|taker| (taker, place.number)),
            None => None,
        };
        let (Some((taker, number)), Some(lock), false) =
            (found, &self.lock, self.records.call0(py)?.is_truthy(py)?)
        else {
            return self.take.as_ref().map_or(Ok(()), |take| take.call1(py, (piece,)).map(drop));
        };
        lock.call_method0(py, intern!(py, "acquire"))?;
        let result = taker.get().arrive(py, number);
        lock.call_method0(py, intern!(py, "release"))?;
        result
    }
}

/// Counts the gradients of a backward; see `torchrelay_core::Readiness`.
///
/// `begin` is called at a backward's first gradient and shall call `start`; `launch` gets the number of buckets that may
/// be launched by now; `take`, the number of a piece that is complete and has no taker, or whose taking autograd would
/// record. They should refer to their owner weakly: the hooks live as long as the parameters. `lock` is held while a
/// taker takes a piece.
#[pyclass(frozen, module = "torchrelay._core")]
pub struct Readiness(Arc<Shared>);

#[pymethods]
impl Readiness {
    #[new]
    #[pyo3(signature = (parameters, buckets, *, begin, launch, take=None, lock=None))]
    #[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
    fn new(
        py: Python<'_>,
        parameters: usize,
        buckets: Vec<Vec<usize>>,
        begin: Py<PyAny>,
        launch: Py<PyAny>,
        take: Option<Py<PyAny>>,
        lock: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let tracker = Mutex::new(Tracker::new(parameters, &buckets).map_err(to_py)?);
        let takers = Mutex::new(Arc::default());
        let records = py.import("torch")?.getattr("is_grad_enabled")?.unbind();
        Ok(Self(Arc::new(Shared { tracker, begin, launch, take, lock, takers, records })))
    }

    /// The hook for one parameter.
    fn hook(&self, index: usize) -> PyResult<ReadinessHook> {
        let parameters = self.0.lock().parameters();
        if index < parameters {
            return Ok(ReadinessHook { shared: Arc::clone(&self.0), index });
        }
        Err(pyo3::exceptions::PyIndexError::new_err(format!(
            "there is no parameter {index}: there are {parameters}"
        )))
    }

    /// Opens a backward.
    #[pyo3(signature = (reduce, *, hold=false))]
    fn start(&self, reduce: bool, hold: bool) {
        self.0.lock().start(reduce, hold);
    }

    /// Counts a gradient, as the parameter's hook does.
    fn mark(&self, py: Python<'_>, index: usize) -> PyResult<()> {
        self.0.mark(py, index)
    }

    /// Releases every bucket before the end, if all parameters have been marked; whether that is so.
    fn release(&self) -> bool {
        self.0.lock().release()
    }

    /// Closes the backward.
    fn finish(&self) {
        self.0.lock().finish();
    }

    /// Forgets the backward.
    fn abandon(&self) {
        self.0.lock().abandon();
    }

    /// Counts parameters as used in this window.
    #[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
    fn carry(&self, parameters: Vec<usize>) {
        self.0.lock().carry(&parameters);
    }

    /// Parameters without a gradient in this window.
    #[getter]
    fn unused(&self) -> Vec<usize> {
        self.0.lock().unused()
    }

    /// Parameters whose gradient came after their bucket was released.
    #[getter]
    fn late(&self) -> Vec<usize> {
        self.0.lock().late().to_vec()
    }

    /// Puts other buckets in the place of these.
    #[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
    fn rearrange(&self, buckets: Vec<Vec<usize>>) -> PyResult<()> {
        self.0.lock().rearrange(&buckets).map_err(to_py)
    }

    /// Divides the buckets into pieces; for each, if given, its taker and its number there.
    #[pyo3(signature = (pieces, takers=Vec::new()))]
    #[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
    fn divide(&self, pieces: Vec<Vec<usize>>, takers: Vec<(Bound<'_, Taker>, usize)>) -> PyResult<()> {
        let places = takers
            .into_iter()
            .map(|(taker, number)| Ok(Place { taker: PyWeakrefReference::new(&taker)?.unbind(), number }))
            .collect::<PyResult<Arc<[Place]>>>()?;
        self.0.lock().divide(&pieces).map_err(to_py)?;
        *self.0.takers.lock().unwrap_or_else(PoisonError::into_inner) = places;
        Ok(())
    }

    /// Parameters in the order in which their gradients arrived in this backward.
    #[getter]
    fn arrival(&self) -> Vec<usize> {
        self.0.lock().arrival().to_vec()
    }

    /// Whether the buckets of this backward are all released at its end.
    #[getter]
    fn deferred(&self) -> bool {
        self.0.lock().deferred()
    }

    /// Whether a backward is open.
    #[getter]
    fn active(&self) -> bool {
        self.0.lock().phase() != Phase::Idle
    }
}

/// What is registered with `register_post_accumulate_grad_hook`.
#[pyclass(frozen, module = "torchrelay._core")]
pub struct ReadinessHook {
    shared: Arc<Shared>,
    index: usize,
}

#[pymethods]
impl ReadinessHook {
    fn __call__(&self, py: Python<'_>, parameter: &Bound<'_, PyAny>) -> PyResult<()> {
        let _ = parameter;
        self.shared.mark(py, self.index)
    }
}
