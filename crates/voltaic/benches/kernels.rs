//! Voltaic's kernels for the CPU beside libtorch's: `cargo bench --bench kernels`.
//!
//! Processes with voltaic's kernels (all of them, also those that this processor is not given by itself) and with
//! libtorch's take turns, with one thread; of each operator the fastest run counts, which other programs disturb least.
//! `cargo bench --bench kernels -- linear` runs those with `linear` in their names.

use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, error, io};

use measure::micro::{Row, Target};
use tch::{Device, Kind, Tensor};
use voltaic::ffi::{self, Fp8Cast, Fp8Tensor, fp8_mm};
use voltaic::nn::Parameter;
use voltaic::optim::{Adagrad, AdamW, BuildOptimizer, Lion, ParamGroupSpec, Sgd};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure.
const CHILD: &str = "VOLTAIC_BENCH_CHILD";
const ROUNDS: usize = 5;
/// One row by a large matrix, in bfloat16 and of float8.
const SINGLE_ROWS: [&str; 2] = ["4096 to 16384, 1 row BFloat16", "4096 to 16384, 1 row float8"];
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// How long an operator is repeated in one process.
const REPEATED: Duration = Duration::from_millis(150);

fn main() -> Result<()> {
    if env::var_os(CHILD).is_some() {
        tch::set_num_threads(1);
        ffi::install_host_pool()?;
        ffi::install_kernels()?;
        let wanted = env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
        for (name, mut run) in operators()?.into_iter().filter(|(name, _)| name.contains(&wanted)) {
            println!("{name}\t{}", fastest_us(&mut *run));
        }
        return Ok(());
    }
    let mut best: Vec<(String, [f64; 2])> = Vec::new();
    let mut gains = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let sides = [measure("0")?, measure("1")?];
        let us = |side: usize, name: &str| sides[side].iter().find(|(own, _)| own == name).map(|(_, us)| us);
        for (side, gains) in gains.iter_mut().enumerate() {
            gains.extend(us(side, SINGLE_ROWS[0]).zip(us(1, SINGLE_ROWS[1])).map(|(bf16, fp8)| bf16 / fp8));
        }
        for (side, measured) in sides.into_iter().enumerate() {
            for (row, (name, us)) in measured.into_iter().enumerate() {
                if row == best.len() {
                    best.push((name, [f64::INFINITY; 2]));
                }
                best[row].1[side] = best[row].1[side].min(us);
            }
        }
    }
    println!("{:<58}{:>12}{:>12}{:>8}", "microseconds, best", "libtorch", "voltaic", "times");
    for (name, [libtorch, voltaic]) in best {
        println!("{name:<58}{libtorch:>12.1}{voltaic:>12.1}{:>8.2}", libtorch / voltaic);
    }
    for (whose, gains) in ["libtorch's", "voltaic's"].into_iter().zip(gains) {
        if !gains.is_empty() {
            let what = format!("one row by 4096 x 16384: {whose} bfloat16 to float8, read as one byte each");
            Row::of("kernels", &what, "", gains, Target::AtLeast(1.5)).record()?;
        }
    }
    Ok(())
}

/// Microseconds of each operator in a process of its own.
fn measure(switch: &str) -> Result<Vec<(String, f64)>> {
    let mut command = Command::new(env::current_exe()?);
    let output =
        command.args(env::args().skip(1)).env(CHILD, "1").env("VOLTAIC_CPU_KERNELS", switch).output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
    }
    let text = String::from_utf8(output.stdout)?;
    text.lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(name, us)| Ok((name.to_owned(), us.parse()?)))
        .collect()
}

