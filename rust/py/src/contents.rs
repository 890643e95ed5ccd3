//! Whether what modules hold is still what they held: asked before every forward, of every place.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Whether the values of the tables, one table after another, are these very objects.
///
/// A table is a dictionary, or has `values()`.
#[pyfunction]
pub fn same_contents(tables: &Bound<'_, PyList>, contents: &Bound<'_, PyList>) -> PyResult<bool> {
    let mut expected = contents.iter();
    let mut is_next = |value: &Bound<'_, PyAny>| expected.next().is_some_and(|known| known.is(value));
    for table in tables {
        if let Ok(table) = table.cast_exact::<PyDict>() {
            if !table.iter().all(|(_, value)| is_next(&value)) {
                return Ok(false);
            }
        } else {
            for value in table.call_method0(intern!(table.py(), "values"))?.try_iter()? {
                if !is_next(&value?) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(expected.next().is_none())
}
