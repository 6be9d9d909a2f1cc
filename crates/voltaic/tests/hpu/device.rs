//! What a device must do besides computing: names, errors, memory, random numbers, views, files.

use tch::{Kind, Tensor};
use voltaic::accelerator::{
    HpuEmulator, HpuSettings, max_memory_allocated, mem_get_info, memory_stats,
    reset_accumulated_memory_stats, reset_peak_memory_stats,
};
use voltaic::error::TorchErrorKind;
use voltaic::models::{Mlp, MlpConfig};
use voltaic::nn::{Forward, ModuleExt};
use voltaic::{Device, Error, ffi};

use crate::support::{CPU, HPU, HPU1, assert_same, bits, same_bits, start};

fn on(device: tch::Device) -> (Kind, tch::Device) {
    (Kind::Float, device)
}

/// The message of an operation that must fail.
fn refused<T>(result: Result<T, tch::TchError>) -> String {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(error) => Error::from(error).to_string(),
    }
}

#[test]
fn tensors_know_that_they_are_on_an_hpu() {
    let _rng = start();
    let x = Tensor::ones([2, 3], on(HPU));
    assert_eq!(x.device(), HPU);
    assert_eq!(Device::of(&x).unwrap(), Device::Hpu(0));
    assert_eq!(Device::of(&x.to_device(HPU1)).unwrap(), Device::Hpu(1));
    assert_eq!(Device::of(&x.to_device(CPU)).unwrap(), Device::Cpu);
    assert_eq!(Device::of(&x.zeros_like()).unwrap(), Device::Hpu(0));
    assert_eq!(f64::try_from(x.sum(Kind::Float)).unwrap(), 6.0);
    assert_eq!(Vec::<f64>::try_from(x.flatten(0, -1)).unwrap(), [1.0; 6], "read back in another dtype");
    assert!(format!("{x}").contains("1"), "{x}");
    assert!(format!("{x:?}").contains("[2, 3]"), "{x:?}");
}

#[test]
fn tensors_of_two_devices_do_not_mix() {
    let _rng = start();
    let (host, card, other) =
        (Tensor::ones([4], on(CPU)), Tensor::ones([4], on(HPU)), Tensor::ones([4], on(HPU1)));
    for (message, devices) in [
        (refused(card.f_add(&host)), "hpu:0 and cpu!"),
        (refused(host.f_add(&card)), "hpu:0 and cpu!"),
        (refused(card.f_add(&other)), "hpu:0 and hpu:1!"),
        (refused(host.shallow_clone().f_add_(&card)), "hpu:0 and cpu!"),
        (refused(Tensor::f_cat(&[&host, &card], 0)), "hpu:0 and cpu!"),
        (refused(Tensor::ones([], on(CPU)).f_add_(&card)), "hpu:0 and cpu!"),
        (refused(card.f_atan2(&host)), "hpu:0 and cpu!"),
    ] {
        assert!(message.contains("same device") && message.contains(devices), "{message}");
    }
    assert_eq!(bits(&(&card + Tensor::from(1.0_f32))), bits(&Tensor::full([4], 2.0, on(CPU))), "scalars may");
    let picked = Tensor::arange(4, on(HPU)).f_index(&[Some(Tensor::from_slice(&[3_i64, 0]))]).unwrap();
    assert_eq!(bits(&picked), bits(&Tensor::from_slice(&[3_f32, 0.0])), "indices may be on the cpu");
    assert_eq!(host.device(), CPU);
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let _rng = start();
    let message = refused(Tensor::f_ones([4], on(tch::Device::Cuda(64 + 9))));
    assert!(message.contains("HPU device index 9 out of range [0,8)"), "{message}");
}

#[test]
fn dtypes_that_the_cards_lack_are_refused() {
    let _rng = start();
    let x = Tensor::ones([4], on(HPU));
    let double = Tensor::ones([4], (Kind::Double, CPU));
    for message in [
        refused(Tensor::f_ones([4], (Kind::Double, HPU))),
        refused(double.f_to_device(HPU)),
        refused(x.f_sum(Kind::Double)),
        refused(x.to_kind(Kind::Double).f_add(&x)),
    ] {
        assert!(message.contains("float64 does not exist on gaudi2: "), "{message}");
        assert!(
            message.contains("; convert to float32") || message.contains("convert to float32"),
            "{message}"
        );
    }
    assert_contains!(refused(x.f_fft_rfft(None, -1, "backward")), "complex64 does not exist on gaudi2");
    for kind in [Kind::Half, Kind::BFloat16, Kind::Float8e4m3fn, Kind::Int64, Kind::Uint8, Kind::Bool] {
        assert_eq!(x.to_kind(kind).kind(), kind);
    }
}

