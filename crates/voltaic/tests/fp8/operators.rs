//! Casts and products as operators: against libtorch's where they do the same, on the CPU and on emulated HPUs.

use tch::{Device, Kind, Tensor};
use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::ffi::{self, Fp8Cast, Fp8Tensor, Fp8Tensors, fp8_mm, fp8_to};

use crate::alone;

pub const CPU: Device = Device::Cpu;
/// How tch names hpu:0.
pub const HPU: Device = Device::Cuda(64);

pub fn start_hpu() {
    HpuEmulator::init(HpuSettings::default()).unwrap();
    ffi::set_engine_multithreading(false).unwrap();
}

/// Scales of so many tensors, all 1, with a history of one row.
fn scales(slots: i64, device: Device) -> Fp8Tensors {
    Fp8Tensors {
        scale: Tensor::ones([slots], (Kind::Float, device)),
        scale_inv: Tensor::ones([slots], (Kind::Float, device)),
        amax_history: Tensor::zeros([1, slots], (Kind::Float, device)),
        amax_history_index: Tensor::zeros([1], (Kind::Int, device)),
    }
}

fn nearest(dtype: Kind) -> Fp8Cast {
    Fp8Cast { dtype, is_stochastic: false }
}

/// All bfloat16 numbers.
fn all_bf16() -> Tensor {
    let bits: Vec<i16> = (0..=u16::MAX).map(|bits| bits as i16).collect();
    Tensor::from_slice(&bits).f_view_dtype(Kind::BFloat16).unwrap()
}

#[test]
fn casts_are_libtorchs_in_range() {
    let _alone = alone();
    let scales = scales(1, CPU);
    for (dtype, max) in [(Kind::Float8e4m3fn, 240.0), (Kind::Float8e5m2, 57344.0)] {
        for kind in [Kind::BFloat16, Kind::Float] {
            let input = all_bf16().to_kind(kind);
            let codes = scales.cast(&input, 0, false, nearest(dtype)).unwrap().codes;
            let own = fp8_to(&codes, Kind::Float).unwrap();
            let theirs = input.to_kind(Kind::Float).clamp(-max, max).to_kind(dtype).to_kind(Kind::Float);
            let is_number = input.to_kind(Kind::Float).isnan().logical_not();
            let (own, theirs) = (own.masked_select(&is_number), theirs.masked_select(&is_number));
            assert!(own.equal(&theirs), "{dtype:?} of {kind:?}");
            let nans = fp8_to(&codes, Kind::Float).unwrap().isnan().to_kind(Kind::Int64).sum(Kind::Int64);
            let expected = is_number.logical_not().to_kind(Kind::Int64).sum(Kind::Int64);
            assert_eq!(i64::try_from(&nans).unwrap(), i64::try_from(&expected).unwrap());
        }
    }
}

#[test]
fn a_cast_measures_the_input_without_its_scale() {
    let _alone = alone();
    let scales = scales(3, CPU);
    let _ = scales.scale.shallow_clone().fill_(4.0);
    let input = Tensor::from_slice(&[-7.0_f32, 3.0, 100.0]).reshape([3, 1]);
    let cast = scales.cast(&input, 1, true, nearest(Kind::Float8e4m3fn)).unwrap();
    assert_eq!(Vec::<f32>::try_from(scales.amax_history.reshape(-1)).unwrap(), [0.0, 100.0, 0.0]);
    let numbers = fp8_to(&cast.codes, Kind::Float).unwrap().reshape(-1);
    assert_eq!(Vec::<f32>::try_from(numbers).unwrap(), [-28.0, 12.0, 240.0], "saturated");
    scales.cast(&input, 2, false, nearest(Kind::Float8e4m3fn)).unwrap();
    assert_eq!(Vec::<f32>::try_from(scales.amax_history.reshape(-1)).unwrap(), [0.0, 100.0, 0.0]);
    scales.update(Kind::Float8e4m3fn, 0, false).unwrap();
    assert_eq!(Vec::<f32>::try_from(&scales.scale).unwrap(), [4.0, 2.0, 4.0]);
    assert_eq!(Vec::<f32>::try_from(&scales.scale_inv).unwrap()[1], 0.5);
}

fn of(numbers: &Tensor, dtype: Kind, scale_inv: f32) -> Fp8Tensor {
    let codes = scales(1, numbers.device()).cast(numbers, 0, false, nearest(dtype)).unwrap().codes;
    Fp8Tensor { codes, scale_inv: Tensor::from_slice(&[scale_inv]).to_device(numbers.device()) }
}

