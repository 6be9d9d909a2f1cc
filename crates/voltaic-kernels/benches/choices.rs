//! Kernels beside each other: `cargo bench -p voltaic-kernels`.
//!
//! Processes that choose kernels as for this processor, and as for ones that lack some of its instructions, take turns, with one
//! thread; of each call the fastest run counts. A dash stands for a call that is libtorch's on such a processor.
//! `cargo bench -p voltaic-kernels -- attention` runs those with `attention` in their names. Where `LIBTORCH` names a libtorch,
//! its MKL serves, too. What libtorch's own kernels take is measured by `cargo bench -p voltaic --bench kernels`.

#[path = "../tests/support/numbers.rs"]
mod numbers;

use std::ffi::CString;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, error, io};

use numbers::Numbers;
use voltaic_kernels::{
    Attention, BatchNorm, BatchedProduct, Convolution, Dtype, HeadTensor, Machine, Part, RowPairs, attention,
    attention_backward, batch_norm, choose_as, convert, convolution, convolution_input_grad,
    convolution_kernel, convolution_weight_grad, gelu, max_pool2d, multiply_batches,
};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Set in the processes that measure, to the number of their machine.
const CHILD: &str = "VOLTAIC_BENCH_MACHINE";
const ROUNDS: usize = 3;
/// How long a call is repeated in one process.
const REPEATED: Duration = Duration::from_millis(100);
const DTYPES: [Dtype; 2] = [Dtype::Float32, Dtype::Bfloat16];

fn main() -> Result<()> {
    load_libtorch(); // first: what it has is looked up once
    let machines = machines();
    let wanted = env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    if let Ok(number) = env::var(CHILD) {
        let machine = machines[number.parse::<usize>()?].1;
        if !choose_as(machine) {
            return Err(format!("this processor cannot stand in for {machine:?}").into());
        }
        for (name, mut call) in calls().into_iter().filter(|(name, _)| name.contains(&wanted)) {
            println!("{name}\t{}", fastest_us(&mut *call).unwrap_or(f64::INFINITY));
        }
        return Ok(());
    }
    let mut best: Vec<(String, Vec<f64>)> = Vec::new();
    for _ in 0..ROUNDS {
        for number in 0..machines.len() {
            for (row, (name, us)) in measure(number, &wanted)?.into_iter().enumerate() {
                if row == best.len() {
                    best.push((name, vec![f64::INFINITY; machines.len()]));
                }
                best[row].1[number] = best[row].1[number].min(us);
            }
        }
    }
    print!("{:<56}", "microseconds, best");
    machines.iter().for_each(|(name, _)| print!("{name:>22}"));
    println!();
    for (name, times) in best {
        print!("{name:<56}");
        times.iter().for_each(|us| if us.is_finite() { print!("{us:>22.1}") } else { print!("{:>22}", "-") });
        println!();
    }
    Ok(())
}

/// This one, and those that have less of it.
fn machines() -> Vec<(&'static str, Machine)> {
    let found = Machine::found();
    let no_amx = Machine { has_tiles: false, has_described_amx: false, ..found };
    let narrow = Machine { has_strips: false, has_wide_units: false, has_bf16_products: false, ..no_amx };
    let all = [
        ("this processor", found),
        ("all that can serve", Machine { asks_for_all: true, ..found }),
        ("as a Zen 5", Machine { has_wide_units: found.has_strips, is_intel: false, ..no_amx }),
        ("without AMX", no_amx),
        ("without AVX512_BF16", Machine { has_bf16_products: false, ..no_amx }),
        ("without AVX-512", narrow),
    ];
    let mut kept: Vec<(&'static str, Machine)> = Vec::new();
    for (name, machine) in all {
        let is_known = kept.iter().any(|(_, known)| *known == machine);
        if !is_known && found.can_stand_in_for(&machine) {
            kept.push((name, machine));
        }
    }
    kept
}

fn load_libtorch() {
    let Ok(folder) = env::var("LIBTORCH") else { return };
    let Ok(library) = CString::new(format!("{folder}/lib/libtorch_cpu.so")) else { return };
    // SAFETY: loads a library whose initialisers do nothing but set it up; it stays.
    unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
}

/// Microseconds of each call in a process of its own.
fn measure(machine: usize, wanted: &str) -> Result<Vec<(String, f64)>> {
    let mut command = Command::new(env::current_exe()?);
    let command = command.arg(wanted).env(CHILD, machine.to_string()).env("OMP_NUM_THREADS", "1"); // the MKL's
    let output = command.output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()).into());
    }
    let text = String::from_utf8(output.stdout)?;
    text.lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(name, us)| Ok((name.to_owned(), us.parse()?)))
        .collect()
}