#[test]
fn sparse_tensors_are_refused_with_a_reason() {
    let _rng = start();
    let x = Tensor::eye(3, on(HPU));
    assert_contains!(refused(x.f_to_sparse(None, None::<&[i64]>, None)), "sparse");
    let indices = Tensor::from_slice(&[0_i64, 1, 1, 0]).reshape([2, 2]).to_device(HPU);
    let message = refused(Tensor::f_sparse_coo_tensor_indices_size(
        &indices,
        &Tensor::ones([2], on(HPU)),
        [2, 2],
        on(HPU),
        false,
    ));
    assert!(message.contains("an HPU has no sparse tensors"), "{message}");
}

#[test]
fn out_of_memory_is_an_error_and_a_smaller_model_trains_afterwards() {
    let _rng = start();
    let emulator = HpuEmulator::get().unwrap();
    let card = 3;
    let device = Device::Hpu(card);
    emulator.set_memory_limit(card, 16 << 20).unwrap();
    let place = tch::Device::Cuda(64 + card);
    let train = |hidden_features: i64| -> voltaic::Result<()> {
        let net = Mlp::new(MlpConfig { in_features: 64, hidden_features, num_classes: 10 })?;
        net.to_device(device)?;
        for _ in 0..3 {
            let x = Tensor::f_rand([1024, 64], on(place))?;
            let loss = net.forward(&x).map_err(|error| match error.downcast::<Error>() {
                Ok(error) => error,
                Err(other) => panic!("{other}"),
            })?;
            loss.f_square()?.f_mean(Kind::Float)?.f_backward()?;
        }
        Ok(())
    };
    for (hidden, why) in [(1 << 17, "the weights"), (4096, "the activations")] {
        let Err(Error::Torch(error)) = train(hidden) else { panic!("{why} fit") };
        assert_eq!(error.kind, TorchErrorKind::OutOfMemory);
        let message = error.message;
        for part in
            ["hpu:3 out of memory: tried to allocate ", "in use ", "reserved ", "limit 16777216", "; use a"]
        {
            assert!(message.contains(part), "{why}: {message}");
        }
        assert_eq!(memory_stats(device).unwrap().in_use, 0, "{why}: all is free again");
    }
    train(128).unwrap();
    let stats = memory_stats(device).unwrap();
    assert!(stats.max_in_use <= 16 << 20 && stats.max_in_use > 1 << 20, "{stats:?}");
    emulator.set_memory_limit(card, 96 << 30).unwrap();
    assert!(emulator.set_memory_limit(8, 1).is_err());
}

#[test]
fn memory_is_counted_where_it_is_used() {
    let _rng = start();
    let device = Device::Hpu(5);
    let place = tch::Device::Cuda(64 + 5);
    let before = memory_stats(device).unwrap();
    assert_eq!((before.limit, before.in_use), (96 << 30, 0));
    let x = Tensor::ones([1 << 20], on(place));
    let host = ffi::host_pool().stats().in_use;
    let y = &x + &x;
    let stats = memory_stats(device).unwrap();
    assert_eq!((stats.in_use, stats.active_allocs, stats.max_alloc_size), (8 << 20, 2, 4 << 20));
    assert_eq!(ffi::host_pool().stats().in_use, host, "nothing of it on the host's account");
    assert_eq!(mem_get_info(device).unwrap(), ((96 << 30) - (8 << 20), 96 << 30));
    let view = y.narrow(0, 3, 5);
    assert_eq!(memory_stats(device).unwrap().num_allocs, stats.num_allocs, "a view takes no memory");
    drop((x, y));
    assert_eq!(memory_stats(device).unwrap().in_use, 4 << 20, "the view keeps its base");
    reset_accumulated_memory_stats(device).unwrap();
    assert_eq!(memory_stats(device).unwrap().active_allocs, 1, "one from before the reset lives");
    drop(view);
    let stats = memory_stats(device).unwrap();
    assert_eq!((stats.num_frees, stats.active_allocs), (1, 0), "not below 0");
    reset_peak_memory_stats(device).unwrap();
    assert_eq!(max_memory_allocated(device).unwrap(), 0);
    reset_accumulated_memory_stats(device).unwrap();
    let stats = memory_stats(device).unwrap();
    assert_eq!((stats.num_allocs, stats.num_frees, stats.max_in_use), (0, 0, 0));
    assert!(stats.total_system_allocs >= 2 && stats.total_active_allocs == 0);
}

#[test]
fn each_device_has_a_generator() {
    let _rng = start();
    let draw = |device| Tensor::rand([4], on(device));
    ffi::manual_seed(5).unwrap();
    let (host, first, second) = (draw(CPU), draw(HPU), draw(HPU1));
    assert!(same_bits(&host, &first) && same_bits(&host, &second), "a seed holds for all devices");
    let state = ffi::rng_state(15, 0).unwrap();
    let next = draw(HPU);
    assert!(!same_bits(&next, &first));
    ffi::set_rng_state(15, 0, &state).unwrap();
    assert!(same_bits(&draw(HPU), &next), "a saved state draws the same again");
    assert!(same_bits(&draw(HPU1), &next), "the other device has not moved meanwhile");
}

