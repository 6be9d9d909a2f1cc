//! AdamW's step of 10^8 weights beside PyTorch's fused one and DeepSpeed's for the CPU: `cargo bench --bench update`.
//!
//! Processes of both sides take turns, with one thread; of each step the fastest run counts. A step of float32 reads and writes
//! 28 bytes a weight. With bfloat16 weights that have float32 copies, gradients are read and weights written in the same pass: also
//! 28 bytes. DeepSpeed's step with float32 states has no such copies (22 bytes).

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Instant;
use std::{env, error, io};

use measure::micro::{Row, Target};
use measure::peer::torch_parts;
use tch::{Device, Kind, Tensor};
use voltaic::ffi;
use voltaic::nn::Parameter;
use voltaic::optim::{AdamW, BuildOptimizer, ParamGroupSpec};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const ROUNDS: usize = 3;
const WEIGHTS: i64 = 100_000_000;
const STEPS: usize = 9;
const WARM_UP: usize = 3;

fn main() -> Result<()> {
    if env::var_os(CHILD).is_some() {
        tch::set_num_threads(1);
        ffi::install_host_pool()?;
        ffi::install_kernels()?;
        for (name, kind, has_masters, has_float32_states) in [
            ("float32", Kind::Float, false, false),
            ("bfloat16, masters float32", Kind::BFloat16, true, false),
            ("bfloat16, states float32", Kind::BFloat16, false, true),
            ("bfloat16", Kind::BFloat16, false, false),
        ] {
            let times: Vec<String> =
                steps(kind, has_masters, has_float32_states)?.iter().map(f64::to_string).collect();
            println!("{name}\t{}", times.join("\t"));
        }
        return Ok(());
    }
    let mut best: BTreeMap<String, f64> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let mut lines = torch_parts("update")?;
        let output = Command::new(env::current_exe()?).env(CHILD, "1").output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
        }
        let own = String::from_utf8(output.stdout)?;
        lines.extend(own.lines().map(|line| line.split('\t').map(str::to_owned).collect()));
        for line in &lines {
            let (name, times) = line.split_first().ok_or("a line without a name")?;
            for time in times {
                let time: f64 = time.parse()?;
                best.entry(name.clone()).and_modify(|best| *best = best.min(time)).or_insert(time);
            }
        }
    }
    for (name, ms) in &best {
        println!("{name:<46} {ms:>8.1} ms");
    }
    let of = |name: &str| best.get(name).copied().ok_or_else(|| format!("no measurement of {name}"));
    for (own, peers, most) in [
        ("float32", ["DeepSpeedCPUAdam float32", "torch fused float32"], 1.05),
        ("bfloat16, masters float32", ["DeepSpeedCPUAdam float32", "torch fused float32"], 1.0),
        (
            "bfloat16, states float32",
            ["DeepSpeedCPUAdam bfloat16, states float32", "torch fused float32"],
            1.0,
        ),
        ("bfloat16", ["DeepSpeedCPUAdam bfloat16", "torch fused bfloat16"], 1.0),
    ] {
        for peer in peers {
            let name = format!("AdamW {own}, of {peer}");
            Row::of("update", name, "", vec![of(own)? / of(peer)?], Target::AtMost(most)).record()?;
        }
    }
    Ok(())
}

/// Milliseconds of steps.
fn steps(kind: Kind, has_masters: bool, has_float32_states: bool) -> Result<Vec<f64>> {
    let normal = || Tensor::randn([WEIGHTS], (Kind::Float, Device::Cpu)).to_kind(kind);
    let parameter = Parameter::new(normal());
    ffi::set_grad(parameter.leaf(), &normal())?;
    let group = ParamGroupSpec::new([("weight".to_owned(), parameter)]).float32_states(has_float32_states);
    let mut optimizer = AdamW::new(1e-3).weight_decay(0.01).master_weights(has_masters).build(vec![group])?;
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let start = Instant::now();
        optimizer.step()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times.split_off(WARM_UP))
}
