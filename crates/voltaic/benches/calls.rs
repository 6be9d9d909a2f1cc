//! What the call of a module costs beside its code: `cargo bench --bench calls`.
//!
//! A module whose code takes no time is run by its code, by `call` with nobody listening, with a hook on another module, and
//! with a hook on it. The ways take turns in blocks within one run; printed is the difference to the code alone.

use std::error;
use std::hint::black_box;
use std::time::Instant;

use measure::micro::{Row, Target};
use tch::{Device, Kind, Tensor};
use voltaic::nn::{Callable, Forward, Module, ModuleHooks};

type Result<T> = std::result::Result<T, Box<dyn error::Error>>;

/// Calls of a block.
const BLOCK: usize = 20_000;
const ROUNDS: usize = 60;

#[derive(Module)]
struct Same {
    #[module(skip)]
    number: u8,
}

impl Forward for Same {
    #[inline(never)]
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        black_box(self.number);
        Ok(input.shallow_clone())
    }
}

#[derive(Module)]
struct Net {
    heard: Same,
    other: Same,
}

/// Nanoseconds of one run of `body`.
fn nanos(mut body: impl FnMut() -> anyhow::Result<Tensor>) -> anyhow::Result<f64> {
    let started = Instant::now();
    for _ in 0..BLOCK {
        drop(black_box(body()?));
    }
    Ok(started.elapsed().as_secs_f64() * 1e9 / BLOCK as f64)
}

fn main() -> Result<()> {
    let net = Net { heard: Same { number: 1 }, other: Same { number: 2 } };
    let x = Tensor::ones([1], (Kind::Float, Device::Cpu));
    let hooks = ModuleHooks::new();
    let _handle = hooks.register_forward_hook("heard", |_, _, _| Ok(()));
    let (mut free, mut beside, mut heard) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let code = nanos(|| net.heard.forward(black_box(&x)))?;
        let call = nanos(|| net.heard.call(black_box(&x)))?;
        let watched = |module: &Same| hooks.within(&net, || nanos(|| module.call(black_box(&x))));
        let (other, own) = (watched(&net.other)??, watched(&net.heard)??);
        if round > 2 {
            free.push(call - code);
            beside.push(other - code);
            heard.push(own - code);
        }
    }
    Row::of("calls", "a call that nobody hears", "ns", free, Target::AtMost(2.0)).record()?;
    Row::of("calls", "a call while others are heard", "ns", beside, Target::AtMost(100.0)).record()?;
    Row::of("calls", "a call with a forward hook", "ns", heard, Target::AtMost(1000.0)).record()?;
    Ok(())
}
