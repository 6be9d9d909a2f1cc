//! What a compiled training step computes again in backward, rather than keep it: less memory, and the same numbers.

use tch::{Kind, Tensor};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{CompileBackend, CompileConfig, CompileOptions, ShownGraph};
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::LightningModule;
use voltaic::nn::{Forward, LayerNorm, Linear, ModuleExt};
use voltaic::optim::Sgd;
use voltaic::trainer::{GraphReport, TrainerBuilder};
use voltaic::{Module, ffi};

use crate::compile_random::Program;
use crate::process::{own_process, plays, text_of};
use crate::random_runs::{cases, some};
use crate::silent::silent;
use crate::support::{CPU, same_bits, start};

/// With the pass or without.
fn compiled(recomputes: bool) -> CompileConfig {
    let options = CompileOptions { recomputation: Some(recomputes), ..CompileOptions::default() };
    CompileConfig { options, ..CompileBackend::HpuBackend.into() }
}

/// The graph of a training step, of batches of so many samples.
fn step<M: LightningModule<Batch = (Tensor, Tensor)>>(
    net: &mut M,
    data: &(Tensor, Tensor),
    batch: usize,
    builder: TrainerBuilder,
) -> voltaic::Result<ShownGraph> {
    let data = TensorDataset::new((data.0.shallow_clone(), data.1.shallow_clone())).unwrap();
    let loader = DataLoader::new(data).batch_size(batch).build().unwrap();
    let mut shown = builder.build()?.show_graphs(net, &mut Loaders::new().train(loader))?;
    Ok(shown.swap_remove(0))
}

/// Weights after 7 steps, of which the last 2 are replayed.
fn fit<M: LightningModule<Batch = (Tensor, Tensor)>>(
    net: &mut M,
    data: &(Tensor, Tensor),
    batch: usize,
    builder: TrainerBuilder,
) -> voltaic::Result<(Vec<(String, Tensor)>, GraphReport)> {
    ffi::manual_seed(5).unwrap();
    let data = TensorDataset::new((data.0.shallow_clone(), data.1.shallow_clone())).unwrap();
    let loader = DataLoader::new(data).batch_size(batch).build().unwrap();
    let mut trainer = builder.max_epochs(1).limit_train_batches(7).build()?;
    trainer.fit(net, &mut Loaders::new().train(loader))?;
    Ok((net.state_dict(), trainer.graph_report().clone()))
}

/// Blocks of a norm, a layer, an activation and a layer, each added to what it reads.
#[derive(Module)]
struct Blocks {
    norms: Vec<LayerNorm>,
    first: Vec<Linear>,
    second: Vec<Linear>,
}

impl Blocks {
    fn new(count: usize) -> Self {
        let layers = |from, to| (0..count).map(|_| Linear::new(from, to).unwrap()).collect();
        let norms = (0..count).map(|_| LayerNorm::new(vec![32]).unwrap()).collect();
        Self { norms, first: layers(32, 128), second: layers(128, 32) }
    }
}

lightning_module!(Blocks, (Tensor, Tensor), Sgd::new(0.01), |net, (x, y), _| {
    let mut x = x.shallow_clone();
    for ((norm, first), second) in net.norms.iter().zip(&net.first).zip(&net.second) {
        let inner = first.forward(&norm.forward(&x)?)?.f_gelu("tanh")?;
        x = x.f_add(&second.forward(&inner)?)?;
    }
    Ok(x.f_mse_loss(y, tch::Reduction::Mean)?)
});

fn numbers() -> (Tensor, Tensor) {
    let numbers = |phase: f64| (Tensor::arange(16 * 32, (Kind::Float, CPU)) + phase).sin().reshape([16, 32]);
    (numbers(0.0), numbers(1.0))
}

fn block_step(config: CompileConfig) -> ShownGraph {
    step(&mut Blocks::new(4), &numbers(), 16, silent().accelerator("cpu").compile(config)).unwrap()
}

#[test]
fn the_pass_is_asked_for() {
    let _rng = start();
    let standard = || block_step(CompileBackend::HpuBackend.into()).plan_stats().num_recomputed;
    if plays("recomputes") {
        assert!(standard() > 0);
        assert_eq!(block_step(compiled(false)).plan_stats().num_recomputed, 0, "the option wins");
        return;
    }
    text_of(&own_process("recomputes").env("PT_HPU_DISABLE_recomputation", "0").output().unwrap());
    assert_eq!(standard(), 0);
}

#[test]
fn cheap_results_are_computed_again_in_backward() {
    let _rng = start();
    let (with, without) = (block_step(compiled(true)), block_step(compiled(false)));
    let (own, kept) = (with.plan_stats(), without.plan_stats());
    assert!(own.num_recomputed >= 6 && kept.num_recomputed == 0, "gelu and norms of 3 blocks: {own:?}");
    assert_eq!(own.num_calls, kept.num_calls + own.num_recomputed);
    assert!(with.compiled().peak_bytes < without.compiled().peak_bytes && own.arena_bytes < kept.arena_bytes);
    let [own, kept] = [with.text(true), without.text(true)];
    assert!(
        own.contains("\nrecomputed: ") && own.contains("gelu") && !kept.contains("recomputed: "),
        "{own}"
    );
}

