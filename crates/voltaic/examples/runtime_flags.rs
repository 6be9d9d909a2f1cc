//! "Runtime Environment Variables": which flags are read, and what some of them change.
//!
//! Flags belong to the environment of a process, so each setting has a run of its own: `HABANA_VISIBLE_MODULES=0,3
//! runtime_flags cards`.

#[macro_use]
mod support;

use std::fs;

use anyhow::ensure;
use support::{LitClassifier, Short, this_program};
use voltaic::accelerator::{HpuAccelerator, RuntimeFlags, memory_stats};
use voltaic::data::MnistData;
use voltaic::graph::{WrapOptions, wrap_in_hpu_graph};
use voltaic::prelude::*;
use voltaic::trainer::TrainerBuilder;

fn main() -> Result<()> {
    let blocks = blocks![
        flags_that_are_read,
        how_many_cards,
        how_much_memory,
        which_operators_cast,
        tensors_of_a_graph,
        flags_without_effect,
        values_that_are_refused,
    ];
    support::run_with(blocks, blocks![cards, memory, casts, graph_calls])
}

/// Runs a block with variables in its environment, and prints both.
fn with_flags(block: &str, flags: &[(&str, &str)]) -> Result<()> {
    let set: Vec<String> = flags.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let ran = this_program().arg(block).envs(flags.iter().copied()).output()?;
    ensure!(ran.status.success(), "{block} failed: {}", String::from_utf8_lossy(&ran.stderr));
    print!("{}{block}: {}", set.concat(), String::from_utf8_lossy(&ran.stdout));
    Ok(())
}

/// A fit of a few batches on HPUs.
fn on_hpus() -> TrainerBuilder {
    Trainer::builder().accelerator("hpu").short().limit_train_batches(8)
}

/// Section: Runtime Environment Variables. As `voltaic devices --env` does: the flags with their values here.
fn flags_that_are_read() -> Result<()> {
    for flag in RuntimeFlags::from_env()?.report() {
        let value = flag.value.as_deref().unwrap_or("not set");
        println!("{} ({value}; default {}): {}", flag.name, flag.default, flag.effect);
    }
    Ok(())
}

/// Section: Runtime Environment Variables. Visible modules, and the cards that `devices=auto` takes.
fn how_many_cards() -> Result<()> {
    with_flags("cards", &[])?;
    with_flags("cards", &[("HABANA_VISIBLE_MODULES", "0,3")])?;
    with_flags("cards", &[("VOLTAIC_HPU_DEVICES", "2")])
}

fn cards() -> Result<()> {
    let mut trainer = on_hpus().devices("auto").build()?; // starts the ranks, if there are several
    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    if trainer.is_global_zero() {
        let hpu = HpuAccelerator::from_env()?;
        let (visible, auto) = (hpu.device_count(), hpu.auto_device_count());
        println!("{visible} visible, auto takes {auto}, world_size {}", trainer.world().world_size);
    }
    Ok(())
}

/// Section: Runtime Environment Variables. The memory pool of a card, which is its `Limit`.
fn how_much_memory() -> Result<()> {
    with_flags("memory", &[])?;
    with_flags("memory", &[("VOLTAIC_HPU_GENERATION", "gaudi3")])?;
    with_flags("memory", &[("PT_HABANA_POOL_SIZE", "4")])?;
    with_flags("memory", &[("PT_HPU_POOL_MEM_ACQUIRE_PERC", "50")])?;
    with_flags("memory", &[("VOLTAIC_HPU_MEMORY", "64MiB")])
}

fn memory() -> Result<()> {
    let mut trainer = on_hpus().devices(1).build()?;
    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    let stats = memory_stats(Device::Hpu(0))?;
    println!("Limit {} MiB, MaxInUse {} KiB", stats.limit >> 20, stats.max_in_use >> 10);
    Ok(())
}