/// None if it is not served here.
fn fastest_us(call: &mut dyn FnMut() -> bool) -> Option<f64> {
    if !call() {
        return None;
    }
    let (first, mut best) = (Instant::now(), f64::INFINITY);
    while first.elapsed() < REPEATED {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
    }
    Some(best * 1e6)
}

/// Between -1 and 1, no two alike that are near each other.
fn waves(dtype: Dtype, len: usize) -> Numbers {
    Numbers::new(dtype, (0..len).map(|i| f64::from((i as f32 * 0.7).sin())))
}

type Calls = Vec<(String, Box<dyn FnMut() -> bool>)>;

fn calls() -> Calls {
    let mut all: Calls = Vec::new();
    for dtype in DTYPES {
        for shape in [[64, 256, 784], [64, 784, 256], [768, 512, 128], [1024, 1536, 384], [1024, 384, 1536]] {
            add_products(&mut all, dtype, shape);
        }
        add_attention(&mut all, dtype);
        for (channels, side) in [(64, 32), (128, 16), (256, 8), (512, 4)] {
            add_convolutions(&mut all, dtype, channels, side);
        }
        add_images(&mut all, dtype);
        let (input, mut output) = (waves(dtype, 1024 * 1536), waves(dtype, 1024 * 1536));
        let call = move || {
            gelu(input.view(), output.view_mut(), true);
            true
        };
        all.push((format!("gelu, 1024 x 1536, {dtype:?}"), Box::new(call)));
    }
    let (input, mut output) = (waves(Dtype::Float32, 1024 * 1536), waves(Dtype::Bfloat16, 1024 * 1536));
    let call = move || {
        convert(input.view(), output.view_mut());
        true
    };
    all.push(("cast, 1024 x 1536, Float32 to Bfloat16".to_owned(), Box::new(call)));
    all
}

/// A layer's product: the right factor lies by columns, as a weight does.
fn add_products(all: &mut Calls, dtype: Dtype, [rows, columns, depth]: [usize; 3]) {
    let mut out = waves(dtype, rows * columns);
    let (mut a, mut b) = (waves(dtype, rows * depth), waves(dtype, depth * columns));
    let call = move || {
        let product = BatchedProduct {
            dtype,
            shape: [1, rows, columns, depth],
            out: out.address(),
            a: a.address(),
            b: b.address(),
            out_strides: [0, columns as isize, 1],
            a_strides: [0, depth as isize, 1],
            b_strides: [0, 1, depth as isize],
            adds: false,
        };
        // SAFETY: the matrices have so many numbers, each of `out` in one place, and live during the call.
        unsafe { multiply_batches(&product) }.is_some()
    };
    all.push((format!("product, {rows} x {depth} by {depth} x {columns}, {dtype:?}"), Box::new(call)));
}

