//! Modules whose weights have no memory before a fit divides them.

use std::path::Path;
use std::sync::{Arc, Mutex};

use voltaic::callback::Callback;
use voltaic::ffi::manual_seed;
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::HookContext;
use voltaic::nn::{ModuleExt, init};
use voltaic::{Module, Tensor};

use crate::models::tokens;
use crate::ranks::{assert_same, on_ranks, output, silent, weights};
use crate::stage3::bare;

/// Large enough for the process around it: 50 MB of weights, in modules of 4 MB at most.
pub fn large() -> Gpt {
    let config =
        GptConfig { vocab_size: 61, block_size: 16, n_layer: 4, n_head: 2, n_embd: 512, ..GptConfig::tiny() };
    Gpt::new(config).unwrap()
}

fn small() -> Gpt {
    let config =
        GptConfig { vocab_size: 61, block_size: 16, n_layer: 2, n_head: 2, n_embd: 128, ..GptConfig::tiny() };
    Gpt::new(config).unwrap()
}

/// The module, and a number drawn after it.
fn made(make: impl FnOnce() -> Gpt) -> (Gpt, f64) {
    manual_seed(5).unwrap();
    let net = make();
    (net, Tensor::rand([1], (voltaic::Kind::Float, tch::Device::Cpu)).double_value(&[0]))
}

#[test]
fn weights_are_those_that_are_drawn_at_once() {
    on_ranks("deferred::weights_are_those_that_are_drawn_at_once", 2, |ranks, folder| {
        for strategy in ["zero3", "zero1", "ddp"] {
            let run = |(mut net, next): (Gpt, f64)| {
                let builder =
                    if strategy == "zero3" { bare(ranks, folder) } else { silent(ranks, strategy, folder) };
                let mut trainer = builder.max_epochs(1).build().unwrap();
                trainer.fit(&mut net, &mut tokens(8)).unwrap();
                trainer.gather_weights(&net).unwrap();
                (weights(&net), next)
            };
            let (net, next) = made(|| init::deferred(small));
            let sharded = net.parameters().iter().filter(|parameter| parameter.is_sharded()).count();
            assert_eq!(sharded, 8, "the matrices of all blocks");
            let own = run((net, next));
            let plain = run(made(small));
            assert_same(strategy, &own.0, &plain.0);
            assert_eq!(own.1, plain.1);
        }
    });
}

/// What the process held at most, in bytes.
pub fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
}

/// Notes the most that the process has held before the first step.
pub struct Peak(pub Arc<Mutex<usize>>);

impl Callback for Peak {
    fn on_train_start(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        *self.0.lock().unwrap() = peak();
        Ok(())
    }
}

/// Until its first step, a rank never holds the module whole.
#[test]
fn the_host_never_holds_all_weights() {
    const DEFERS: &str = "VOLTAIC_TEST_DEFERS";
    let test = "deferred::the_host_never_holds_all_weights";
    let run = |ranks: usize, folder: &Path| {
        let at_start = Arc::new(Mutex::new(0));
        let mut trainer = bare(ranks, folder).max_steps(1).callback(Peak(at_start.clone())).build().unwrap();
        drop(small());
        let before = peak();
        let defers = std::env::var(DEFERS).is_ok();
        let mut net = if defers { init::deferred(large) } else { large() };
        let whole = 4 * net.num_parameters(false);
        trainer.fit(&mut net, &mut tokens(8)).unwrap();
        let grown = *at_start.lock().unwrap() - before;
        println!("held {grown} beside {whole}");
    };
    if let Some(folder) = crate::ranks::folder_of_rank() {
        return run(2, &folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let held = |variables: &[(&str, &str)]| -> [usize; 2] {
        let output = output(test, 2, folder.path(), variables);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{variables:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let (_, numbers) = text.split_once("held ").unwrap();
        let (held, whole) = numbers.lines().next().unwrap().split_once(" beside ").unwrap();
        [held.parse().unwrap(), whole.parse().unwrap()]
    };
    let ([plain, whole], [deferred, _]) = (held(&[]), held(&[(DEFERS, "1")]));
    // half of the weights is this rank's part, which both hold
    assert!(deferred + whole / 2 < plain, "{deferred} and {plain} of {whole}");
}