/// Section: Runtime Environment Variables. The lists of operators that autocast goes by, and their older names.
fn which_operators_cast() -> Result<()> {
    fs::write("ops_bf16.txt", "linear\nrelu\nmm\n")?;
    fs::write("ops_fp32.txt", "cross_entropy\ntan\n")?;
    with_flags("casts", &[])?;
    with_flags("casts", &[("LOWER_LIST", "ops_fp32.txt"), ("FP32_LIST", "ops_bf16.txt")])?;
    let [lower, fp32] = ["PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"];
    with_flags("casts", &[(lower, "ops_bf16.txt"), (fp32, "ops_fp32.txt")])
}

fn casts() -> Result<()> {
    let builder = on_hpus().devices(1).precision("bf16-mixed");
    let mut trainer = builder.limit_train_batches(1).limit_val_batches(0).build()?;
    trainer.fit(&mut Dtypes { net: LitClassifier::new()? }, &mut MnistData::default())?;
    Ok(())
}

/// Prints the dtypes of what its step computes.
#[derive(Module)]
struct Dtypes {
    net: LitClassifier,
}

impl LightningModule for Dtypes {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let images = x.f_flatten(1, -1)?;
        println!(
            "mm {:?}, tan {:?}",
            images.f_mm(&images.f_transpose(0, 1)?)?.kind(),
            images.f_tan()?.kind()
        );
        self.net.training_step(&(x.shallow_clone(), y.shallow_clone()), ctx)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        self.net.configure_optimizers()
    }
}

/// Section: Runtime Environment Variables. Whether the calls of a graph share the memory of their outputs.
fn tensors_of_a_graph() -> Result<()> {
    with_flags("graph_calls", &[])?;
    with_flags("graph_calls", &[("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "1")])
}

fn graph_calls() -> Result<()> {
    HpuAccelerator::from_env()?.setup()?;
    let net = LitClassifier::new()?;
    net.to_device(Device::Hpu(0))?;
    let net = wrap_in_hpu_graph(net, WrapOptions::default());
    let _no_grad = tch::no_grad_guard();
    let images = |value: f64| Tensor::full([8, 1, 28, 28], value, (Kind::Float, Device::Hpu(0).into()));
    for _ in 0..2 {
        drop(net.forward(&images(0.0))?); // captured, and compared
    }
    let first = net.forward(&images(1.0))?;
    let kept = first.copy();
    drop(net.forward(&images(2.0))?);
    let what = if first.equal(&kept) { "keeps its values" } else { "is overwritten by the next call" };
    println!("the output of a call {what}");
    Ok(())
}

/// Section: Runtime Environment Variables. Flags of a real card's software, which do nothing on emulated ones, are named.
fn flags_without_effect() -> Result<()> {
    let flags = [("PT_HPU_LAZY_MODE", "1"), ("PT_HPU_RECIPE_CACHE_CONFIG", "recipes/,true,1024")];
    let ran = this_program().arg("memory").envs(flags).env("RUST_LOG", "info").output()?;
    ensure!(ran.status.success(), "memory failed: {}", ran.status);
    let log = String::from_utf8_lossy(&ran.stderr).into_owned();
    let named = log.lines().filter_map(|line| line.find("without effect").map(|at| &line[at..]));
    named.for_each(|named| println!("{named}"));
    Ok(())
}

/// Section: Runtime Environment Variables. A value that a flag cannot have is an error before anything is trained.
fn values_that_are_refused() -> Result<()> {
    for (name, value) in
        [("HABANA_VISIBLE_MODULES", "8"), ("PT_HPU_LAZY_MODE", "on"), ("LOWER_LIST", "nowhere.txt")]
    {
        let ran = this_program().arg("casts").env(name, value).output()?;
        ensure!(!ran.status.success(), "{name}={value} is accepted");
        let message = String::from_utf8_lossy(&ran.stderr).into_owned();
        println!("{}", message.lines().find(|line| line.starts_with("Error")).unwrap_or_default());
    }
    Ok(())
}
