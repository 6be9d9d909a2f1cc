//! Muon for matrices and Adam for the other parameters, as DeepSpeed's optimizer `Muon`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::adam::AdamRule;
use super::engine::Engine;
use super::formula::check_rate;
use super::muon_rule::MuonRule;
use super::optimizer::{BuildOptimizer, Optimizer};
use super::param_group::{GroupOptions, Merged, NsMethod, Overrides, ParamGroupSpec, build_groups};
use super::problems::Problems;
use super::setters::setters;
use crate::error::Result;

const NAME: &str = "MuonWithAuxAdam";

/// DeepSpeed 0.19.8's optimizer `Muon`: [`Muon`](super::Muon) for parameters of two or more dimensions whose name has neither `embed` nor
/// `lm_head` in it, AdamW for all others. Each group of parameters becomes two, of which each takes those of the settings that it knows.
///
/// With gradient `g` of a matrix: `m = momentum * m + (1 - momentum) * g`; `u = NS((1 - momentum) * g + momentum * m)`;
/// `w -= lr * weight_decay * w`; `w -= lr * sqrt(max(1, rows / columns)) * u`. A kernel of four dimensions is one matrix with a row
/// for each output, but `rows` and `columns` are its last two dimensions; of three or more than four dimensions the last two are a
/// matrix each.
///
/// As in DeepSpeed, clipping limits the norm of all `u` and of the other gradients together; `m` has the gradients before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MuonWithAuxAdam {
    /// Learning rate where `muon_lr` or `adam_lr` is not set: 0.02 for matrices and 0.0003 for others unless set.
    pub lr: Option<f64>,
    /// Learning rate of matrices, at least 0.
    pub muon_lr: Option<f64>,
    /// Learning rate of other parameters, at least 0.
    pub adam_lr: Option<f64>,
    /// Momentum factor of matrices, in [0, 1).
    pub momentum: f64,
    /// Decay rates of the running means of other parameters, each in [0, 1).
    pub betas: (f64, f64),
    /// Term added to the denominator for other parameters, at least 0.
    pub eps: f64,
    /// Weight decay of all, at least 0.
    pub weight_decay: f64,
    /// The Newton-Schulz iteration.
    pub ns_method: NsMethod,
    /// Other parameters follow AdamW; Adam with an L2 penalty if false.
    pub adam_w_mode: bool,
    /// Updates parameters in bfloat16 or float16 in float32 copies, and rounds these to the parameters after each step.
    pub master_weights: bool,
}

impl Default for MuonWithAuxAdam {
    fn default() -> Self {
        Self {
            lr: None,
            muon_lr: None,
            adam_lr: None,
            momentum: 0.95,
            betas: (0.9, 0.95),
            eps: 1e-10,
            weight_decay: 0.0,
            ns_method: NsMethod::default(),
            adam_w_mode: true,
            master_weights: false,
        }
    }
}

impl MuonWithAuxAdam {
    /// DeepSpeed's settings with these learning rates of matrices and of other parameters.
    pub fn new(muon_lr: f64, adam_lr: f64) -> Self {
        Self { muon_lr: Some(muon_lr), adam_lr: Some(adam_lr), ..Self::default() }
    }

    setters! {
        /// Sets the momentum factor of matrices.
        momentum: f64,
        /// Sets the decay rates of other parameters.
        betas: (f64, f64),
        /// Sets the term in the denominator for other parameters.
        eps: f64,
        /// Sets the weight decay.
        weight_decay: f64,
        /// Sets the Newton-Schulz iteration.
        ns_method: NsMethod,
        /// Sets whether the weight decay of other parameters is AdamW's.
        adam_w_mode: bool,
        /// Sets whether parameters of a lower dtype are updated in float32 copies.
        master_weights: bool,
    }