fn fastest_us(run: &mut dyn FnMut()) -> f64 {
    run();
    let (first, mut best) = (Instant::now(), f64::INFINITY);
    while first.elapsed() < REPEATED {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best * 1e6
}

type Operators = Vec<(String, Box<dyn FnMut()>)>;

fn operators() -> Result<Operators> {
    let mut all: Operators = Vec::new();
    for kind in [Kind::Float, Kind::BFloat16] {
        add_linear(&mut all, kind);
        for sizes in [[12, 4, 64, 32], [4, 6, 256, 64]] {
            let rows = || normal(&sizes).to_kind(kind);
            let inputs = [rows(), rows(), rows()];
            let attend = |[query, key, value]: &[Tensor; 3]| {
                Tensor::scaled_dot_product_attention::<Tensor>(
                    query, key, value, None, 0.0, true, None, false,
                )
            };
            add(&mut all, &format!("attention {sizes:?} {kind:?}"), inputs, attend);
        }
        add_convolutions(&mut all, kind);
        let features = channels_last(&normal(&[64, 64, 24, 24]).to_kind(kind));
        add(&mut all, &format!("max_pool2d, channels last {kind:?}"), [features], |[features]| {
            features.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
        });
        let features = channels_last(&normal(&[32, 64, 32, 32]).to_kind(kind));
        let inputs = [features, Tensor::ones([64], FLOAT), Tensor::zeros([64], FLOAT)];
        add(&mut all, &format!("batch_norm, channels last {kind:?}"), inputs, |[features, weight, bias]| {
            let none = None::<Tensor>;
            features.batch_norm(
                Some(weight),
                Some(bias),
                none.as_ref(),
                none.as_ref(),
                true,
                0.1,
                1e-5,
                false,
            )
        });
        let hidden = normal(&[1024, 1536]).to_kind(kind);
        add(&mut all, &format!("relu [1024, 1536] {kind:?}"), [hidden], |[hidden]| hidden.relu());
        let (hidden, other) = (normal(&[1024, 1536]).to_kind(kind), normal(&[1024, 1536]).to_kind(kind));
        all.push((format!("add [1024, 1536] {kind:?}"), Box::new(move || drop(hidden.f_add(&other)))));
        let (hidden, other) = (normal(&[1024, 1536]).to_kind(kind), opposite(kind));
        let name = format!("cast [1024, 1536] {kind:?} to {other:?}");
        all.push((name, Box::new(move || drop(hidden.to_kind(other)))));
        let mut mask = normal(&[1024, 1536]).to_kind(kind);
        let draw = move || drop(mask.f_bernoulli_float_(0.5));
        all.push((format!("bernoulli [1024, 1536] {kind:?}"), Box::new(draw)));
        let hidden = normal(&[1024, 1536]).to_kind(kind);
        add(&mut all, &format!("gelu [1024, 1536] {kind:?}"), [hidden], |[hidden]| hidden.gelu("tanh"));
    }
    add_steps(&mut all)?;
    add_single_rows(&mut all)?;
    let (wide, narrow) = (normal(&[1024, 1536]), normal(&[1024, 1536]).to_kind(Kind::BFloat16));
    all.push(("add [1024, 1536] Float and BFloat16".to_owned(), Box::new(move || drop(wide.f_add(&narrow)))));
    Ok(all)
}

/// Steps of optimizers: of float32, and of float32 copies of weights whose gradients have 16 bits.
fn add_steps(all: &mut Operators) -> Result<()> {
    for kind in [Kind::Float, Kind::BFloat16] {
        let optimizers: [Box<dyn BuildOptimizer>; 4] = [
            Box::new(AdamW::new(1e-3).master_weights(true)),
            Box::new(Sgd::new(1e-3).momentum(0.9).master_weights(true)),
            Box::new(Adagrad::new(1e-3).master_weights(true)),
            Box::new(Lion::new(1e-4).master_weights(true)),
        ];
        for optimizer in optimizers {
            let parameter = Parameter::new(normal(&[1 << 22]).to_kind(kind));
            ffi::set_grad(parameter.leaf(), &normal(&[1 << 22]).to_kind(kind))?;
            let group = ParamGroupSpec::new([("weight".to_owned(), parameter)]);
            let mut built = optimizer.build(vec![group])?;
            let name = format!("step of {}, 4 Mi weights {kind:?}", optimizer.name());
            all.push((name, Box::new(move || drop(built.step()))));
        }
    }
    Ok(())
}

/// One row by a large weight, as a language model computes a token: in bfloat16, and of float8 codes. Both are the same code with and without
/// voltaic's kernels.
fn add_single_rows(all: &mut Operators) -> Result<()> {
    let (weight, x) = (normal(&[16384, 4096]), normal(&[1, 4096]));
    let (narrow, turned) = (x.to_kind(Kind::BFloat16), weight.to_kind(Kind::BFloat16).tr());
    all.push((SINGLE_ROWS[0].to_owned(), Box::new(move || drop(narrow.f_mm(&turned)))));
    let cast = Fp8Cast { dtype: Kind::Float8e4m3fn, is_stochastic: false };
    let [x, weight] = [x, weight].map(|tensor| cast.with_current_scale(&tensor, false, 1));
    let (x, weight) = (x?, weight?);
    let weight = Fp8Tensor { codes: weight.codes.tr(), scale_inv: weight.scale_inv };
    let product = move || drop(fp8_mm(&x, &weight, None, Kind::BFloat16));
    all.push((SINGLE_ROWS[1].to_owned(), Box::new(product)));
    Ok(())
}

/// The other of the two number formats.
fn opposite(kind: Kind) -> Kind {
    if kind == Kind::Float { Kind::BFloat16 } else { Kind::Float }
}

/// The products of layers.
fn add_linear(all: &mut Operators, kind: Kind) {
    for (rows, from, to) in
        [(64, 784, 256), (64, 9216, 128), (768, 128, 512), (1024, 384, 1536), (1024, 1536, 384)]
    {
        let draw = |sizes: [i64; 2]| normal(&sizes).to_kind(kind);
        let (x, weight, grad) = (draw([rows, from]), draw([to, from]), draw([rows, to]));
        let name = |what: &str| format!("linear {from} to {to}, {rows} rows {kind:?}: {what}");
        let turned = weight.tr();
        all.push((name("forward"), Box::new(move || drop(x.mm(&turned)))));
        let to_input = grad.shallow_clone();
        all.push((name("gradient of input"), Box::new(move || drop(to_input.mm(&weight)))));
        let (turned, x) = (grad.tr(), draw([rows, from]));
        all.push((name("gradient of weight"), Box::new(move || drop(turned.mm(&x)))));
    }
}

/// Convolutions of ResNet-18, and the gradients of their inputs and weights.
fn add_convolutions(all: &mut Operators, kind: Kind) {
    for (from, to, side, stride) in [
        (64, 64, 32, 1),
        (64, 128, 32, 2),
        (128, 128, 16, 1),
        (128, 256, 16, 2),
        (256, 256, 8, 1),
        (256, 512, 8, 2),
        (512, 512, 4, 1),
    ] {
        let images = channels_last(&normal(&[32, from, side, side]).to_kind(kind));
        let weight = channels_last(&normal(&[to, from, 3, 3]).to_kind(kind));
        let convolve = move |images: &Tensor, weight: &Tensor| {
            images.conv2d::<Tensor>(weight, None, [stride, stride], [1, 1], [1, 1], 1)
        };
        let name = |what: &str| {
            format!("convolution 3x3, {from} to {to}, {side}x{side} by {stride} {kind:?}: {what}")
        };
        for (what, wanted) in [("gradient of input", [true, false]), ("gradient of weight", [false, true])] {
            let images = images.detach().set_requires_grad(wanted[0]);
            let weight = weight.detach().set_requires_grad(wanted[1]);
            let output = [convolve(&images, &weight)];
            let grad = [output[0].detach().cos()];
            let leaf = [if wanted[0] { images } else { weight }];
            all.push((name(what), Box::new(move || drop(ffi::autograd_grad(&output, &grad, &leaf)))));
        }
        all.push((name("forward"), Box::new(move || drop(convolve(&images, &weight)))));
    }
}

/// An operator, and its gradients.
fn add<const N: usize>(
    all: &mut Operators,
    name: &str,
    inputs: [Tensor; N],
    operator: impl Fn(&[Tensor; N]) -> Tensor + 'static,
) {
    let leaves = inputs.each_ref().map(|input| input.detach().set_requires_grad(true));
    let output = [operator(&leaves)];
    let grad = [output[0].detach().cos()];
    all.push((format!("{name}: forward"), Box::new(move || drop(operator(&inputs)))));
    all.push((
        format!("{name}: gradients"),
        Box::new(move || drop(ffi::autograd_grad(&output, &grad, &leaves))),
    ));
}

fn channels_last(images: &Tensor) -> Tensor {
    images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

fn normal(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, FLOAT)
}
