//! Modules that are set up for inference: the same predictions as of the whole module in one process.

use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use voltaic::callback::{Callback, PredictionWriter, PredictionWriterConfig, WriteInterval};
use voltaic::checkpoint::{Checkpoint, write_folder};
use voltaic::data::{DataLoader, Loaders, Stage, TensorDataset};
use voltaic::distributed::World;
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::nn::{Callable, Forward, LayerNorm, Linear, ModuleExt, MultiheadAttention, init};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::strategy::{
    DeepSpeedStrategy, InferenceConfig, ModelParallelStrategy, TensorParallel, init_inference,
};
use voltaic::trainer::Trainer;
use voltaic::{Kind, Module, Tensor};

use crate::distributed::as_ranks_of_world;
use crate::probe::{own_process, plays, silent, text_of};

const CPU: tch::Device = tch::Device::Cpu;
const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
const DIM: i64 = 96; // so that weights of blocks are large enough to have no memory before they are needed
const SAMPLES: i64 = 10;

#[derive(Module)]
struct Block {
    attention_norm: LayerNorm,
    attention: MultiheadAttention,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module)]
struct Net {
    blocks: Vec<Block>,
    last: LayerNorm,
    head: Linear,
}

impl Net {
    fn new() -> voltaic::Result<Self> {
        let block = || -> voltaic::Result<Block> {
            Ok(Block {
                attention_norm: LayerNorm::new(DIM)?,
                attention: MultiheadAttention::builder(DIM, 6).batch_first(true).build()?,
                norm: LayerNorm::new(DIM)?,
                up: Linear::new(DIM, 4 * DIM)?,
                down: Linear::new(4 * DIM, DIM)?,
            })
        };
        Ok(Self { blocks: vec![block()?, block()?], last: LayerNorm::new(DIM)?, head: Linear::new(DIM, 3)? })
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let mut x = x.shallow_clone();
        for block in &self.blocks {
            x = &x + block.attention.call(&block.attention_norm.call(&x)?)?;
            x = &x + block.down.call(&block.up.call(&block.norm.call(&x)?)?.f_gelu("none")?)?;
        }
        self.head.call(&self.last.call(&x)?)
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(self.call(x)?.f_mean(Kind::Float)?)
    }

    fn test_step(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("test_mean", self.call(x)?.f_mean(Kind::Float)?).sync_dist(true);
        Ok(())
    }

    fn predict_step(&self, x: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        ctx.graphed(self, x)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.0).into()
    }
}

fn inputs() -> Tensor {
    Tensor::arange(SAMPLES * 4 * DIM, (Kind::Float, CPU)).sin().view([SAMPLES, 4, DIM])
}

fn loader() -> DataLoader<Tensor> {
    DataLoader::new(TensorDataset::new(inputs()).unwrap()).batch_size(2).build().unwrap()
}

/// The whole module, and what it gives for all inputs.
fn whole() -> (Net, Tensor) {
    voltaic::ffi::manual_seed(3).unwrap();
    let mut net = Net::new().unwrap();
    net.eval();
    let expected = tch::no_grad(|| net.forward(&inputs()).unwrap());
    (net, expected)
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let difference = (found.to_kind(Kind::Float) - expected).abs().max().double_value(&[]);
    assert!(difference <= tolerance, "{what} differs by {difference}");
}

fn tp(size: u64) -> InferenceConfig {
    InferenceConfig { tensor_parallel: TensorParallel::size(size), ..InferenceConfig::default() }
}

