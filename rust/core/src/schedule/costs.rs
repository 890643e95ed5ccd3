//! What the actions of each stage cost: time, time on the way to other ranks, and memory.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A number for every stage alike, or one for each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number, or a list of numbers, one for each stage")]
pub enum PerStage {
    /// The same for every stage.
    All(f64),
    /// One for each stage, the first stage's first.
    Each(Vec<f64>),
}

impl PerStage {
    /// The number of a stage; 0 beyond the end, which [`Costs::check`] has ruled out.
    pub fn of(&self, stage: usize) -> f64 {
        match self {
            Self::All(value) => *value,
            Self::Each(values) => values.get(stage).copied().unwrap_or(0.0),
        }
    }

    fn values(&self) -> &[f64] {
        match self {
            Self::All(value) => std::slice::from_ref(value),
            Self::Each(values) => values,
        }
    }
}

impl From<f64> for PerStage {
    fn from(value: f64) -> Self {
        Self::All(value)
    }
}

impl From<Vec<f64>> for PerStage {
    fn from(values: Vec<f64>) -> Self {
        Self::Each(values)
    }
}

/// What transfers hold up. A link is the way from one rank to another, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Links {
    /// Nothing but the action that needs what is transferred; a link carries any number at a time.
    #[default]
    Parallel,
    /// One another: a link carries one at a time, in the order in which they were handed over.
    Serial,
    /// The rank that sends, too: it goes on when its transfer is through.
    Blocking,
}

impl Links {
    /// How it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Serial => "serial",
            Self::Blocking => "blocking",
        }
    }
}

impl FromStr for Links {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::Parallel, Self::Serial, Self::Blocking];
        all.into_iter().find(|links| links.name() == name).ok_or_else(|| Error::UnknownOption {
            what: "links",
            given: name.to_owned(),
            known: "parallel, serial, blocking",
        })
    }
}

/// Times in any one unit, memory in any other; for one micro-batch on one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Costs {
    /// Of a forward.
    pub forward: PerStage,
    /// Of an input's gradient.
    pub input_grad: PerStage,
    /// Of the weights' gradients.
    pub weight_grad: PerStage,
    /// Of a whole backward; `None`: of its two parts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<PerStage>,
    /// Of a recomputation; `None`: of a forward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<PerStage>,
    /// What a forward and a backward that overlap take, as a share of what they take one after the other.
    pub overlap: f64,
    /// How long a link is taken for what passes between a stage and the next, on different ranks, either way (the last
    /// stage's number is not used).
    pub transfer: PerStage,
    /// How much later it arrives, without taking the link.
    pub latency: PerStage,
    /// What transfers hold up.
    pub links: Links,
    /// What a forward adds to the memory of its rank; taken at its start. Where a recomputation follows, the forward keeps
    /// nothing but its input, which is not counted, and the recomputation adds this.
    pub forward_memory: PerStage,
    /// What an input's gradient adds (or, below zero, frees; at its end).
    pub input_grad_memory: PerStage,
    /// The same for the weights' gradients. A whole backward does one after the other.
    pub weight_grad_memory: PerStage,
}

impl Default for Costs {
    /// One unit of time for each part of the work, none for transfers; one unit of memory from a forward to its weights'
    /// gradients.
    fn default() -> Self {
        let all = PerStage::All;
        Self {
            forward: all(1.0),
            input_grad: all(1.0),
            weight_grad: all(1.0),
            backward: None,
            recompute: None,
            overlap: 1.0,
            transfer: all(0.0),
            latency: all(0.0),
            links: Links::default(),
            forward_memory: all(1.0),
            input_grad_memory: all(0.0),
            weight_grad_memory: all(-1.0),
        }
    }
}

impl Costs {
    /// The times of the parts of the work, the same for every stage; the rest as by default.
    ///
    /// # Errors
    /// Those of [`Costs::check`].
    pub fn new(forward: f64, input_grad: f64, weight_grad: f64) -> Result<Self> {
        let costs = Self {
            forward: forward.into(),
            input_grad: input_grad.into(),
            weight_grad: weight_grad.into(),
            ..Self::default()
        };
        costs.check(None)?;
        Ok(costs)
    }

    /// Whether the numbers are times and memory, and as many as there are stages, if that is known.
    ///
    /// # Errors
    /// [`Error::BadCost`] for a time that is negative, infinite or not a number, or memory that is not finite;
    /// [`Error::CostsDiffer`] for a list that is not of one number per stage.
    pub fn check(&self, stages: Option<usize>) -> Result<()> {
        for (what, costs, is_time) in self.named() {
            for &value in costs.values() {
                if !value.is_finite() || is_time && value < 0.0 {
                    return Err(if is_time {
                        Error::BadCost { what, value }
                    } else {
                        Error::BadMemory { what, value }
                    });
                }
            }
            if let (PerStage::Each(values), Some(stages)) = (costs, stages)
                && values.len() != stages
            {
                return Err(Error::CostsDiffer { what, given: values.len(), stages });
            }
        }
        if self.overlap.is_finite() && self.overlap >= 0.0 {
            Ok(())
        } else {
            Err(Error::BadCost { what: "overlap", value: self.overlap })
        }
    }

    /// Of a whole backward.
    pub fn backward_of(&self, stage: usize) -> f64 {
        let parts = || self.input_grad.of(stage) + self.weight_grad.of(stage);
        self.backward.as_ref().map_or_else(parts, |costs| costs.of(stage))
    }

    /// Of a recomputation.
    pub fn recompute_of(&self, stage: usize) -> f64 {
        self.recompute.as_ref().unwrap_or(&self.forward).of(stage)
    }

    /// All that are per stage, and whether they are times.
    fn named(&self) -> impl Iterator<Item = (&'static str, &PerStage, bool)> {
        let always = [
            ("forward", &self.forward, true),
            ("input_grad", &self.input_grad, true),
            ("weight_grad", &self.weight_grad, true),
            ("transfer", &self.transfer, true),
            ("latency", &self.latency, true),
            ("forward_memory", &self.forward_memory, false),
            ("input_grad_memory", &self.input_grad_memory, false),
            ("weight_grad_memory", &self.weight_grad_memory, false),
        ];
        let chosen = [("backward", &self.backward), ("recompute", &self.recompute)];
        always
            .into_iter()
            .chain(chosen.into_iter().filter_map(|(what, costs)| Some((what, costs.as_ref()?, true))))
    }
}
