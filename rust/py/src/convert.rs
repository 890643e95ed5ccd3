//! Python's integers and bools as the core's, with errors that name the position.
//!
//! A `bool` is refused although it is an `int`: where a count is wanted it is a slip. An integer beyond 64 bits is a
//! `PlanError`, like every other number that no plan can be made of.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use torchrelay_core::{Cost, PerStage};

use crate::errors::PlanError;

/// What `place` calls the number in a message.
fn integer(object: &Bound<'_, PyAny>, place: impl Fn() -> String) -> PyResult<i64> {
    if object.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{} must be an int, not a bool", place())));
    }
    object.extract().map_err(|error: PyErr| {
        let py = object.py();
        if error.is_instance_of::<PyOverflowError>(py) {
            PlanError::new_err(format!("{} does not fit in 64 bits", place()))
        } else {
            PyTypeError::new_err(format!("{} must be an int, not {}", place(), type_name(object)))
        }
    })
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "something else".to_owned(), |name| name.to_string())
}

/// The numbers of a sequence.
pub fn integers(what: &str, objects: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let mut numbers = Vec::with_capacity(objects.len().unwrap_or_default());
    for (position, object) in objects.try_iter()?.enumerate() {
        numbers.push(integer(&object?, || format!("{what} at position {position}"))?);
    }
    Ok(numbers)
}

/// The numbers of a sequence, as they are: integers of 64 bits and floats; others are rounded to a float.
pub fn numbers(what: &str, objects: &Bound<'_, PyAny>) -> PyResult<Vec<Cost>> {
    let mut numbers = Vec::with_capacity(objects.len().unwrap_or_default());
    for (position, object) in objects.try_iter()?.enumerate() {
        numbers.push(number(&object?, || format!("{what} at position {position}"))?);
    }
    Ok(numbers)
}

fn number(object: &Bound<'_, PyAny>, place: impl Fn() -> String) -> PyResult<Cost> {
    if object.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{} must be a number, not a bool", place())));
    }
    if let Ok(whole) = object.extract::<u64>() {
        return Ok(Cost::Whole(whole));
    }
    object.extract().map(Cost::Real).map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(object.py()) {
            PlanError::new_err(format!("{} is too large for a float", place()))
        } else {
            PyTypeError::new_err(format!("{} must be a number, not {}", place(), type_name(object)))
        }
    })
}

/// A number, or a sequence with a number for each stage.
pub fn per_stage(what: &str, object: &Bound<'_, PyAny>) -> PyResult<PerStage> {
    if object.hasattr("__iter__")? && !object.is_instance_of::<PyString>() {
        let mut each = Vec::with_capacity(object.len().unwrap_or_default());
        for (stage, object) in object.try_iter()?.enumerate() {
            each.push(float(&object?, || format!("{what} of stage {stage}"))?);
        }
        return Ok(PerStage::Each(each));
    }
    float(object, || what.to_owned()).map(PerStage::All)
}

/// One number for every rank, or one for each.
pub fn per_rank(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    if !object.hasattr("__iter__")? || object.is_instance_of::<PyString>() {
        return float(object, || what.to_owned()).map(|number| vec![number]);
    }
    let place = |rank| move || format!("{what} of rank {rank}");
    object.try_iter()?.enumerate().map(|(rank, object)| float(&object?, place(rank))).collect()
}

fn float(object: &Bound<'_, PyAny>, place: impl Fn() -> String) -> PyResult<f64> {
    #[allow(clippy::cast_precision_loss)] // such an integer is rounded, as Python does
    number(object, place).map(|number| match number {
        Cost::Whole(whole) => whole as f64,
        Cost::Real(real) => real,
    })
}

/// A number that counts something; a negative one is an error.
pub fn count(what: &str, object: &Bound<'_, PyAny>) -> PyResult<usize> {
    let value = integer(object, || what.to_owned())?;
    usize::try_from(value)
        .map_err(|_| PlanError::new_err(format!("{what} is {value}, but must not be negative")))
}

/// A sequence of numbers that count something.
pub fn counts(what: &str, objects: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let check = |(position, value)| {
        usize::try_from(value).map_err(|_| {
            PlanError::new_err(format!("{what} at position {position} is {value}, but must not be negative"))
        })
    };
    integers(what, objects)?.into_iter().enumerate().map(check).collect()
}

/// The bools of a sequence, numpy's among them.
pub fn bools(what: &str, objects: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    let mut flags = Vec::with_capacity(objects.len().unwrap_or_default());
    for (position, object) in objects.try_iter()?.enumerate() {
        let object = object?;
        flags.push(object.extract().map_err(|_: PyErr| {
            let given = type_name(&object);
            PyTypeError::new_err(format!("{what} at position {position} must be a bool, not {given}"))
        })?);
    }
    Ok(flags)
}