/// A file with the weights, and a folder of three ranks' parts of them.
fn saved(folder: &Path) {
    let (mut net, _) = whole();
    let mut data = Loaders::new().train(loader());
    let mut trainer = silent().default_root_dir(folder).max_steps(1).build().unwrap();
    trainer.fit(&mut net, &mut data).unwrap();
    trainer.save_checkpoint(&mut net, &mut data, folder.join("weights.ckpt"), None).unwrap();
    let checkpoint = Checkpoint::load(folder.join("weights.ckpt")).unwrap();
    write_folder(&checkpoint, &folder.join("folder.ckpt"), 3).unwrap();
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

fn on_modules(world: World) {
    let (_, expected) = whole();
    let size = world.world_size as u64;
    let forward = |net: &Net| tch::no_grad(|| net.forward(&inputs()).unwrap());
    let policy = |policy| InferenceConfig::of_value(&policy).unwrap();
    for (name, config) in [
        ("rules for names", tp(size)),
        ("small pieces", policy(json!({"tensor_parallel": {"tp_size": size, "tp_grain_size": 1}}))),
        (
            "a policy",
            policy(json!({"tensor_parallel": {"tp_size": size}, "injection_policy": {"Block": "down"}})),
        ),
        ("kernels", policy(json!({"tp": {"tp_size": size}, "kernel_inject": true, "dtype": "float"}))),
    ] {
        let (mut net, _) = whole();
        let _engine = init_inference(&mut net, &config, world.clone()).unwrap();
        assert!(net.blocks[1].up.weight.tensor_shard().is_some() && net.head.weight.tensor_shard().is_none());
        assert_close(name, &forward(&net), &expected, 1e-5);
    }
    // all layers by the policy of the root: those before the last row-wise one stay divided
    let root = policy(json!({"tensor_parallel": {"tp_size": size}, "injection_policy": {"Net": ["down"]}}));
    let (mut net, _) = whole();
    if size <= 3 {
        let _engine = init_inference(&mut net, &root, world.clone()).unwrap();
        assert!(net.head.weight.tensor_shard().is_some());
        assert_close("the root's policy", &forward(&net), &expected, 1e-5);
    }

    let (mut net, _) = whole();
    let bf16 = InferenceConfig { dtype: Some(Kind::BFloat16), ..tp(size) };
    let _engine = init_inference(&mut net, &bf16, world.clone()).unwrap();
    let found = tch::no_grad(|| net.forward(&inputs().to_kind(Kind::BFloat16)).unwrap());
    assert_close("bfloat16", &found, &expected, 0.05);

    for path in ["weights.ckpt", "folder.ckpt"].map(|name| folder().join(name)) {
        voltaic::ffi::manual_seed(1 + world.rank as u64).unwrap();
        let mut net = init::deferred(Net::new).unwrap();
        assert!(net.blocks[0].up.weight.is_sharded());
        let config = InferenceConfig { checkpoint: Some(path.to_string_lossy().into_owned()), ..tp(size) };
        let _engine = init_inference(&mut net, &config, world.clone()).unwrap();
        assert_close("a checkpoint", &forward(&net), &expected, 1e-5);
    }
    let missing = InferenceConfig { checkpoint: Some("nowhere.ckpt".to_owned()), ..tp(size) };
    let (mut net, _) = whole();
    assert_error!(init_inference(&mut net, &missing, world.clone()), "nowhere.ckpt");

    for (config, expected) in [
        (tp(size + 1), "rank(s); use a number of ranks"),
        (
            policy(json!({"tp": {"tp_size": size}, "injection_policy": {"Blok": "down"}})),
            "`Blok` is the type of no module of Net",
        ),
        (
            policy(json!({"tp": {"tp_size": size}, "injection_policy": {"Block": "dwn"}})),
            "`dwn` is the end of no name",
        ),
    ] {
        let (mut net, _) = whole();
        assert_error!(init_inference(&mut net, &config, world.clone()), expected);
    }
}

#[derive(Module)]
struct Plain {
    first: Linear,
    second: Linear,
}

#[derive(Module)]
struct Projected {
    q_proj: Linear,
    out_proj: Linear,
}

#[derive(Module)]
struct Heads {
    layers: Vec<Projected>,
}

/// Modules that no rule fits, and attention that does not say how many heads it has.
fn without_rules(world: &World) {
    let linear = || Linear::new(8, 8).unwrap();
    let mut plain = Plain { first: linear(), second: linear() };
    assert_error!(
        init_inference(&mut plain, &tp(2), world.clone()),
        "no rule says which layers of Plain are divided; give an injection_policy"
    );
    let kernels = InferenceConfig { replace_with_kernel_inject: true, ..tp(2) };
    let _engine = init_inference(&mut plain, &kernels, world.clone()).unwrap();
    assert!(plain.first.weight.tensor_shard().is_none() && plain.second.weight.tensor_shard().is_none());
    let mut heads = Heads { layers: vec![Projected { q_proj: linear(), out_proj: linear() }] };
    let error = init_inference(&mut heads, &tp(2), world.clone()).unwrap_err().to_string();
    assert!(error.contains("layers.0.q_proj seems to be of attention"), "{error}");
}

#[test]
fn modules_alone_are_divided_by_two() {
    let folder = TempDir::new().unwrap();
    as_ranks_of_world(
        2,
        (FOLDER, folder.path()),
        || saved(folder.path()),
        |world| {
            without_rules(&world);
            on_modules(world);
        },
    );
}

#[test]
#[ignore = "repeats modules_alone_are_divided_by_two on more ranks"]
fn modules_alone_are_divided_by_three() {
    let folder = TempDir::new().unwrap();
    as_ranks_of_world(3, (FOLDER, folder.path()), || saved(folder.path()), on_modules);
}

#[test]
fn a_module_alone_is_replayed() {
    let _rng = crate::rng::seeded(3);
    let (mut net, expected) = whole();
    let config = InferenceConfig { enable_cuda_graph: true, ..InferenceConfig::default() };
    let engine = init_inference(&mut net, &config, World::default()).unwrap();
    for _ in 0..4 {
        let found = tch::no_grad(|| net.call(&inputs()).unwrap());
        assert!(found.equal(&expected));
    }
    assert_eq!(engine.graph_stats().unwrap().hits, 2);
    let (mut net, _) = whole();
    let error =
        init_inference(&mut net, &InferenceConfig { enable_cuda_graph: true, ..tp(2) }, World::default());
    assert_error!(error, "enable_cuda_graph", "tensor_parallel.tp_size=2");
    let error = init_inference(&mut net, &tp(2), World::default()).unwrap_err().to_string();
    assert!(error.contains("tp_size is 2, but there are 1 rank(s)"), "{error}");
}

// ---- with the trainer ----

/// On emulated cards of a generation, by the command line: what it says.
fn predict_on_cards(folder: &Path, generation: &str, dtype: &str) -> (bool, String) {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(["predict", "--model=Gpt", "--model.n_embd=32", "--model.n_layer=1", "--data=ShakespeareData"])
        .args(["--data.text_file=text.txt", "--data.context_length=16", "--data.batch_size=4"])
        .args(["--trainer.accelerator=hpu", "--trainer.devices=2", "--trainer.limit_predict_batches=2"])
        .args(["--trainer.strategy=HPUDeepSpeedStrategy", "--trainer.strategy.tensor_parallel.tp_size=2"])
        .args([&format!("--trainer.strategy.dtype={dtype}"), "--trainer.plugins=DeepSpeedPrecisionPlugin"])
        .args(["--trainer.plugins.precision=bf16-mixed", "--trainer.logger=false"])
        .current_dir(folder)
        .env("VOLTAIC_HPU", "emulator")
        .env("VOLTAIC_HPU_DEVICES", "2")
        .env("VOLTAIC_HPU_GENERATION", generation)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn cards_of_each_generation_are_divided_and_float16_needs_a_second_one() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("text.txt"), "the cat sat on the mat. ".repeat(100)).unwrap();
    for (generation, dtype) in
        [("gaudi", "float"), ("gaudi", "bf16"), ("gaudi2", "half"), ("gaudi3", "float")]
    {
        let (is_ok, text) = predict_on_cards(folder.path(), generation, dtype);
        assert!(is_ok, "{generation} {dtype}: {text}");
        let has_no_effect =
            text.contains("trainer.plugins (bf16-mixed) has no effect: the weights of inference");
        assert_eq!(has_no_effect, dtype != "bf16", "{text}");
    }
    let (is_ok, text) = predict_on_cards(folder.path(), "gaudi", "half");
    let expected = "float16: DeepSpeed inference with float16 is not supported on Gaudi1";
    assert!(!is_ok && text.contains("trainer.strategy.dtype") && text.contains(expected), "{text}");
}

