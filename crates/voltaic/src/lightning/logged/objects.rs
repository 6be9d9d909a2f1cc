//! Metrics that are logged as objects: found in the module's tree, computed over all ranks, reset, and saved.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::scope::Key;
use super::value::LogValue;
use crate::device::Device;
use crate::distributed::{ProcessGroup, collective_scope};
use crate::dtype::DtypeNames;
use crate::error::{ConfigError, Result};
use crate::nn::Metric;

/// Tensors of metrics by the metrics' fqn.
type States = Vec<(String, Vec<(String, Tensor)>)>;

/// The metrics of a module.
#[derive(Debug, Default)]
pub(super) struct MetricObjects {
    metrics: Vec<(String, Arc<dyn Metric>)>,
    /// What they had accumulated before the evaluation that is open.
    before_eval: Option<States>,
    /// Values by fqn, with the states of all ranks that they are of.
    computed: BTreeMap<String, (Vec<u64>, f64)>,
}

/// A metric that an epoch has logged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct LoggedMetric {
    pub key: Key,
    pub epoch_name: String,
    pub fqn: String,
    /// Of its state.
    pub version: u64,
}

impl MetricObjects {
    pub fn new(metrics: Vec<(String, Arc<dyn Metric>)>) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// The fqn of a metric that is logged as `name`.
    pub fn fqn_of(&self, name: &str, metric: &dyn Metric) -> Result<&str, ConfigError> {
        let id = metric.state().id();
        let known = self.metrics.iter().find(|(_, metric)| metric.state().id() == id);
        known.map(|(fqn, _)| fqn.as_str()).ok_or_else(|| {
            ConfigError::new(
                format!("log({name})"),
                "the metric is not a part of the module, so no checkpoint would have it",
                "make it a field of the module, without #[module(skip)], or log its compute()",
            )
        })
    }

    fn get(&self, fqn: &str) -> Option<&dyn Metric> {
        self.metrics.iter().find(|(known, _)| known == fqn).map(|(_, metric)| metric.as_ref())
    }

    pub fn reset(&self, fqn: &str) {
        if let Some(metric) = self.get(fqn) {
            metric.reset();
        }
    }

    fn states(&self) -> Result<States> {
        self.metrics.iter().map(|(fqn, metric)| Ok((fqn.clone(), metric.state().named()?))).collect()
    }

    /// Notes what there is, which an evaluation that does not come to its end leaves behind.
    pub fn begin_eval(&mut self) -> Result<()> {
        self.abandon_eval();
        self.before_eval = Some(self.states()?);
        Ok(())
    }

    pub fn end_eval(&mut self) {
        self.before_eval = None;
    }

    /// Back to before the evaluation, if one is open.
    pub fn abandon_eval(&mut self) {
        for (fqn, state) in self.before_eval.take().unwrap_or_default() {
            if let Some(metric) = self.get(&fqn)
                && metric.state().restore(&state).is_err()
            {
                metric.reset(); // cannot be: these were its own
            }
        }
    }

    /// What a checkpoint keeps: that of before an evaluation, which is repeated. Names are `<fqn>.<part>`.
    pub fn saved(&self) -> Result<Vec<(String, Tensor)>> {
        let own;
        let states = match &self.before_eval {
            Some(states) => states,
            None => {
                own = self.states()?;
                &own
            }
        };
        let named = |(fqn, state): &(String, Vec<(String, Tensor)>)| -> Vec<(String, Tensor)> {
            state.iter().map(|(part, tensor)| (format!("{fqn}.{part}"), tensor.shallow_clone())).collect()
        };
        Ok(states.iter().flat_map(named).collect())
    }

    /// Restores what [`MetricObjects::saved`] gave, on `device`.
    pub fn restore(&mut self, saved: &[(String, Tensor)], device: Device) -> Result<()> {
        self.before_eval = None;
        let mut states: BTreeMap<&str, Vec<(String, Tensor)>> = BTreeMap::new();
        for (name, tensor) in saved {
            let (fqn, part) = name.rsplit_once('.').unwrap_or(("", name));
            states.entry(fqn).or_default().push((part.to_owned(), tensor.f_to_device(device.tch())?));
        }
        for (fqn, metric) in &self.metrics {
            metric.state().restore(&states.remove(fqn.as_str()).unwrap_or_default())?;
        }
        for fqn in states.keys() {
            tracing::warn!("the checkpoint has state of the metric {fqn}, which this module does not have");
        }
        Ok(())
    }

