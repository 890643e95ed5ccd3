//! Takes gradients into the memory of their bucket, piece by piece, at the moment when the last one of a piece arrives.
//!
//! Between two matrix products nothing of Python's is in the cache, so that a few lines of Python take a few hundred
//! microseconds there. What has to be done for a piece is a call of torch's for each gradient or kind of gradients, and
//! that is all that is done here. Which gradients a piece has, and where each lies, was planned before.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyDict, PyList};

/// As many gradients of a piece, looked at one after another, are enough to set off a collection of garbage.
const MANY: usize = 16;

/// The gradients of some parameters, one after another in a bucket's memory.
struct Piece {
    members: Vec<usize>,
    parameters: Vec<Py<PyAny>>,
    views: Vec<Py<PyAny>>,
    region: Py<PyAny>,
    joined: Vec<(Range<usize>, Py<PyDict>, Py<PyAny>)>,
    apart: Vec<(usize, Py<PyDict>)>,
    targets: Py<PyList>,
}

/// Where gradients are taken to, and what is known in one backward.
#[derive(Default)]
struct State {
    pieces: Arc<[Piece]>,
    over: Vec<bool>,
    keeps: HashSet<usize>,
}

/// The pieces of one bucket; `scale` multiplies gradients on the way.
#[pyclass(frozen, weakref, module = "torchrelay._core")]
pub struct Taker {
    scale: Option<Py<PyAny>>,
    state: Mutex<State>,
    multiply: Py<PyAny>,
    join: Py<PyAny>,
    copy_all: Py<PyAny>,
    collector: Py<PyAny>,
}

type Given = (Vec<usize>, Vec<Py<PyAny>>, Vec<Py<PyAny>>, Py<PyAny>, Vec<(usize, usize, Py<PyAny>)>);

impl Piece {
    fn new(py: Python<'_>, (members, parameters, views, region, joined): Given) -> PyResult<Self> {
        let size = members.len();
        if parameters.len() != size || views.len() != size {
            return Err(PyValueError::new_err("a piece has as many parameters and views as members"));
        }
        let target = |out: &Py<PyAny>| -> PyResult<Py<PyDict>> {
            let options = PyDict::new(py);
            options.set_item(intern!(py, "out"), out)?;
            Ok(options.unbind())
        };
        let mut alone = vec![true; size];
        let mut runs = Vec::with_capacity(joined.len());
        for (start, stop, out) in joined {
            let Some(run) = alone.get_mut(start..stop) else {
                return Err(PyValueError::new_err("a run reaches beyond the members of its piece"));
            };
            run.fill(false);
            runs.push((start..stop, target(&out)?, out));
        }
        let (targets, mut apart) = (PyList::empty(py), Vec::new());
        for (place, (_, view)) in alone.iter().zip(&views).enumerate().filter(|(_, (alone, _))| **alone) {
            targets.append(view)?;
            apart.push((place, target(view)?));
        }
        Ok(Self { members, parameters, views, region, joined: runs, apart, targets: targets.unbind() })
    }
}

impl Piece {
    fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for held in self.parameters.iter().chain(&self.views) {
            visit.call(held)?;
        }
        for (_, options, target) in &self.joined {
            visit.call(options)?;
            visit.call(target)?;
        }
        for (_, options) in &self.apart {
            visit.call(options)?;
        }
        visit.call(&self.targets)?;
        visit.call(&self.region)
    }
}

impl Taker {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock, and no Python runs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the gradients, if each is one that can be copied, and none but its own view of the memory; whether they
    /// were. If not, all are as they were.
    fn take(&self, py: Python<'_>, piece: &Piece) -> PyResult<bool> {
        if piece.members.len() < MANY {
            return self.take_all(py, piece);
        }
        // To look at a gradient makes an object of it, which is gone when it was taken.
        let collector = self.collector.bind(py);
        if !collector.call_method0(intern!(py, "isenabled"))?.is_truthy()? {
            return self.take_all(py, piece);
        }
        collector.call_method0(intern!(py, "disable"))?;
        let taken = self.take_all(py, piece);
        collector.call_method0(intern!(py, "enable"))?;
        taken
    }

    fn take_all(&self, py: Python<'_>, piece: &Piece) -> PyResult<bool> {
        let name = intern!(py, "grad");
        let mut gradients = Vec::with_capacity(piece.members.len());
        let mut in_place = 0;
        for (parameter, view) in piece.parameters.iter().zip(&piece.views) {
            let gradient = parameter.bind(py).getattr(name)?;
            if gradient.is_none() {
                return Ok(false);
            }
            in_place += usize::from(gradient.is(view));
            gradients.push(gradient);
        }
        if in_place == 0 {
            match self.copy(py, piece, &gradients) {
                Ok(()) => {}
                // One of them is sparse, or shares memory with another bucket's.
                Err(error) if error.is_instance_of::<PyRuntimeError>(py) => return Ok(false),
                Err(error) => return Err(error),
            }
        } else if in_place < gradients.len() {
            return Ok(false);
        } else if let Some(scale) = &self.scale {
            piece.region.bind(py).call_method1(intern!(py, "mul_"), (scale,))?;
        }
        let keeps = self.keeps(piece);
        for (place, (parameter, view)) in piece.parameters.iter().zip(&piece.views).enumerate() {
            if !keeps.contains(&place) {
                parameter.bind(py).setattr(name, view)?;
            }
        }
        Ok(true)
    }

