//! Hooks and switches of the autograd engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::ffi::{GradHook, clear_grads, engine_multithreading, set_engine_multithreading, set_grad};
use voltaic::{Kind, Tensor};

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);

fn leaf() -> Tensor {
    Tensor::ones([3], CPU).set_requires_grad(true)
}

#[test]
fn a_hook_runs_once_per_backward_until_it_is_dropped() {
    let w = leaf();
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let hook = GradHook::register(&w, move || {
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })
    .unwrap();
    for _ in 0..2 {
        (&w * 2.0).sum(Kind::Float).backward();
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!(Vec::<f32>::try_from(w.grad()).unwrap(), [4.0; 3], "the gradient is accumulated");
    drop(hook);
    (&w * 2.0).sum(Kind::Float).backward();
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!(Arc::strong_count(&calls), 1, "the closure is freed with the hook");
}

#[test]
fn a_failing_or_panicking_hook_fails_backward_and_keeps_its_reason() {
    for panics in [false, true] {
        let w = leaf();
        let hook = GradHook::register(&w, move || {
            assert!(!panics, "broken invariant");
            anyhow::bail!("bucket is full")
        })
        .unwrap();
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let result = (&w * 2.0).sum(Kind::Float).f_backward();
        std::panic::set_hook(quiet);
        assert!(result.unwrap_err().to_string().contains("a gradient hook failed"));
        let reason = hook.take_failure().unwrap().to_string();
        assert!(reason.contains(if panics { "broken invariant" } else { "bucket is full" }), "{reason}");
    }
}

#[test]
fn hooks_need_a_leaf() {
    let w = leaf();
    assert_error!(GradHook::register(&(&w * 2.0), || Ok(())), "needs a leaf that requires grad");
}

#[test]
fn gradients_can_be_set_and_dropped() {
    let w = leaf();
    set_grad(&w, &Tensor::full([3], 5.0, CPU)).unwrap();
    assert_eq!(Vec::<f32>::try_from(w.grad()).unwrap(), [5.0; 3]);
    clear_grads([&w]).unwrap();
    assert!(!w.grad().defined());
}

#[test]
fn the_engine_switch_is_per_thread() {
    set_engine_multithreading(false).unwrap();
    let elsewhere = std::thread::spawn(|| engine_multithreading().unwrap()).join().unwrap();
    assert!(!engine_multithreading().unwrap() && elsewhere);
    set_engine_multithreading(true).unwrap();
}