fn trainer(devices: i64, strategy: DeepSpeedStrategy, samples_are_divided: bool) -> Trainer {
    let output_dir = Some(folder().join(format!("predicted {samples_are_divided}")));
    let writer = PredictionWriterConfig { output_dir, write_interval: WriteInterval::Epoch, resume: false };
    silent()
        .callback(PredictionWriter::from(writer))
        .default_root_dir(folder())
        .devices(devices)
        .strategy(strategy)
        .use_distributed_sampler(samples_are_divided)
        .build()
        .unwrap()
}

fn strategy(checkpoint: Option<&str>) -> DeepSpeedStrategy {
    DeepSpeedStrategy {
        tensor_parallel: Some(TensorParallel::size(2)),
        checkpoint: checkpoint.map(str::to_owned),
        base_dir: checkpoint.map(|_| folder().to_string_lossy().into_owned()),
        ..DeepSpeedStrategy::default()
    }
}

/// Predicts with two replicas of two ranks each, and compares with the samples that each of them has.
fn predict(samples_are_divided: bool, checkpoint: Option<&str>) {
    let (net, expected) = whole();
    let mut trainer = trainer(4, strategy(checkpoint), samples_are_divided);
    let mut net = if checkpoint.is_some() {
        voltaic::ffi::manual_seed(9).unwrap();
        init::deferred(Net::new).unwrap()
    } else {
        net
    };
    let mesh = trainer.world().mesh().clone();
    assert_eq!((mesh.dp.size, mesh.tp.size, mesh.tp.rank), (2, 2, trainer.world().rank % 2));
    let found = trainer.predict(&mut net, &mut Loaders::new().predict(loader())).unwrap();
    let found = Tensor::cat(&found[0], 0);
    let own: Vec<i64> = match samples_are_divided {
        true => (0..SAMPLES).filter(|sample| sample % 2 == mesh.dp.rank as i64).collect(),
        false => (0..SAMPLES).collect(),
    };
    assert_close("predictions", &found, &expected.index_select(0, &Tensor::from_slice(&own)), 1e-5);
    assert_eq!(net.blocks[0].up.weight.size(), [2 * DIM, DIM]);

    trainer.test(&mut net, &mut Loaders::new().test(loader())).unwrap();
    let mean = expected.mean(Kind::Float).double_value(&[]);
    assert!((trainer.metric("test_mean").unwrap() - mean).abs() < 1e-5);

    // weights are saved whole
    let path = folder().join(format!("of {samples_are_divided}.ckpt"));
    trainer.save_weights(&net, &path, None).unwrap();
    let weights = Checkpoint::load(&path).unwrap().weights;
    for (name, expected) in whole().0.state_dict() {
        let own = weights.iter().find(|(own, _)| *own == name).unwrap();
        assert!(own.1.equal(&expected), "{name}");
    }

    let error = trainer.fit(&mut net, &mut Loaders::new().train(loader())).unwrap_err().to_string();
    assert!(error.contains("tensor_parallel selects inference (init_inference)"), "{error}");
    println!("\nrank {} is done", trainer.world().rank);
}