    /// The numbers of one of the two groups.
    fn merge(&self, own: &Overrides) -> Merged {
        let (set, standard) = if own.are_matrices { (self.muon_lr, 0.02) } else { (self.adam_lr, 3e-4) };
        let options = if own.are_matrices {
            let momentum = own.momentum.unwrap_or(self.momentum);
            GroupOptions::MuonWithAuxAdam { momentum, ns_method: self.ns_method }
        } else {
            let (betas, eps) = (own.betas.unwrap_or(self.betas), own.eps.unwrap_or(self.eps));
            GroupOptions::Adam { betas, eps, amsgrad: false, bias_correction: true }
        };
        Merged {
            lr: own.lr.or(set).or(self.lr).unwrap_or(standard),
            weight_decay: own.weight_decay.unwrap_or(self.weight_decay),
            maximize: false,
            options,
        }
    }

    /// Checks the numbers of both groups; errors name the settings as they are written.
    fn check(&self, own: &Overrides, at: &str, problems: &mut Problems) {
        let of_group = own.lr.map(|lr| ("lr", lr));
        let set = [("lr", self.lr), ("muon_lr", self.muon_lr), ("adam_lr", self.adam_lr)];
        let set = set.into_iter().filter_map(|(key, lr)| Some((key, lr?)));
        for (key, lr) in set.chain(of_group) {
            problems.require_not_negative(format!("{at}.{key}"), lr);
        }
        problems.require_not_negative(
            format!("{at}.weight_decay"),
            own.weight_decay.unwrap_or(self.weight_decay),
        );
        check_rate(format!("{at}.momentum"), own.momentum.unwrap_or(self.momentum), problems);
        let betas = own.betas.unwrap_or(self.betas);
        check_rate(format!("{at}.betas[0]"), betas.0, problems);
        check_rate(format!("{at}.betas[1]"), betas.1, problems);
        problems.require_not_negative(format!("{at}.eps"), own.eps.unwrap_or(self.eps));
    }
}

/// Whether Muon updates a parameter of this name and shape, by DeepSpeed's rule.
fn is_matrix(fqn: &str, shape: &[i64]) -> bool {
    let fqn = fqn.to_lowercase();
    shape.len() >= 2 && !fqn.contains("embed") && !fqn.contains("lm_head")
}

/// The matrices of a group, and its other parameters; only those that there are.
fn halves(group: ParamGroupSpec) -> Vec<ParamGroupSpec> {
    let half = |are_matrices: bool| {
        let of_half =
            |(fqn, parameter): &&(String, _)| is_matrix(fqn, &group.shape(parameter)) == are_matrices;
        let params = group.params.iter().filter(of_half).cloned().collect();
        let overrides = Overrides { are_matrices, ..group.overrides.clone() };
        ParamGroupSpec { params, overrides, whole: group.whole.clone(), name: group.name.clone() }
    };
    let mut halves = vec![half(true), half(false)];
    halves.retain(|half| !half.params.is_empty());
    if halves.len() > 1 {
        halves.iter_mut().for_each(|half| half.name = None); // a name is of one group
    }
    halves
}

impl BuildOptimizer for MuonWithAuxAdam {
    fn name(&self) -> &'static str {
        NAME
    }

    fn gathers_whole_parameters(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let mut problems = Problems::new("optimizer");
        self.check(&Overrides::default(), "init_args", &mut problems);
        let is_well_set = problems.len() == 0;
        for (index, ParamGroupSpec { overrides, .. }) in groups.iter().enumerate() {
            let at = format!("param_groups[{index}]");
            if is_well_set {
                self.check(overrides, &at, &mut problems);
            }
            for (key, is_set) in [
                ("maximize", overrides.maximize.is_some()),
                ("dampening", overrides.dampening.is_some()),
                ("nesterov", overrides.nesterov.is_some()),
                ("amsgrad", overrides.amsgrad.is_some()),
            ] {
                if is_set {
                    problems.add(format!("{at}.{key}"), format!("is not a setting of {NAME}"), "remove it");
                }
            }
        }
        problems.finish()?;
        let groups: Vec<ParamGroupSpec> = groups.into_iter().flat_map(halves).collect();
        let adam = AdamRule { name: NAME, decoupled: self.adam_w_mode };
        let rule = MuonRule::over(NAME, adam, groups.iter().filter(|group| group.overrides.are_matrices));
        let groups = build_groups(groups, |_| (), |own, _, _| self.merge(own))?;
        Ok(Box::new(Engine::new(rule, groups, self.master_weights)?))
    }
}
