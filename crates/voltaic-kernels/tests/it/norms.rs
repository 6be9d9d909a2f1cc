//! Batch norm and max-pooling of whole tensors.

use voltaic_kernels::{
    BatchNorm, BatchNormGrads, RowPairs, batch_norm, batch_norm_backward, max_pool2d, max_pool2d_backward,
};

use crate::random::Random;
use crate::{DTYPES, Numbers, assert_close, rounding, use_threads};

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().copied().map(f64::from).collect()
}

#[test]
fn batch_norm_of_any_number_of_channels_is_as_in_float64() {
    let mut random = Random::new(9);
    for round in 0..60 {
        use_threads(1 + round % 3);
        let dtype = DTYPES[round % 2];
        let (pixels, channels) = (random.between(2, 3000), random.between(1, 90));
        let len = pixels * channels;
        let (input, grad) =
            (Numbers::new(dtype, random.numbers(len)), Numbers::new(dtype, random.numbers(len)));
        let mut vector = || random.numbers(channels).iter().map(|number| *number as f32).collect::<Vec<_>>();
        let (weight, bias, before) = (vector(), vector(), vector());
        let weight = (round % 3 > 0).then_some(weight);
        let (mut mean, mut invstd) = (vec![0.0; channels], vec![0.0; channels]);
        let (mut running_mean, mut running_var) = (before.clone(), before.clone());
        let mut output = Numbers::new(dtype, vec![7.0; len]);
        let (momentum, eps) = (0.3, 1e-5);
        let norm = BatchNorm {
            momentum,
            eps,
            weight: weight.as_deref(),
            bias: Some(&bias),
            running_mean: Some(&mut running_mean),
            running_var: Some(&mut running_var),
            mean: &mut mean,
            invstd: &mut invstd,
        };
        assert!(batch_norm(norm, input.view(), output.view_mut()));

        let (mut grad_weight, mut grad_bias) = (vec![0.0; channels], vec![0.0; channels]);
        let mut grad_input = Numbers::new(dtype, vec![7.0; len]);
        let grads = BatchNormGrads {
            weight: weight.as_deref(),
            mean: &mean,
            invstd: &invstd,
            grad_weight: &mut grad_weight,
            grad_bias: &mut grad_bias,
        };
        batch_norm_backward(grads, grad.view(), input.view(), Some(grad_input.view_mut()));

        let what = format!("{pixels} pixels of {channels} channels, {dtype:?}");
        let tolerance = 4.0 * rounding(dtype).max(1e-5);
        for c in 0..channels {
            let of =
                |numbers: &Numbers| (0..pixels).map(|i| numbers.at(i * channels + c)).collect::<Vec<_>>();
            let (x, dy) = (of(&input), of(&grad));
            let count = pixels as f64;
            let center = x.iter().sum::<f64>() / count;
            let squares = x.iter().map(|x| (x - center).powi(2)).sum::<f64>();
            let scale = 1.0 / (squares / count + eps).sqrt();
            let factor = weight.as_ref().map_or(1.0, |weight| f64::from(weight[c]));
            let normal: Vec<_> = x.iter().map(|x| (x - center) * scale).collect();
            let expected: Vec<_> = normal.iter().map(|x| x * factor + f64::from(bias[c])).collect();
            assert_close(&what, &of(&output), &expected, tolerance);
            let sum: f64 = dy.iter().sum();
            let product: f64 = dy.iter().zip(&normal).map(|(dy, x)| dy * x).sum();
            let input_grad =
                |(dy, x): (&f64, &f64)| factor * scale * (dy - sum / count - x * product / count);
            let expected: Vec<_> = dy.iter().zip(&normal).map(input_grad).collect();
            assert_close(&what, &of(&grad_input), &expected, tolerance);
            let old = f64::from(before[c]);
            let running =
                [center, squares / (count - 1.0)].map(|new| momentum * new + (1.0 - momentum) * old);
            let found = [running_mean[c], running_var[c], mean[c], grad_weight[c], grad_bias[c]];
            let expected = [running[0], running[1], center, product, sum];
            assert_close(&what, &wide(&found), &expected, 1e-4);
        }
        // without an output the channels' gradients are the same
        let (mut weight_alone, mut bias_alone) = (vec![0.0; channels], vec![0.0; channels]);
        let grads = BatchNormGrads {
            weight: weight.as_deref(),
            mean: &mean,
            invstd: &invstd,
            grad_weight: &mut weight_alone,
            grad_bias: &mut bias_alone,
        };
        batch_norm_backward(grads, grad.view(), input.view(), None);
        assert_eq!((weight_alone, bias_alone), (grad_weight, grad_bias), "{what}");
    }
}

#[test]
fn windows_of_any_image_give_their_largest_and_take_its_gradient() {
    let mut random = Random::new(10);
    for round in 0..60 {
        use_threads(1 + round % 3);
        let dtype = DTYPES[round % 2];
        let (count, channels) = (random.between(1, 5), random.between(1, 40));
        let (height, width) = (2 * random.between(1, 20), 2 * random.between(1, 20));
        let len = count * height * width * channels;
        let input = Numbers::new(dtype, random.numbers(len));
        let grad = Numbers::new(dtype, random.numbers(len / 4));
        let images = RowPairs { start: 0, height, width, channels };
        let mut output = Numbers::new(dtype, vec![7.0; len / 4]);
        let mut grad_input = Numbers::new(dtype, vec![7.0; len]);
        let mut indices = vec![-1; len / 4];
        max_pool2d(images, input.view(), output.view_mut(), &mut indices);
        max_pool2d_backward(images, grad.view(), &indices, grad_input.view_mut());
        let mut expected = vec![0.0; len];
        for (i, index) in indices.iter().enumerate() {
            let (pixel, channel) = (i / channels, i % channels);
            let (x, y) = (pixel % (width / 2), pixel / (width / 2) % (height / 2));
            let image = pixel / (width / 2) / (height / 2);
            let places = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(down, right)| {
                let pixel = (2 * y + down) * width + 2 * x + right;
                (pixel, (image * height * width + pixel) * channels + channel)
            });
            let larger = |best: (usize, usize), next: &(usize, usize)| {
                if input.at(next.1) > input.at(best.1) { *next } else { best }
            };
            let (pixel, place) = places[1..].iter().fold(places[0], larger);
            assert_eq!((output.at(i), *index), (input.at(place), pixel as i64), "{images:?}, {i}");
            expected[place] = grad.at(i);
        }
        assert_eq!(grad_input.all(), expected, "{images:?}");
    }
}