    /// Places of those whose gradients are somebody's own.
    fn keeps(&self, piece: &Piece) -> Vec<usize> {
        let state = self.lock();
        if state.keeps.is_empty() {
            return Vec::new();
        }
        let members = piece.members.iter().enumerate();
        members.filter(|(_, member)| state.keeps.contains(member)).map(|(place, _)| place).collect()
    }

    fn copy(&self, py: Python<'_>, piece: &Piece, gradients: &[Bound<'_, PyAny>]) -> PyResult<()> {
        for (run, target, out) in &piece.joined {
            let alike = PyList::new(py, gradients.get(run.clone()).unwrap_or_default())?;
            self.join.bind(py).call((alike,), Some(target.bind(py)))?;
            if let Some(scale) = &self.scale {
                out.bind(py).call_method1(intern!(py, "mul_"), (scale,))?;
            }
        }
        let apart = piece.apart.iter().filter_map(|(place, out)| Some((gradients.get(*place)?, out)));
        if let Some(scale) = &self.scale {
            for (gradient, out) in apart {
                self.multiply.bind(py).call((gradient, scale), Some(out.bind(py)))?;
            }
        } else if !piece.apart.is_empty() {
            let sources = PyList::new(py, apart.map(|(gradient, _)| gradient).collect::<Vec<_>>())?;
            self.copy_all.bind(py).call1((&piece.targets, sources))?;
        }
        Ok(())
    }
}

#[pymethods]
impl Taker {
    #[new]
    #[pyo3(signature = (*, scale))]
    fn new(py: Python<'_>, scale: Option<Py<PyAny>>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        Ok(Self {
            state: Mutex::default(),
            scale,
            multiply: torch.getattr("mul")?.unbind(),
            join: torch.getattr("cat")?.unbind(),
            copy_all: torch.getattr("_foreach_copy_")?.unbind(),
            collector: py.import("gc")?.into_any().unbind(),
        })
    }

    /// Gradients are taken to other places from now on.
    ///
    /// A piece is a tuple: its members' positions, their parameters, where each gradient lies, the memory of all, and
    /// (start, stop, target) of runs that are rows of one tensor.
    fn lay(&self, py: Python<'_>, pieces: Vec<Given>) -> PyResult<()> {
        let pieces =
            pieces.into_iter().map(|piece| Piece::new(py, piece)).collect::<PyResult<Arc<[Piece]>>>()?;
        let mut state = self.lock();
        state.over = vec![false; pieces.len()];
        let before = std::mem::replace(&mut state.pieces, pieces);
        drop(state);
        drop(before); // may run Python
        Ok(())
    }

    /// A backward begins, in which these members keep their own gradients.
    fn open(&self, keeps: HashSet<usize>) {
        let mut state = self.lock();
        state.over.fill(false);
        state.keeps = keeps;
    }

    /// Takes the gradients of a piece, whose last one has arrived, unless that was done in this backward.
    pub fn arrive(&self, py: Python<'_>, number: usize) -> PyResult<()> {
        let pieces = {
            let state = self.lock();
            if state.over.get(number).copied().unwrap_or(true) {
                return Ok(());
            }
            Arc::clone(&state.pieces)
        };
        let Some(piece) = pieces.get(number) else { return Ok(()) };
        if self.take(py, piece)?
            && let Some(over) = self.lock().over.get_mut(number)
        {
            *over = true;
        }
        Ok(())
    }

    /// No more gradients come: takes those that were not taken.
    ///
    /// Returns the numbers of pieces that could not be taken whole, as those with an `unused` member.
    #[allow(clippy::needless_pass_by_value)] // what pyo3 converts is owned
    fn gather(&self, py: Python<'_>, unused: HashSet<usize>) -> PyResult<Vec<usize>> {
        let mut left = Vec::new();
        let (pieces, over) = {
            let mut state = self.lock();
            let closed = vec![true; state.pieces.len()];
            (Arc::clone(&state.pieces), std::mem::replace(&mut state.over, closed))
        };
        for (number, (piece, over)) in pieces.iter().zip(over).enumerate() {
            if over {
                continue;
            }
            let whole = unused.is_empty() || piece.members.iter().all(|member| !unused.contains(member));
            if !whole || !self.take(py, piece)? {
                left.push(number);
            }
        }
        Ok(left)
    }

    /// No gradients will be taken.
    fn close(&self) {
        self.lock().over.fill(true);
    }

    // Parameters may refer to their wrapper, by a user's hook: then it takes the collector to free them.

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(state) = self.state.try_lock() else { return Ok(()) };
        for piece in state.pieces.iter() {
            piece.visit(&visit)?;
        }
        Ok(())
    }

    fn __clear__(&self) {
        let before = std::mem::take(&mut *self.lock());
        drop(before);
    }
}