#[test]
fn two_replicas_of_two_ranks_predict() {
    for (part, is_divided, checkpoint) in [
        ("divides samples", true, None),
        ("same samples, a file", false, Some("weights.ckpt")),
        ("divides samples, a folder", true, Some("folder.ckpt")),
    ] {
        if plays(part) {
            return predict(is_divided, checkpoint);
        }
    }
    let kept = TempDir::new().unwrap();
    {
        let _rng = crate::rng::seeded(3);
        saved(kept.path());
    }
    for part in ["divides samples", "same samples, a file", "divides samples, a folder"] {
        let text = text_of(&own_process(part).env(FOLDER, kept.path()).output().unwrap());
        assert!(text.contains("rank 0 is done"), "{part}: {text}");
    }
    for is_divided in [true, false] {
        let written = std::fs::read_dir(kept.path().join(format!("predicted {is_divided}"))).unwrap();
        let mut written: Vec<_> = written.map(|file| file.unwrap().file_name()).collect();
        written.sort();
        assert_eq!(written, ["predictions.safetensors"], "of both replicas, in the order of the data set");
    }
}

/// What the process has read of files, as the system counts.
fn bytes_read() -> u64 {
    let counts = std::fs::read_to_string("/proc/self/io").unwrap();
    counts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Counts what is read from the call of its `setup` to the first batch, which is the checkpoint; leaves that and what the rank's slices
/// have in a file.
struct Reads(u64);

impl Callback for Reads {
    fn setup(&mut self, _stage: Stage, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.0 = bytes_read();
        Ok(())
    }

    fn on_predict_start(&mut self, ctx: &mut HookContext, module: &mut dyn Module) -> anyhow::Result<()> {
        let read = bytes_read() - self.0;
        let own: usize = module.parameters().iter().map(|parameter| 4 * parameter.numel()).sum();
        let rank = ctx.process_group().map_or(0, |ranks| ranks.rank());
        Ok(std::fs::write(folder().join(format!("reads {rank}")), format!("{read} {own}"))?)
    }
}

/// One layer whose matrices have many of the blocks that checkpoints are checked in.
fn wide() -> Gpt {
    voltaic::ffi::manual_seed(3).unwrap();
    let sizes =
        GptConfig { vocab_size: 64, block_size: 16, n_layer: 1, n_head: 4, n_embd: 512, ..GptConfig::tiny() };
    Gpt::new(sizes).unwrap()
}

fn tokens() -> DataLoader<(Tensor, Tensor)> {
    let tokens = Tensor::arange(32, (Kind::Int64, CPU)).view([2, 16]);
    DataLoader::new(TensorDataset::new((tokens.copy(), tokens)).unwrap()).batch_size(1).build().unwrap()
}

/// A folder that two ranks have saved, of slices of the same layers.
fn save_slices() {
    let strategy = ModelParallelStrategy::tensor_parallel_size(2);
    let mut trainer =
        silent().default_root_dir(folder()).devices(2).strategy(strategy).max_steps(1).build().unwrap();
    let (mut gpt, mut data) = (wide(), Loaders::new().train(tokens()));
    trainer.fit(&mut gpt, &mut data).unwrap();
    trainer.save_checkpoint(&mut gpt, &mut data, folder().join("slices.ckpt"), None).unwrap();
}

fn read_slices(checkpoint: &str) {
    let mut trainer = silent()
        .default_root_dir(folder())
        .devices(2)
        .strategy(strategy(None))
        .callback(Reads(0))
        .build()
        .unwrap();
    let mut gpt = wide();
    trainer
        .ckpt_path(folder().join(checkpoint))
        .predict(&mut gpt, &mut Loaders::new().predict(tokens()))
        .unwrap();
}

/// What each rank of two has read of a checkpoint, and what its slices have.
fn reads_of(checkpoint: &str, folder: &Path) -> [[u64; 2]; 2] {
    text_of(&own_process(checkpoint).env(FOLDER, folder).output().unwrap());
    [0, 1].map(|rank| {
        let text = std::fs::read_to_string(folder.join(format!("reads {rank}"))).unwrap();
        let (read, own) = text.split_once(' ').unwrap();
        [read, own].map(|number| number.parse().unwrap())
    })
}

/// Rank 0 alone reads a file, and checks all of it first.
#[test]
fn ranks_read_their_slices() {
    const CHECKPOINTS: [&str; 3] = ["slices.ckpt", "shards.ckpt", "file.ckpt"];
    if plays("saves") {
        return save_slices();
    }
    if let Some(checkpoint) = CHECKPOINTS.into_iter().find(|checkpoint| plays(checkpoint)) {
        return read_slices(checkpoint);
    }
    let kept = TempDir::new().unwrap();
    text_of(&own_process("saves").env(FOLDER, kept.path()).output().unwrap());
    let checkpoint = Checkpoint::load(kept.path().join("slices.ckpt")).unwrap();
    checkpoint.save(&kept.path().join("file.ckpt")).unwrap();
    write_folder(&checkpoint, &kept.path().join("shards.ckpt"), 3).unwrap();
    let [slices, shards, file] = CHECKPOINTS.map(|checkpoint| reads_of(checkpoint, kept.path()));
    let all: u64 = wide().parameters().iter().map(|parameter| 4 * parameter.numel() as u64).sum();
    let seen = format!("of {all}: slices {slices:?}, shards {shards:?}, a file {file:?}");
    for rank in [0, 1] {
        let [[slices, own], [shards, _], [file, _]] = [slices[rank], shards[rank], file[rank]];
        assert!(own < all * 17 / 32, "half of the layers, and norms and positions: {seen}");
        // but for the index, headers, and blocks at the ends of what both ranks have
        assert!(slices >= own && slices < all * 5 / 8, "{seen}");
        // rows that are cut lie in all blocks of their layer
        assert!(shards >= own && shards < all * 7 / 8, "{seen}");
        assert!(if rank == 0 { file > all } else { file < all / 16 }, "{seen}");
    }
    println!("{seen}");
}