#[test]
fn views_and_changes_in_place_share_memory() {
    let _rng = start();
    assert_same("in place", |device| {
        let x = Tensor::randn([4, 6], on(device));
        let mut view = x.view([6, 4]).transpose(0, 1);
        let _ = view.g_add_(&Tensor::ones([4, 6], on(device)));
        let _ = x.select(0, 1).fill_(3.0);
        let _ = x.narrow(1, 0, 2).zero_();
        vec![
            x.shallow_clone(),
            view,
            x.unfold(1, 2, 2),
            x.diagonal(0, 0, 1),
            x.split_with_sizes([2, 4], 1).remove(1),
        ]
    });
    assert_same("resized and reset", |device| {
        let mut x = Tensor::ones([4], on(device));
        let out = Tensor::empty([0], on(device));
        let _ = x.resize_([50]).zero_();
        let _ = Tensor::ones([3, 3], on(device)).matmul_out(&out, &Tensor::ones([3, 3], on(device)));
        let y = Tensor::empty([0], on(device)).set_source_tensor(&x);
        vec![x, out, y]
    });
    let x = Tensor::zeros([4], on(HPU));
    let _ = x.view([2, 2]).fill_(2.0);
    assert_eq!(bits(&x), bits(&Tensor::full([4], 2.0, on(CPU))));
}

#[test]
fn a_failed_operator_leaves_its_result_tensor_usable() {
    let _rng = start();
    let out = Tensor::empty([0], on(HPU));
    assert!(Tensor::ones([2, 3], on(HPU)).f_matmul_out(&out, &Tensor::ones([2, 3], on(HPU))).is_err());
    let _ = Tensor::ones([2, 3], on(HPU)).f_matmul_out(&out, &Tensor::ones([3, 2], on(HPU))).unwrap();
    assert_eq!(bits(&out), bits(&Tensor::full([2, 2], 3.0, on(CPU))));
    let fresh = Tensor::ones([64], on(HPU));
    assert_eq!(f64::try_from(fresh.sum(Kind::Float)).unwrap(), 64.0);
}

#[test]
fn gradients_of_gradients_and_across_devices() {
    let _rng = start();
    assert_same("double backward", |device| {
        let x = Tensor::randn([6, 4], on(device)).set_requires_grad(true);
        let y = x.pow_tensor_scalar(3).sum(Kind::Float);
        let gradient = Tensor::run_backward(&[y], &[&x], true, true).remove(0);
        gradient.square().sum(Kind::Float).backward();
        vec![gradient.detach(), x.grad()]
    });
    let x = Tensor::ones([3], on(CPU)).set_requires_grad(true);
    (x.to_device(HPU) * 2.0).to_device(HPU1).sum(Kind::Float).backward();
    assert_eq!(bits(&x.grad()), bits(&Tensor::full([3], 2.0, on(CPU))));
}

#[test]
fn changed_saved_values_are_noticed() {
    let _rng = start();
    let x = Tensor::ones([3], on(HPU)).set_requires_grad(true);
    let y = x.exp();
    let _ = y.detach().g_add_scalar_(1.0);
    assert_contains!(refused(y.sum(Kind::Float).f_backward()), "modified by an inplace operation");
}

#[test]
fn tensors_survive_a_file() {
    let _rng = start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let x = Tensor::randn([3, 4], on(HPU));
    Tensor::write_safetensors(&[("x", &x)], &path).unwrap();
    let read = Tensor::read_safetensors(&path).unwrap().remove(0).1;
    assert!(same_bits(&read, &x) && read.device() == CPU);
}

#[test]
fn a_second_setting_up_must_be_the_same() {
    let _rng = start();
    assert!(HpuEmulator::init(HpuSettings::default()).is_ok());
    let error = HpuEmulator::init(HpuSettings { num_devices: 2, ..HpuSettings::default() }).unwrap_err();
    assert!(error.to_string().contains("has 8 emulated gaudi2"), "{error}");
}

#[test]
fn threads_use_their_own_devices() {
    let _rng = start();
    let expected = bits(&Tensor::ones([64, 64], on(CPU)).matmul(&Tensor::ones([64, 64], on(CPU))).relu());
    std::thread::scope(|scope| {
        for index in 0..8 {
            let expected = &expected;
            scope.spawn(move || {
                ffi::set_thread_num_threads(1);
                let device = tch::Device::Cuda(64 + index);
                for _ in 0..20 {
                    let x = Tensor::ones([64, 64], on(device));
                    assert_eq!(&bits(&x.matmul(&x).relu()), expected);
                }
            });
        }
    });
}
