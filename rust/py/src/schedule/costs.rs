//! `Costs`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};
use torchrelay_core as core;

use crate::convert::per_stage;
use crate::errors::to_py;

/// What the actions of each stage cost.
#[pyclass(frozen, eq, module = "torchrelay._core")]
#[derive(PartialEq)]
pub struct Costs(pub(super) core::Costs);

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
