//! Random networks, steps, hooks and settings, by graphs and on the emulated HPU, beside eager runs on the CPU: the same losses,
//! logged values, weights, buffers, states of optimizers and generators, bit for bit, or an error that speaks of graphs.
//!
//! `VOLTAIC_FUZZ=7` runs the case of a seed, `VOLTAIC_FUZZ=100..200` those of many; `VOLTAIC_FUZZ_WITHOUT=clip,2` leaves out
//! parts of it, a number is a block; with `VOLTAIC_FUZZ_ON` all seeds run though some fail.

mod hands;
mod net;
mod plan;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::graph::{GraphedInPlace, ModuleCacher, WrapOptions, wrap_in_hpu_graph_inplace};
use voltaic::nn::ModuleExt;
use voltaic::nn::te;
use voltaic::precision::fp8::Fp8Settings;
use voltaic::precision::{OpLists, reset_op_lists, set_op_lists};
use voltaic::trainer::{GradientClipAlgorithm, GraphMode, GraphReport, Trainer, seed_everything};
use voltaic::{Device, Tensor, ffi};

use crate::random_net::Shape;
use crate::random_runs::{self, SaveAt, cases, some};
use crate::support::{CPU, HPU, bits, start};
use hands::Hands;
use net::{Batch, Net};
use plan::Plan;

/// How a plan is run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// `trainer.graph`.
    Trainer(GraphMode),
    /// The network's modules are graphed in place: for training, or without grad only.
    Cached,
    Wrapped,
}

/// A tensor's dtype, shape and bytes.
type Bits = (String, Vec<u8>);

fn described(tensor: &Tensor) -> Bits {
    (format!("{:?}{:?}", tensor.kind(), tensor.size()), bits(tensor))
}

/// What a run has come to.
struct Outcome {
    /// Of each batch: the loss, and what else was seen.
    seen: Vec<(String, Bits)>,
    /// Weights, states and all else that was saved, by name.
    kept: Vec<(String, Bits)>,
    text: Vec<(String, String)>,
    report: GraphReport,
}

fn loaders(plan: &Plan) -> Loaders<Batch> {
    random_runs::loaders((3 * plan.batches as i64 - plan.excess, 3), plan.validates.then_some((7, 3)))
}

fn trainer(
    plan: &Plan,
    accelerator: &str,
    form: Form,
    folder: &Path,
    hands: Hands,
) -> Result<Trainer, String> {
    let mut builder = Trainer::builder()
        .accelerator(accelerator)
        .devices(1)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .log_every_n_steps(1_u64)
        .default_root_dir(folder.to_path_buf())
        .precision(plan.precision)
        .max_epochs(plan.epochs)
        .accumulate_grad_batches(plan.window)
        .num_sanity_val_steps(0);
    if let Form::Trainer(mode) = form {
        builder = builder.graph(mode);
    }
    // the run that others are compared with is the plain one
    let is_plain = accelerator == "cpu" && matches!(form, Form::Trainer(GraphMode::Off));
    if let Some(modules) = plan.checkpointed.filter(|_| !is_plain) {
        builder = builder.activation_checkpointing(plan.activations.of(modules));
    }
    if plan.deterministic {
        builder = builder.deterministic(true);
    }
    if plan.validates_within {
        builder = builder.val_check_interval(2);
    }
    if let Some((is_norm, limit)) = plan.clip {
        let algorithm = if is_norm { GradientClipAlgorithm::Norm } else { GradientClipAlgorithm::Value };
        builder = builder.gradient_clip_val(limit).gradient_clip_algorithm(algorithm);
    }
    builder = plan.average.add_to(builder);
    builder = builder.callback(hands);
    let last = plan.epochs as usize * plan.batches - 1;
    for (step, name) in [(last, "end")].into_iter().chain(plan.saved.map(|step| (step % last, "saved"))) {
        builder = builder.callback(SaveAt { step, batches: plan.batches, path: folder.join(name), name });
    }
    builder.build().map_err(|error| error.to_string())
}