/// Causal attention of 4 x 6 heads of 256 queries of 64, as in gpt-mini.
fn add_attention(all: &mut Calls, dtype: Dtype) {
    let [batches, heads, rows, dim] = [4, 6, 256, 64];
    for is_backward in [false, true] {
        let mut tensors: [Numbers; 8] = std::array::from_fn(|_| waves(dtype, batches * heads * rows * dim));
        let mut sums = vec![0.0_f32; batches * heads * rows];
        let call = move || {
            let strides = [heads * rows * dim, rows * dim, dim].map(|stride| stride as isize);
            let mut addresses = tensors.each_mut().map(Numbers::address).into_iter();
            let mut next = || {
                HeadTensor { data: addresses.next().unwrap_or(std::ptr::null_mut()), strides } // there are eight
            };
            let of_sums = [heads * rows, rows, 1].map(|stride| stride as isize);
            let call = Attention {
                dtype,
                is_causal: true,
                scale: 0.125,
                batches,
                heads,
                queries: rows,
                keys: rows,
                dim,
                query: next(),
                key: next(),
                value: next(),
                out: next(),
                grad_out: next(),
                grad_query: next(),
                grad_key: next(),
                grad_value: next(),
                log_sum_exp: HeadTensor { data: sums.as_mut_ptr().cast(), strides: of_sums },
            };
            // SAFETY: the tensors have such sizes and strides, and live during the call.
            unsafe { if is_backward { attention_backward(&call) } else { attention(&call) } }
            true
        };
        let what = if is_backward { "gradients" } else { "forward" };
        all.push((format!("attention, 4 x 6 heads of 256 x 64, {dtype:?}: {what}"), Box::new(call)));
    }
}

/// Those of ResNet-18 with a stride of 1, for 32 images.
fn add_convolutions(all: &mut Calls, dtype: Dtype, channels: usize, side: usize) {
    let sizes = Convolution {
        dtype,
        are_channels_last: true,
        images: 32,
        in_channels: channels,
        out_channels: channels,
        in_size: [side; 2],
        out_size: [side; 2],
        kernel: [3, 3],
        stride: [1, 1],
        padding: [1, 1],
    };
    for part in [Part::Output, Part::InputGrad, Part::WeightGrad] {
        let numbers = |len| waves(dtype, len);
        let (input, weight, grad) =
            (numbers(sizes.in_len()), numbers(sizes.weight_len()), numbers(sizes.out_len()));
        let mut out = match part {
            Part::Output => grad.clone(),
            Part::InputGrad => input.clone(),
            Part::WeightGrad => weight.clone(),
        };
        let call = move || {
            if convolution_kernel(&sizes, part, false).is_none() {
                return false;
            }
            let out = out.view_mut();
            match part {
                Part::Output => convolution(&sizes, input.view(), weight.view(), None, out),
                Part::InputGrad => convolution_input_grad(&sizes, grad.view(), weight.view(), out),
                Part::WeightGrad => convolution_weight_grad(&sizes, grad.view(), input.view(), out),
            };
            true
        };
        let name = format!("convolution, {channels} channels, {side} x {side}, {dtype:?}: {part:?}");
        all.push((name, Box::new(call)));
    }
}

/// Batch norm and max-pooling with the channels last.
fn add_images(all: &mut Calls, dtype: Dtype) {
    let (input, mut output) = (waves(dtype, 32 * 64 * 32 * 32), waves(dtype, 32 * 64 * 32 * 32));
    let (mut mean, mut invstd) = (vec![0.0; 64], vec![0.0; 64]);
    let call = move || {
        let norm = BatchNorm {
            momentum: 0.1,
            eps: 1e-5,
            weight: None,
            bias: None,
            running_mean: None,
            running_var: None,
            mean: &mut mean,
            invstd: &mut invstd,
        };
        batch_norm(norm, input.view(), output.view_mut())
    };
    all.push((format!("batch norm, 32 x 64 x 32 x 32, {dtype:?}"), Box::new(call)));
    let (count, side, channels) = (64, 24, 64);
    let len = count * side * side * channels;
    let (input, mut output, mut indices) = (waves(dtype, len), waves(dtype, len / 4), vec![0_i64; len / 4]);
    let call = move || {
        let images = RowPairs { start: 0, height: side, width: side, channels };
        max_pool2d(images, input.view(), output.view_mut(), &mut indices);
        true
    };
    all.push((format!("max-pooling, 64 x 64 x 24 x 24, {dtype:?}"), Box::new(call)));
}