fn gpt(dropout: f64) -> Gpt {
    let config = GptConfig { vocab_size: 65, block_size: 32, n_layer: 4, dropout, ..GptConfig::tiny() };
    Gpt::new(config).unwrap()
}

fn tokens() -> (Tensor, Tensor) {
    let tokens =
        |phase: i64| (Tensor::arange(14 * 32, (Kind::Int64, CPU)) * 7 + phase).remainder(65).view([14, 32]);
    (tokens(0), tokens(7))
}

#[test]
fn a_run_has_the_weights_of_one_that_keeps_all_results() {
    let _rng = start();
    for (accelerator, precision, dropout) in [
        ("cpu", "32-true", 0.0),
        ("hpu", "32-true", 0.2),
        ("cpu", "bf16-mixed", 0.2),
        ("hpu", "bf16-mixed", 0.0),
    ] {
        let [own, expected] = [true, false].map(|recomputes| {
            ffi::manual_seed(11).unwrap();
            let builder = silent().accelerator(accelerator).devices(1).precision(precision);
            fit(&mut gpt(dropout), &tokens(), 2, builder.compile(compiled(recomputes))).unwrap()
        });
        let (own, report) = own;
        assert_eq!((&report.refusal, report.replayed_steps), (&None, 2), "{report:?}");
        for ((name, own), (_, expected)) in own.iter().zip(&expected.0) {
            assert!(same_bits(own, expected), "{accelerator} {precision} {dropout}: {name}");
        }
    }
}

#[test]
fn a_language_model_needs_less_memory() {
    let _rng = start();
    // masks of dropout are kept, since nothing draws them twice
    for (dropout, precision, most) in
        [(0.0, "32-true", 0.72), (0.0, "bf16-mixed", 0.65), (0.2, "32-true", 0.74)]
    {
        let builder = silent().accelerator("cpu").precision(precision).compile(compiled(true));
        let shown = step(&mut gpt(dropout), &tokens(), 14, builder).unwrap();
        let (own, recorded) = (shown.compiled(), shown.recorded());
        let part = own.peak_bytes as f64 / recorded.peak_bytes as f64;
        assert!(part <= most, "{dropout} {precision}: {part} of {recorded:?}");
    }
}

/// A random program between layers, and dropout, whose mask is written in place and kept.
#[derive(Module)]
struct Trained {
    program: Program,
    layers: Vec<Linear>,
}

lightning_module!(Trained, (Tensor, Tensor), Sgd::new(0.01), |net, (x, y), _| {
    let mut x = x.shallow_clone();
    for layer in &net.layers {
        x = net.program.run(&layer.forward(&x)?.f_softmax(-1, Kind::Float)?.f_dropout(0.25, true)?)?;
    }
    Ok(x.f_mul(y)?.f_sum(Kind::Float)?)
});

/// What differs in a case; false if the code does not train, or not by a graph.
fn case(seed: u64, num_recomputed: &mut usize) -> Result<bool, String> {
    let of = |recomputes: bool| {
        ffi::manual_seed(seed).unwrap();
        let program = Program::of(seed, (CPU, Kind::Float));
        let [rows, columns] = program.shape;
        program.set_weight(&Tensor::randn(program.shape, (Kind::Float, CPU)));
        let layers = (0..4).map(|_| Linear::new(columns, columns).unwrap()).collect();
        let data = || Tensor::randn([7 * rows, columns], (Kind::Float, CPU));
        let precision = ["32-true", "bf16-mixed"][seed as usize / 2 % 2];
        let builder = silent().accelerator(["cpu", "hpu"][seed as usize % 2]).devices(1).precision(precision);
        (Trained { program, layers }, (data(), data()), rows as usize, builder.compile(compiled(recomputes)))
    };
    let run = |recomputes: bool| {
        let (mut net, data, rows, builder) = of(recomputes);
        fit(&mut net, &data, rows, builder)
    };
    let (own, expected) = match (run(true), run(false)) {
        (Err(_), Err(_)) => return Ok(false),
        (own, expected) => (own.map_err(|e| e.to_string())?, expected.map_err(|e| e.to_string())?),
    };
    if own.1.refusal.is_some() && expected.1.refusal.is_some() {
        return Ok(false);
    }
    let differs = own.0.iter().zip(&expected.0).find(|((_, own), (_, expected))| !same_bits(own, expected));
    if let Some(((name, _), _)) = differs {
        return Err(format!("{name} differs: {:?}", of(true).0.program));
    }
    let (mut net, data, rows, builder) = of(true);
    *num_recomputed +=
        step(&mut net, &data, rows, builder).map_or(0, |step| step.plan_stats().num_recomputed);
    Ok(own.1.replayed_steps > 0)
}

#[test]
fn random_programs_train_to_the_weights_without_it() {
    let _rng = start();
    let (mut num_recomputed, mut num_cases) = (0, 0);
    cases("", some(24, 2000), |seed| {
        num_cases += 1;
        case(seed, &mut num_recomputed)
    });
    println!("{num_recomputed} results of {num_cases} programs");
    assert!(num_cases < 10 || num_recomputed > num_cases / 2, "{num_recomputed} of {num_cases}");
}