    /// Values over all ranks by hook and name, with their epoch name, of the metrics that any rank has logged.
    ///
    /// # Collective
    /// If there are metrics. # Sync: reads the values back.
    pub fn values(
        &mut self,
        group: Option<&ProcessGroup>,
        mut own: Vec<LoggedMetric>,
    ) -> Result<Vec<(Key, (String, f64))>> {
        if self.metrics.is_empty() {
            return Ok(Vec::new());
        }
        for logged in &mut own {
            logged.version = self.get(&logged.fqn).map_or(0, |metric| metric.state().version());
        }
        let mut logged: Vec<LoggedMetric> = match group {
            Some(group) => {
                let _named = collective_scope("logged metrics");
                group.all_gather_object(&own)?.into_iter().flatten().collect()
            }
            None => own,
        };
        let mut versions: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for LoggedMetric { fqn, version, .. } in &mut logged {
            versions.entry(fqn.clone()).or_default().push(std::mem::take(version));
        }
        logged.sort(); // the same order on all ranks
        logged.dedup();
        let mut values = Vec::new();
        for LoggedMetric { key, epoch_name, fqn, .. } in logged {
            let versions = versions.get(&fqn).cloned().unwrap_or_default();
            // every rank has the versions of all ranks, so all decide alike
            let known = self.computed.get(&fqn).filter(|known| known.0 == versions).map(|known| known.1);
            let value = match (known, self.get(&fqn)) {
                (Some(value), _) => value,
                (None, None) => continue,
                (None, Some(metric)) => {
                    let parts = match group {
                        Some(group) => gathered(group, metric)?,
                        None => metric.state().tensors()?,
                    };
                    let value = metric.value(&parts)?;
                    check_scalar(&key.1, &value)?;
                    LogValue::Tensor(value).read()
                }
            };
            self.computed.insert(fqn, (versions, value));
            values.push((key, (epoch_name, value)));
        }
        Ok(values)
    }
}

/// A logged metric has one number.
pub(super) fn check_scalar(name: &str, value: &Tensor) -> Result<(), ConfigError> {
    if value.numel() == 1 {
        return Ok(());
    }
    Err(ConfigError::new(
        format!("log({name})"),
        format!("the metric's value has shape {:?}, which is not a scalar", value.size()),
        "log a number made of its compute(), such as one class of it",
    ))
}

/// Dtype and shape of a part.
type Shape = (String, Vec<i64>);

/// The dtype as ranks exchange it.
fn name_of(kind: Kind) -> String {
    DtypeNames::of_kind(kind).map_or_else(|| format!("{kind:?}"), |dtype| dtype.name.to_owned())
}

fn kind_of(name: &str) -> Option<Kind> {
    DtypeNames::of_name(name)?.kind
}

/// The parts of all ranks together, in the order of the ranks, on the host. # Collective
fn gathered(group: &ProcessGroup, metric: &dyn Metric) -> Result<Vec<Tensor>> {
    let own = metric.state().named()?;
    let shapes: Vec<Shape> = own.iter().map(|(_, part)| (name_of(part.kind()), part.size())).collect();
    let _named = collective_scope("state of a metric");
    let shapes = group.all_gather_object(&shapes)?;
    let largest = shapes.iter().map(|shapes| shapes.iter().map(num_bytes).sum::<i64>()).max().unwrap_or(0);
    let bytes = Tensor::f_zeros([largest], (Kind::Uint8, tch::Device::Cpu))?;
    let mut at = 0;
    for (_, part) in &own {
        let part = part.f_to_device(tch::Device::Cpu)?.f_contiguous()?.f_reshape([-1])?;
        let part = part.f_view_dtype(Kind::Uint8)?;
        bytes.f_narrow(0, at, part.numel() as i64)?.f_copy_(&part)?;
        at += part.numel() as i64;
    }
    let all = group.all_gather(&bytes)?;
    let sum = metric.state().empty();
    for (rank, shapes) in shapes.iter().enumerate() {
        let (mut at, mut parts) = (0, Vec::new());
        for shape in shapes {
            let Some(kind) = kind_of(&shape.0) else {
                let what = format!("a part has dtype {}, which ranks cannot exchange", shape.0);
                return Err(ConfigError::new("metric", what, "keep it as float32 or int64").into());
            };
            let mut part = Tensor::f_empty([num_bytes(shape)], (Kind::Uint8, tch::Device::Cpu))?;
            part.f_copy_(&all.f_get(rank as i64)?.f_narrow(0, at, num_bytes(shape))?)?;
            parts.push(part.f_view_dtype(kind)?.f_reshape(&shape.1)?);
            at += num_bytes(shape);
        }
        if !parts.is_empty() {
            sum.add(parts)?;
        }
    }
    sum.tensors()
}

fn num_bytes((kind, size): &Shape) -> i64 {
    let width = kind_of(kind).map_or(0, |kind| kind.elt_size_in_bytes() as i64);
    width * size.iter().product::<i64>()
}
