//! Muon for matrices and Adam for the other parameters, as DeepSpeed's optimizer `Muon`.

use voltaic_macros::settings;

use super::adam::AdamRule;
use super::checks::{not_negative, rate, rates};
use super::engine::Engine;
use super::muon_rule::MuonRule;
use super::optimizer::{BuildOptimizer, Optimizer};
use super::optimizers::into_optimizers;
use super::param_group::{GroupOptions, Merged, NsMethod, Overrides, ParamGroupSpec, build_groups};
use super::problems::Problems;
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
#[settings]
pub struct MuonWithAuxAdam {
    /// Learning rate where `muon_lr` or `adam_lr` is not set: 0.02 for matrices and 0.0003 for others unless set.
    #[setting(default = None, check = lr_if_set, into)]
    pub lr: Option<f64>,
    /// Learning rate of matrices, at least 0.
    #[setting(default = None, check = lr_if_set, into)]
    pub muon_lr: Option<f64>,
    /// Learning rate of other parameters, at least 0.
    #[setting(default = None, check = lr_if_set, into)]
    pub adam_lr: Option<f64>,
    /// Momentum factor of matrices, in [0, 1).
    #[setting(default = 0.95, check = rate, per_group)]
    pub momentum: f64,
    /// Decay rates of the running means of other parameters, each in [0, 1).
    #[setting(default = (0.9, 0.95), check = rates, per_group)]
    pub betas: (f64, f64),
    /// Term added to the denominator for other parameters, at least 0.
    #[setting(default = 1e-10, check = not_negative, per_group)]
    pub eps: f64,
    /// Weight decay of all, at least 0.
    #[setting(default = 0.0, check = not_negative, per_group)]
    pub weight_decay: f64,
    /// The Newton-Schulz iteration.
    #[setting(default = NsMethod::default())]
    pub ns_method: NsMethod,
    /// Other parameters follow AdamW; Adam with an L2 penalty if false.
    #[setting(default = true)]
    pub adam_w_mode: bool,
    /// Updates parameters in bfloat16 or float16 in float32 copies, and rounds these to the parameters after each step.
    #[setting(default = false)]
    pub master_weights: bool,
}

into_optimizers!(MuonWithAuxAdam);

fn lr_if_set(problems: &mut Problems, key: &str, lr: &Option<f64>) {
    lr.iter().for_each(|lr| not_negative(problems, key, lr));
}

impl MuonWithAuxAdam {
    /// DeepSpeed's settings with these learning rates of matrices and of other parameters.
    pub fn new(muon_lr: f64, adam_lr: f64) -> Self {
        Self { muon_lr: Some(muon_lr), adam_lr: Some(adam_lr), ..Self::default() }
    }

    /// The numbers of one of the two groups.
    fn merge(&self, own: &Overrides) -> Merged {
        let Self { momentum, betas, eps, weight_decay, ns_method, .. } = self.with_overrides(own);
        let (set, standard) = if own.are_matrices { (self.muon_lr, 0.02) } else { (self.adam_lr, 3e-4) };
        let options = if own.are_matrices {
            GroupOptions::MuonWithAuxAdam { momentum, ns_method }
        } else {
            GroupOptions::Adam { betas, eps, amsgrad: false, bias_correction: true }
        };
        let lr = own.lr.or(set).or(self.lr).unwrap_or(standard);
        Merged { lr, weight_decay, maximize: false, options }
    }

    /// Reports what is wrong with the settings, or with those of a group as the user made it.
    fn check_with(&self, own: &Overrides, problems: &mut Problems) {
        let merged = self.with_overrides(own);
        Self { lr: own.lr.or(self.lr), ..merged }.check_each(problems);
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
        let (unsharded, name) = (group.unsharded.clone(), group.name.clone());
        ParamGroupSpec { params, overrides, unsharded, name, float32_states: group.float32_states }
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

    fn unshards_parameters(&self) -> bool {
        true
    }

    fn build(&self, groups: Vec<ParamGroupSpec>) -> Result<Box<dyn Optimizer>> {
        let mut problems = Problems::new("optimizer.init_args");
        self.check_each(&mut problems);
        let is_well_set = problems.len() == 0;
        for (index, ParamGroupSpec { overrides, .. }) in groups.iter().enumerate() {
            let mut of_group = Problems::new(format!("optimizer.param_groups[{index}]"));
            if is_well_set {
                self.check_with(overrides, &mut of_group);
            }
            overrides.refuse_others(NAME, &[&["lr"], Self::PER_GROUP].concat(), &mut of_group);
            problems.append(of_group);
        }
        problems.finish()?;
        let groups: Vec<ParamGroupSpec> = groups.into_iter().flat_map(halves).collect();
        let adam = AdamRule { name: NAME, decoupled: self.adam_w_mode };
        let rule = MuonRule::over(NAME, adam, groups.iter().filter(|group| group.overrides.are_matrices));
        let groups = build_groups(groups, Problems::new("optimizer"), |own, _| self.merge(own))?;
        Ok(Box::new(Engine::new(rule, groups, self.master_weights)?))
    }
}