#[test]
fn products_are_exact_and_rounded_once() {
    let _alone = alone();
    tch::manual_seed(3);
    let within = |own: &Tensor, exact: &Tensor, limit: &Tensor| {
        let error = (own.to_kind(Kind::Double) - exact).abs();
        assert!(bool::try_from(error.le_tensor(limit).all()).unwrap(), "{}", (error / limit).max());
    };
    for (left, right) in [(Kind::Float8e4m3fn, Kind::Float8e4m3fn), (Kind::Float8e5m2, Kind::Float8e4m3fn)] {
        let [a, b] = [[33, 40], [40, 17]].map(|size| Tensor::randn(size, (Kind::Float, CPU)) * 3.0);
        let bias = Tensor::randn([17], (Kind::BFloat16, CPU));
        let (a8, b8) = (of(&a, left, 0.5), of(&b, right, 0.125));
        let [wide_a, wide_b] =
            [&a8, &b8].map(|it| fp8_to(&it.codes, Kind::Float).unwrap().to_kind(Kind::Double));
        let products = wide_a.matmul(&wide_b);
        let exact = &products * 0.0625 + bias.to_kind(Kind::Double);
        // 41 terms summed in float32: each sum is rounded by 2^-24 of what is summed at most
        let sums = (wide_a.abs().matmul(&wide_b.abs()) * 0.0625 + bias.to_kind(Kind::Double).abs())
            * (41.0 * 2f64.powi(-24));
        let own = fp8_mm(&a8, &b8, Some(&bias), Kind::Float).unwrap();
        within(&own, &exact, &sums);
        // then once to bfloat16, which has 8 bits with the leading one: by 2^-8 of the sum
        for bias in [Some(&bias), None] {
            let exact = if bias.is_some() { exact.copy() } else { &products * 0.0625 };
            let own = fp8_mm(&a8, &b8, bias, Kind::BFloat16).unwrap();
            assert_eq!(own.kind(), Kind::BFloat16);
            within(&own, &exact, &(exact.abs() * 2f64.powi(-8) + &sums * 2.0));
        }
        assert!(fp8_to(&a8.codes, Kind::Double).unwrap_err().to_string().contains("float32 or bfloat16"));
        // the other order of the codes in memory
        let turned = Fp8Tensor { codes: b8.codes.t_copy().tr(), scale_inv: b8.scale_inv.shallow_clone() };
        within(&fp8_mm(&a8, &turned, Some(&bias), Kind::Float).unwrap(), &exact, &sums);
        // scales that are no powers of two: their product, and what it is multiplied by, are rounded too
        let odd = Fp8Tensor { codes: a8.codes.shallow_clone(), scale_inv: Tensor::from_slice(&[0.3_f32]) };
        let own = fp8_mm(&odd, &b8, None, Kind::Float).unwrap();
        let exact = products * (f64::from(0.3_f32) * 0.125);
        within(&own, &exact, &(exact.abs() * 2f64.powi(-23) + sums * (0.0375 / 0.0625)));
    }
}

#[test]
fn rows_have_their_own_scales_and_zeros_give_no_nan() {
    let _alone = alone();
    tch::manual_seed(4);
    let magnitudes = Tensor::from_slice(&[1e-6_f32, 0.0, 1.0, 1e6]).reshape([4, 1]);
    let a = Tensor::randn([4, 64], (Kind::Float, CPU)) * &magnitudes;
    let b = Tensor::randn([8, 64], (Kind::Float, CPU));
    let cast = |matrix: &Tensor| nearest(Kind::Float8e4m3fn).with_current_scale(matrix, true, 0).unwrap();
    let (a8, b8) = (cast(&a), cast(&b));
    assert_eq!((a8.scale_inv.size(), b8.scale_inv.size()), (vec![4], vec![8]));
    let b8 = Fp8Tensor { codes: b8.codes.tr(), scale_inv: b8.scale_inv };
    let own = fp8_mm(&a8, &b8, None, Kind::Float).unwrap();
    let expected = a.matmul(&b.tr());
    let error = ((own - &expected).abs() / (&magnitudes + 1e-12)).max();
    assert!(f64::try_from(&error).unwrap() < 2.0, "{error}");
    let whole =
        nearest(Kind::Float8e4m3fn).with_current_scale(&Tensor::zeros([3, 3], (Kind::Float, CPU)), false, 0);
    assert_eq!(whole.unwrap().scale_inv.double_value(&[0]), 1.0);
}

#[test]
fn stochastic_rounding_follows_the_generator_of_the_device() {
    let _alone = alone();
    start_hpu();
    let input = Tensor::full([10_000], 1.03, (Kind::Float, CPU));
    let cast = Fp8Cast { dtype: Kind::Float8e5m2, is_stochastic: true };
    let draw = |device: Device, seed: u64| {
        ffi::manual_seed(seed).unwrap();
        let codes = scales(1, device).cast(&input.to_device(device), 0, true, cast).unwrap().codes;
        fp8_to(&codes, Kind::Float).unwrap().to_device(CPU)
    };
    let first = draw(CPU, 1);
    assert!(first.equal(&draw(CPU, 1)) && !first.equal(&draw(CPU, 2)));
    assert!(first.equal(&draw(HPU, 1)), "an emulated HPU draws as the CPU does");
    let mean = first.mean(Kind::Double).double_value(&[]);
    assert!((mean - 1.03).abs() < 0.005, "{mean}");
}

#[test]
fn an_emulated_hpu_has_the_bits_of_the_cpu() {
    let _alone = alone();
    start_hpu();
    tch::manual_seed(9);
    let (a, b) = (Tensor::randn([7, 33], (Kind::Float, CPU)), Tensor::randn([33, 5], (Kind::Float, CPU)));
    let run = |device: Device| {
        let scales = scales(2, device);
        let a = scales.cast(&a.to_device(device), 0, true, nearest(Kind::Float8e4m3fn)).unwrap();
        let b = scales.cast(&b.to_device(device), 1, true, nearest(Kind::Float8e4m3fn)).unwrap();
        scales.update(Kind::Float8e4m3fn, 0, true).unwrap();
        let product = fp8_mm(&a, &b, None, Kind::BFloat16).unwrap();
        assert_eq!(product.device(), device);
        [product, scales.scale, scales.scale_inv, scales.amax_history].map(|tensor| tensor.to_device(CPU))
    };
    for (cpu, hpu) in run(CPU).iter().zip(&run(HPU)) {
        assert!(cpu.equal(hpu), "{cpu} {hpu}");
    }
}
