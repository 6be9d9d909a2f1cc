//! Operators element by element, at lengths around those of blocks and threads' parts.

use voltaic_kernels::{
    Bf16, Dtype, Element, Floats, FloatsMut, add, add_up, convert, gelu, gelu_backward, relu, relu_backward,
};

use crate::random::Random;
use crate::{DTYPES, Numbers, assert_close, rounding, use_threads};

const LENGTHS: [usize; 10] = [0, 1, 255, 256, 257, 513, 1000, 32_769, 65_537, 100_003];

fn of_bf16(numbers: &Numbers) -> &[Bf16] {
    let Numbers::Bfloat16(numbers) = numbers else { unreachable!() };
    numbers
}

/// GELU by tanh and its derivative, in float64.
fn tanh_gelu(x: f64) -> [f64; 2] {
    let slope = (2.0 / std::f64::consts::PI).sqrt();
    let inner = slope * (x + 0.044_715 * x.powi(3));
    let (t, steepness) = (inner.tanh(), slope * (1.0 + 3.0 * 0.044_715 * x * x));
    [0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * steepness]
}

#[test]
fn gelu_and_its_gradient_are_those_of_each_number() {
    let mut random = Random::new(11);
    for (len, dtype) in LENGTHS.into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype))) {
        use_threads(1 + len % 3);
        let numbers = random.numbers(len).into_iter().map(|number| 5.0 * number);
        let (input, grad) = (Numbers::new(dtype, numbers), Numbers::new(dtype, random.numbers(len)));
        let mut output = Numbers::new(dtype, vec![7.0; len]);
        let what = format!("{len} of {dtype:?}");
        gelu(input.view(), output.view_mut(), true);
        let expected: Vec<_> = input.all().into_iter().map(|x| tanh_gelu(x)[0]).collect();
        assert_close(&what, &output.all(), &expected, rounding(dtype));
        gelu_backward(grad.view(), input.view(), output.view_mut(), true);
        let pairs = input.all().into_iter().zip(grad.all());
        let expected: Vec<_> = pairs.map(|(x, grad)| grad * tanh_gelu(x)[1]).collect();
        assert_close(&what, &output.all(), &expected, rounding(dtype));
    }
}

#[test]
fn relu_sums_and_casts_are_those_of_each_number_in_place_too() {
    let mut random = Random::new(12);
    for len in LENGTHS {
        use_threads(1 + len % 3);
        let mut numbers = |dtype| Numbers::new(dtype, random.numbers(len));
        let (x, y, wide) = (numbers(Dtype::Bfloat16), numbers(Dtype::Bfloat16), numbers(Dtype::Float32));
        let (x_numbers, y_numbers) = (of_bf16(&x), of_bf16(&y));
        let rounded = |numbers: Vec<f64>| of_bf16(&Numbers::new(Dtype::Bfloat16, numbers)).to_vec();

        let mut out = vec![Bf16(7); len];
        relu(Some(x_numbers), &mut out);
        let mut in_place = x_numbers.to_vec();
        relu(None, &mut in_place);
        let expected = rounded(x.all().into_iter().map(|x| x.max(0.0)).collect());
        assert_eq!([&out, &in_place], [&expected; 2], "relu of {len}");

        relu_backward(Some(x_numbers), y_numbers, &mut out);
        let mut in_place = x_numbers.to_vec();
        relu_backward(None, y_numbers, &mut in_place);
        let pairs = x.all().into_iter().zip(y.all());
        let expected = rounded(pairs.map(|(grad, result)| if result > 0.0 { grad } else { 0.0 }).collect());
        assert_eq!([&out, &in_place], [&expected; 2], "gradient of relu, {len}");

        add(Some(x.view()), y_numbers, FloatsMut::Bfloat16(&mut out));
        let mut in_place = x_numbers.to_vec();
        add(None, y_numbers, FloatsMut::Bfloat16(&mut in_place));
        let sums = x_numbers.iter().zip(y_numbers).map(|(x, y)| Bf16::from_f32(x.to_f32() + y.to_f32()));
        let expected: Vec<_> = sums.collect();
        assert_eq!([&out, &in_place], [&expected; 2], "sum of {len}");

        let mut sums = vec![7.0; len];
        add(Some(wide.view()), y_numbers, FloatsMut::Float32(&mut sums));
        let Numbers::Float32(wide_numbers) = &wide else { unreachable!() };
        let expected = wide_numbers.iter().zip(y_numbers).map(|(x, y)| x + y.to_f32());
        assert!(sums.iter().copied().eq(expected), "sum with float32 of {len}");

        convert(wide.view(), FloatsMut::Bfloat16(&mut out));
        assert!(
            out.iter().eq(&wide_numbers.iter().map(|x| Bf16::from_f32(*x)).collect::<Vec<_>>()),
            "cast of {len}"
        );
        convert(Floats::Bfloat16(x_numbers), FloatsMut::Float32(&mut sums));
        assert!(sums.iter().copied().eq(x_numbers.iter().map(|x| x.to_f32())), "cast of {len}");
    }
}

#[test]
fn parts_are_added_up_in_float32_in_their_order() {
    let mut random = Random::new(13);
    for (len, dtype) in [0, 1, 1023, 1024, 5000].into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype)))
    {
        let parts: Vec<_> = (0..4).map(|_| Numbers::new(dtype, random.numbers(len))).collect();
        let mut out = Numbers::new(dtype, vec![7.0; len]);
        let views: Vec<_> = parts.iter().map(Numbers::view).collect();
        add_up(&views, out.view_mut());
        let sum = |i: usize| parts.iter().fold(0.0_f32, |sum, part| sum + part.at(i) as f32);
        assert_eq!(out, Numbers::new(dtype, (0..len).map(|i| f64::from(sum(i)))), "{len} of {dtype:?}");
    }
}
