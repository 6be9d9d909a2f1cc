//! The memory pool behind libtorch's CPU allocator. One process installs it once, so most tests run in a process
//! of their own: this same binary, called again for one test.

use tch::nn::Module as _;
use tch::{Kind, Reduction, Tensor, nn};
use voltaic::ffi;

use crate::process::{own_process, plays, text_of};

/// What this test prints in a process of its own as `part`, with the pool's switch set.
fn in_own_process(part: &str, switch: &str) -> String {
    text_of(&own_process(part).env("VOLTAIC_HOST_POOL", switch).output().unwrap())
}

/// Trains a small conv net on made-up images; calls `after_step` with the step's number and loss.
fn train(steps: usize, mut after_step: impl FnMut(usize, f64)) {
    tch::set_num_threads(1);
    tch::manual_seed(3);
    let vars = nn::VarStore::new(tch::Device::Cpu);
    let root = vars.root();
    let config = nn::ConvConfig { padding: 1, ..Default::default() };
    let net = nn::seq()
        .add(nn::conv2d(&root / "conv1", 1, 8, 3, config))
        .add_fn(|x| x.relu().max_pool2d_default(2))
        .add(nn::conv2d(&root / "conv2", 8, 16, 3, config))
        .add_fn(|x| x.relu().max_pool2d_default(2).flatten(1, -1))
        .add(nn::linear(&root / "fc", 16 * 7 * 7, 10, Default::default()));
    let mut optimizer = nn::OptimizerConfig::build(nn::AdamW::default(), &vars, 1e-3).unwrap();
    for step in 0..steps {
        let images = Tensor::rand([8, 1, 28, 28], (Kind::Float, tch::Device::Cpu));
        let labels = Tensor::randint(10, [8], (Kind::Int64, tch::Device::Cpu));
        let loss =
            net.forward(&images).cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.);
        optimizer.backward_step(&loss);
        after_step(step, f64::try_from(&loss).unwrap());
    }
}

#[test]
fn steady_state_takes_nothing_from_the_system() {
    if !plays("trainer") {
        assert_contains!(in_own_process("trainer", "1"), "1 passed");
        return;
    }
    assert!(ffi::install_host_pool().unwrap());
    assert!(ffi::install_host_pool().unwrap(), "a second call changes nothing");
    let mut after_warm_up = None;
    train(12, |step, _| {
        let stats = ffi::host_pool().stats();
        if step < 3 {
            after_warm_up = Some(stats);
            return;
        }
        let warm = after_warm_up.unwrap();
        assert_eq!(stats.total_system_allocs, warm.total_system_allocs, "step {step}");
        assert_eq!(stats.total_system_frees, 0, "step {step}");
        assert!(stats.num_allocs > warm.num_allocs + 50, "the step does use the pool");
    });
    let held = ffi::host_pool().stats().in_use;
    drop(Tensor::zeros([1 << 20], (Kind::Float, tch::Device::Cpu)));
    assert_eq!(ffi::host_pool().stats().in_use, held, "a freed tensor's block is back");
}

#[test]
fn losses_are_the_same_bits_with_and_without_the_pool() {
    if plays("losses") {
        assert_eq!(ffi::install_host_pool().unwrap(), std::env::var("VOLTAIC_HOST_POOL").unwrap() == "1");
        train(8, |_, loss| println!("loss {:016x}", loss.to_bits()));
        return;
    }
    let losses = |switch| {
        let text = in_own_process("losses", switch);
        // the first one follows the test's name on its line
        let lines: Vec<String> =
            text.lines().filter_map(|line| Some(line.split_once("loss ")?.1.to_owned())).collect();
        assert_eq!(lines.len(), 8, "{text}");
        lines
    };
    assert_eq!(losses("0"), losses("1"));
}

#[test]
fn tensors_outlive_the_change_of_allocator_threads_and_main() {
    if !plays("old tensors") {
        assert!(in_own_process("old tensors", "1").contains("1 passed"));
        return;
    }
    thread_local!(static KEPT: std::cell::RefCell<Vec<Tensor>> = const { std::cell::RefCell::new(Vec::new()) });
    let options = (Kind::Float, tch::Device::Cpu);
    let before = [Tensor::ones([10], options), Tensor::ones([1 << 20], options)];
    assert!(ffi::install_host_pool().unwrap());
    let after = Tensor::ones([1 << 20], options);
    assert!(ffi::host_pool().stats().in_use >= 4 << 20);
    let sum = &before[1] + &after;
    drop(before);
    assert_eq!(f64::try_from(sum.sum(Kind::Float)).unwrap(), 2. * (1 << 20) as f64);
    let from_thread = std::thread::spawn(move || {
        KEPT.with_borrow_mut(|kept| kept.push(after));
        Tensor::ones([1000], (Kind::Float, tch::Device::Cpu))
    });
    let from_thread = from_thread.join().unwrap();
    assert_eq!(f64::try_from(from_thread.sum(Kind::Float)).unwrap(), 1000.);
    KEPT.with_borrow_mut(|kept| kept.push(from_thread));
    std::mem::forget(sum);
}

#[test]
fn out_of_memory_names_the_numbers() {
    if !plays("limit") {
        assert_contains!(in_own_process("limit", "1"), "1 passed");
        return;
    }
    assert!(ffi::install_host_pool().unwrap());
    ffi::host_pool().set_limit(Some(64 << 20));
    let options = (Kind::Float, tch::Device::Cpu);
    let kept = Tensor::f_ones([4 << 20], options).unwrap();
    let error = voltaic::Error::from(Tensor::f_ones([16 << 20], options).unwrap_err());
    let voltaic::Error::Torch(error) = error else { panic!("{error}") };
    assert_eq!(error.kind, voltaic::error::TorchErrorKind::OutOfMemory);
    let message = &error.message;
    assert!(message.contains("tried to allocate 67108864 bytes; in use 16777216, reserved "), "{message}");
    assert!(message.contains("limit 67108864;"), "{message}");
    drop(kept);
    drop(Tensor::f_ones([8 << 20], options).expect("smaller ones still fit"));
}