/// Trains by a plan; from a checkpoint, if there is one.
fn run(
    plan: &Plan,
    (accelerator, form): (&str, Form),
    from: Option<&Path>,
) -> Result<(Outcome, tempfile::TempDir), String> {
    let root = tempfile::tempdir().unwrap();
    ffi::manual_seed(plan.seed + 11).unwrap();
    seed_everything(plan.seed + 3).unwrap();
    let mut net = Net::new(plan);
    if plan.precision == "fp8" {
        te::convert(&net, &Fp8Settings::default()).unwrap();
    }
    // dropout draws from the device's own generator, which after this is where the CPU's is
    seed_everything(plan.seed + 4).unwrap();
    let _graphed: Vec<GraphedInPlace> = match form {
        Form::Trainer(_) => Vec::new(),
        Form::Cached => net.blocks.iter().map(|block| ModuleCacher::new(8).inplace(block)).collect(),
        Form::Wrapped => {
            let wrap = |block| wrap_in_hpu_graph_inplace(block, WrapOptions::default());
            net.blocks.iter().map(wrap).collect()
        }
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut trainer = trainer(plan, accelerator, form, root.path(), Hands::new(plan, seen.clone()))?;
    if let Some(from) = from {
        trainer.ckpt_path(from);
    }
    trainer.fit(&mut net, &mut loaders(plan)).map_err(|error| error.to_string())?;
    let report = trainer.graph_report().clone();
    let mut text = vec![("metrics".to_owned(), metrics(root.path()))];
    let mut kept = named("", &net.state_dict());
    if plan.again {
        trainer.fit(&mut net, &mut loaders(plan)).map_err(|error| error.to_string())?;
        kept.extend(named("again ", &net.state_dict()));
    }
    let device = if accelerator == "cpu" { CPU } else { HPU };
    kept.push(("random".to_owned(), described(&Tensor::rand([4], (tch::Kind::Float, device)))));
    if root.path().join("end").exists() {
        saved(&root.path().join("end"), &mut kept, &mut text);
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    Ok((Outcome { seen, kept, text, report }, root))
}

fn metrics(root: &Path) -> String {
    std::fs::read_to_string(root.join("lightning_logs/version_0/metrics.csv")).unwrap_or_default()
}

fn named(prefix: &str, tensors: &[(String, Tensor)]) -> Vec<(String, Bits)> {
    let mut all: Vec<_> =
        tensors.iter().map(|(name, tensor)| (format!("{prefix}{name}"), described(tensor))).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// What is in a checkpoint.
fn saved(path: &Path, kept: &mut Vec<(String, Bits)>, text: &mut Vec<(String, String)>) {
    let checkpoint = Checkpoint::load(path).unwrap();
    kept.extend(named("saved ", &checkpoint.weights));
    let training = checkpoint.training.unwrap();
    for (number, tensors) in training.optimizers.iter().enumerate() {
        kept.extend(named(&format!("optimizer {number} "), tensors));
    }
    kept.extend(named("gradient ", &training.grads));
    kept.extend(named("callback ", &training.callbacks));
    kept.extend(named("generator ", &training.rng));
    text.push(("state".to_owned(), serde_json::to_string_pretty(&training.json).unwrap()));
}

fn first_difference(own: &[(String, Bits)], expected: &[(String, Bits)]) -> Option<String> {
    for ((name, own), (other, expected)) in own.iter().zip(expected) {
        if name != other || own != expected {
            let numbers = |bits: &Bits| -> Vec<f32> {
                bits.1.chunks_exact(4).take(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
            };
            return Some(format!(
                "{name} (there {other}): {} {:?}, not {} {:?}",
                own.0,
                numbers(own),
                expected.0,
                numbers(expected)
            ));
        }
    }
    (own.len() != expected.len()).then(|| format!("{} and {} values", own.len(), expected.len()))
}

/// In what a run differs from another one on the same device.
fn difference(own: &Outcome, expected: &Outcome) -> Option<String> {
    first_difference(&own.seen, &expected.seen)
        .or_else(|| first_difference(&own.kept, &expected.kept))
        .or_else(|| {
            own.text.iter().zip(&expected.text).find(|(own, expected)| own != expected).map(
                |((name, own), (_, expected))| {
                    let lines = own.lines().zip(expected.lines()).find(|(own, expected)| own != expected);
                    format!("{name}: {lines:?}")
                },
            )
        })
}

/// In what a run on the HPU differs from one on the CPU. There the generator of the device is another one, and what is logged is
/// summed up in float32 on the device, where the CPU's numbers are summed up in float64.
fn difference_of_devices(own: &Outcome, expected: &Outcome) -> Option<String> {
    let without_generators = |outcome: &Outcome| -> Vec<(String, Bits)> {
        outcome.kept.iter().filter(|(name, _)| !name.starts_with("generator")).cloned().collect()
    };
    first_difference(&own.seen, &expected.seen)
        .or_else(|| first_difference(&without_generators(own), &without_generators(expected)))
}

/// Whether an error says that the run cannot be done with graphs.
fn is_refusal(error: &str) -> bool {
    ["graph", "was moved", "replay"].iter().any(|word| error.contains(word))
}

/// The forms of a plan that are compared with the eager run on the same device.
fn forms(plan: &Plan) -> Vec<(&'static str, Form)> {
    let modes = [GraphMode::Step, GraphMode::Modules].map(Form::Trainer);
    let mut forms: Vec<_> = ["cpu", "hpu"].iter().flat_map(|on| modes.map(|mode| (*on, mode))).collect();
    match plan.seed % 4 {
        0 => forms.push(("cpu", Form::Cached)),
        1 => forms.push(("hpu", Form::Cached)),
        2 => forms.push(("hpu", Form::Wrapped)),
        _ => {}
    }
    if let Ok(only) = std::env::var("VOLTAIC_FUZZ_FORM") {
        forms.retain(|(on, form)| format!("{on} {form:?}").contains(&only));
    }
    forms
}

/// Why the bits of a form are not those of the eager run; none if they must be.
fn is_inexact(plan: &Plan, form: Form) -> bool {
    // a weight that is cast once for all of its uses has gradients that are added up in 16 bits; each graph casts it for itself,
    // and of more than two gradients of a weight the graph adds up its own first
    let shares = plan.has(&Shape::Tied)
        || plan.twice.is_some()
        || plan.detached.is_some()
        || plan.no_grad.is_some()
        || plan.penalty.is_some()
        || plan.grad_penalty;
    // a call that is captured adds up the gradients of its input by itself; what two passes by hand in mixed precision do otherwise
    // is not explained
    let is_twice = plan.precision.ends_with("mixed") && plan.manual.is_some_and(|manual| manual.again);
    form != Form::Trainer(GraphMode::Step) && (shares || is_twice || plan.has(&Shape::Masked))
}

/// Counts over cases.
#[derive(Default, Debug)]
struct Counts {
    runs: usize,
    refused: usize,
    fell_back: usize,
    replayed: u64,
    updates: u64,
    hits: u64,
}

impl Counts {
    fn add(&mut self, report: &GraphReport) {
        self.runs += 1;
        self.fell_back += usize::from(report.refusal.is_some());
        self.replayed += report.replayed_steps;
        self.updates += report.replayed_updates;
        self.hits += report.modules.iter().map(|(_, stats)| stats.hits).sum::<u64>();
    }
}

/// Runs a plan and what is resumed from its checkpoint.
fn both(plan: &Plan, form: (&str, Form)) -> Result<Vec<Outcome>, String> {
    let (outcome, folder) = run(plan, form, None)?;
    let from = folder.path().join("saved");
    let mut outcomes = vec![outcome];
    if from.exists() {
        outcomes.push(run(plan, form, Some(&from)).map_err(|error| format!("resumed: {error}"))?.0);
    }
    Ok(outcomes)
}

/// What differs in a case. False if it does not run at all.
fn case(plan: &Plan, counts: &mut Counts) -> Result<bool, String> {
    let mut eager = Vec::new();
    for accelerator in ["cpu", "hpu"] {
        let own = both(plan, (accelerator, Form::Trainer(GraphMode::Off)));
        if accelerator == "cpu" && own.is_err() {
            return Ok(false);
        }
        eager.push(own.map_err(|what| format!("{accelerator}: {what}"))?);
    }
    counts.runs += 1;
    if ["32-true", "fp8"].contains(&plan.precision) || plan.precision.ends_with("16-true") {
        for (own, expected) in eager[1].iter().zip(&eager[0]) {
            if let Some(what) = difference_of_devices(own, expected) {
                return Err(format!("hpu: {what}"));
            }
        }
    }
    for (accelerator, form) in forms(plan) {
        let of_form = |what: String| format!("{accelerator} {form:?}: {what}");
        let own = match both(plan, (accelerator, form)) {
            Err(error) if is_refusal(&error) => {
                counts.refused += 1;
                if std::env::var_os("VOLTAIC_FUZZ_TELL").is_some() {
                    println!("seed {} {accelerator} {form:?} refused: {error}", plan.seed);
                }
                continue;
            }
            own => own.map_err(of_form)?,
        };
        if std::env::var_os("VOLTAIC_FUZZ_TELL").is_some() {
            println!("seed {} {accelerator} {form:?} {:?}", plan.seed, own[0].report);
        }
        let expected = &eager[usize::from(accelerator == "hpu")];
        for (own, expected) in own.iter().zip(expected) {
            counts.add(&own.report);
            match difference(own, expected) {
                Some(what) if !is_inexact(plan, form) => {
                    return Err(of_form(format!("{what}\n  {:?}", own.report)));
                }
                _ => {}
            }
        }
    }
    Ok(true)
}

/// Mixed precision casts the same operators on both devices meanwhile.
struct SameCasts;

impl SameCasts {
    fn begin() -> Self {
        set_op_lists(Device::Cpu, &OpLists::hpu()).unwrap();
        Self
    }
}

impl Drop for SameCasts {
    fn drop(&mut self) {
        reset_op_lists(Device::Cpu).unwrap();
    }
}

#[test]
fn graphs_and_the_hpu_do_what_the_cpu_does() {
    let (_rng, _casts) = (start(), SameCasts::begin());
    let (mut counts, begun) = (Counts::default(), Instant::now());
    cases("", some(3, 500), |seed| {
        let plan = Plan::reduced(seed);
        case(&plan, &mut counts).map_err(|what| format!("{what}\n  {plan:?}"))
    });
    println!("{counts:?} in {} s", begun.elapsed().max(Duration::from_secs(1)).as_secs());
}
