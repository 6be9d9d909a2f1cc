//! What a layer says of an input or of sizes that do not fit.

use tch::Kind;
use voltaic::error::{Error, ModuleError};
use voltaic::nn::*;
use voltaic::{Result, Tensor};

use crate::rng::seeded;

#[test]
fn the_error_of_a_layer_in_sequences_names_its_place() {
    let _guard = seeded(0);
    let inner = Sequential::new().add(Relu).add(Linear::new(3, 2).unwrap());
    let outer = Sequential::new().add(Linear::new(5, 4).unwrap()).add(inner);
    let error =
        |size: i64| outer.forward(&Tensor::ones([2, size], (Kind::Float, tch::Device::Cpu))).unwrap_err();
    let of_inner = "Linear(3, 2): input of shape [2, 4] does not fit: last dimension must be 3";
    assert_eq!(format!("{:#}", error(5)), format!("layer 1.1: {of_inner}"));
    assert!(matches!(error(5).downcast_ref(), Some(Error::Module(ModuleError::Shape { .. }))));
    assert!(format!("{:#}", error(1)).starts_with("layer 0: Linear(5, 4): "));
}

#[test]
fn an_input_that_does_not_fit_is_explained_in_the_layers_terms() {
    let guard = seeded(0);
    let layers: Vec<(Box<dyn Forward>, &[i64], &str)> = vec![
        (
            Box::new(Linear::new(784, 256).unwrap()),
            &[64, 100],
            "Linear(784, 256): input of shape [64, 100] does not fit: last dimension must be 784",
        ),
        (
            Box::new(Conv2d::builder(3, 8, 3).padding(1).build().unwrap()),
            &[2, 1, 8, 8],
            "Conv2d(3, 8, kernel_size=[3, 3], padding=[1, 1]): input of shape [2, 1, 8, 8] does not fit: \
             dimension 1 holds the channels and must be 3",
        ),
        (
            Box::new(Conv1d::new(1, 1, 5).unwrap()),
            &[2, 1, 4],
            "Conv1d(1, 1, kernel_size=[5]): input of shape [2, 1, 4] does not fit: \
             with padding [0] it is smaller than the kernel [5]",
        ),
        (
            Box::new(Conv2d::new(1, 1, 5).unwrap()),
            &[28, 28],
            "Conv2d(1, 1, kernel_size=[5, 5]): input of shape [28, 28] does not fit: \
             3 or 4 dimensions, [batch, channels, *], are needed",
        ),
        (
            Box::new(ConvTranspose2d::new(4, 2, 3).unwrap()),
            &[2, 2, 8, 8],
            "ConvTranspose2d(4, 2, kernel_size=[3, 3], stride=[1, 1]): input of shape [2, 2, 8, 8] does not fit: \
             dimension 1 holds the channels and must be 4",
        ),
        (
            Box::new(BatchNorm2d::new(4).unwrap()),
            &[2, 4],
            "BatchNorm2d(4): input of shape [2, 4] does not fit: \
             4 dimensions, [batch, channels, height, width], are needed",
        ),
        (
            Box::new(BatchNorm1d::new(4).unwrap()),
            &[2, 5],
            "BatchNorm1d(4): input of shape [2, 5] does not fit: dimension 1 holds the channels and must be 4",
        ),
        (
            Box::new(LayerNorm::new([3, 4]).unwrap()),
            &[2, 4],
            "LayerNorm([3, 4]): input of shape [2, 4] does not fit: last dimensions must be [3, 4]",
        ),
        (
            Box::new(GroupNorm::new(2, 4).unwrap()),
            &[2, 6, 3],
            "GroupNorm(2, 4): input of shape [2, 6, 3] does not fit: dimension 1 holds the channels and must be 4",
        ),
        (
            Box::new(MultiheadAttention::builder(8, 2).batch_first(true).build().unwrap()),
            &[5, 2, 6],
            "MultiheadAttention(8, 2): input of shape [5, 2, 6] does not fit: [batch, sequence, 8] is needed",
        ),
        (
            Box::new(MaxPool2d::new(3).unwrap()),
            &[1, 2, 2],
            "MaxPool2d([3, 3]): input of shape [1, 2, 2] does not fit: \
             with padding [0, 0] it is smaller than the window [3, 3]",
        ),
        (
            Box::new(AvgPool2d::new(1).unwrap()),
            &[5, 5],
            "AvgPool2d([1, 1]): input of shape [5, 5] does not fit: \
             3 or 4 dimensions, [batch, channels, height, width], are needed",
        ),
    ];
    drop(guard);
    for (layer, shape, message) in layers {
        let input = Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
        let error = layer.forward(&input).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert!(matches!(error.downcast_ref(), Some(Error::Module(ModuleError::Shape { .. }))), "{error:?}");
    }
}

#[test]
fn a_batch_of_one_value_in_each_channel_does_not_lose_the_running_variance() {
    let options = (Kind::Float, tch::Device::Cpu);
    let (mut flat, mut images) = (BatchNorm1d::new(4).unwrap(), BatchNorm2d::new(4).unwrap());
    let bare = BatchNorm1d::builder(4).track_running_stats(false).build().unwrap();
    let (one, one_pixel) = (Tensor::ones([1, 4], options), Tensor::ones([1, 4, 1, 1], options));
    for error in [flat.forward(&one), images.forward(&one_pixel), bare.forward(&one)] {
        assert_error!(error, "has one value in each channel, which has no variance; give more");
    }
    assert!(flat.forward(&Tensor::ones([1, 4, 2], options)).is_ok());
    assert!(images.forward(&Tensor::ones([2, 4, 1, 1], options)).is_ok());
    flat.eval();
    images.eval();
    assert!(flat.forward(&one).is_ok());
    assert!(images.forward(&one_pixel).is_ok());
    for (_, buffer) in flat.named_buffers().into_iter().chain(images.named_buffers()) {
        assert!(buffer.tensor().isfinite().all().int64_value(&[]) == 1, "{}", buffer.tensor());
    }
}

#[test]
fn a_target_in_a_column_is_not_compared_with_every_row() {
    use voltaic::nn::functional::{accuracy, mse_loss};
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
    let error = mse_loss(&float(&[4, 1]), &float(&[4])).unwrap_err().to_string();
    assert_eq!(
        error,
        "mse_loss: input of shape [4, 1] does not fit: targets have shape [4]; reshape one of them"
    );
    let error = accuracy(&float(&[4, 3]), &float(&[4, 1])).unwrap_err().to_string();
    assert_eq!(
        error,
        "accuracy: input of shape [4] does not fit: targets have shape [4, 1]; reshape one of them"
    );
    assert_eq!(mse_loss(&float(&[4, 1]), &float(&[4, 1])).unwrap().double_value(&[]), 0.0);
}

#[test]
fn a_mask_in_another_order_is_refused() {
    let guard = seeded(0);
    let attention = MultiheadAttention::builder(8, 2).batch_first(true).build().unwrap();
    drop(guard);
    let float = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, tch::Device::Cpu));
    let (query, key) = (float(&[3, 4, 8]), float(&[3, 5, 8]));
    let attend = |mask: &AttentionMask<'_>| attention.attend(&query, &key, &key, mask).map(drop);
    for shape in [&[4, 5][..], &[6, 4, 5]] {
        attend(&AttentionMask { attn_mask: Some(&float(shape)), ..Default::default() }).unwrap();
    }
    attend(&AttentionMask::key_padding(&float(&[3, 5]))).unwrap();
    for shape in [&[5, 4][..], &[20], &[3, 2, 4, 5], &[6, 5, 4], &[3, 4, 5]] {
        let error = attend(&AttentionMask { attn_mask: Some(&float(shape)), ..Default::default() });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("attn_mask has shape") && error.ends_with("give [4, 5] or [6, 4, 5]"),
            "{error}"
        );
    }
    let error = attend(&AttentionMask::key_padding(&float(&[5, 3]))).unwrap_err().to_string();
    assert!(error.contains("key_padding_mask has shape [5, 3]; give [3, 5]"), "{error}");
    let ones = Tensor::ones([3, 5], (Kind::Int64, tch::Device::Cpu));
    assert_error!(attend(&AttentionMask::key_padding(&ones)), "key_padding_mask is Int64; give bool");
}

#[test]
fn an_index_outside_the_table_is_explained() {
    let guard = seeded(0);
    let embedding = Embedding::new(65, 4).unwrap();
    drop(guard);
    for (input, what) in [
        (Tensor::from_slice(&[3_i64, 65]), "the indices reach from 3 to 65"),
        (Tensor::from_slice(&[-1_i64, 5]), "the indices reach from -1 to 5"),
        (Tensor::from_slice(&[1.5_f32]), "the input's dtype is Float"),
    ] {
        let error = embedding.forward(&input).unwrap_err().to_string();
        assert_eq!(error, format!("Embedding(65, 4): {what}; give integers in 0..65"));
    }
}

#[test]
fn sizes_that_make_no_sense_are_refused_when_the_layer_is_made() {
    fn message<T>(made: Result<T>) -> String {
        match made {
            Err(error @ Error::Module(ModuleError::Sizes { .. })) => error.to_string(),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("made"),
        }
    }
    for (message, expected) in [
        (message(Linear::new(0, 5)), "Linear: in_features is 0; give at least 1"),
        (message(Conv2d::new(3, -1, 3)), "Conv2d: out_channels is -1; give at least 1"),
        (
            message(Conv2d::builder(3, 8, 3).padding((0, -1)).build()),
            "Conv2d: padding is -1; give at least 0",
        ),
        (
            message(Conv1d::builder(6, 8, 3).groups(3).build()),
            "Conv1d: groups = 3 does not divide out_channels = 8; choose groups among the divisors of 8",
        ),
        (
            message(ConvTranspose2d::builder(2, 2, 3).output_padding(1).build()),
            "ConvTranspose2d: output_padding is [1, 1] with stride [1, 1]; \
             give an output_padding below the stride or the dilation",
        ),
        (message(BatchNorm2d::new(0)), "BatchNorm2d: num_features is 0; give at least 1"),
        (message(LayerNorm::new([])), "LayerNorm: number of dimensions is 0; give at least 1"),
        (
            message(GroupNorm::new(4, 6)),
            "GroupNorm: num_groups = 4 does not divide num_channels = 6; choose num_groups among the divisors of 6",
        ),
        (
            message(Embedding::builder(5, 2).padding_idx(5).build()),
            "Embedding: padding_idx is 5; give an index in 0..5",
        ),
        (
            message(MultiheadAttention::new(10, 3)),
            "MultiheadAttention: num_heads = 3 does not divide embed_dim = 10; \
             choose num_heads among the divisors of 10",
        ),
        (
            message(MaxPool2d::builder(2).padding(2).build()),
            "MaxPool2d: padding is [2, 2] for a window of [2, 2]; give at most half the window",
        ),
    ] {
        assert_eq!(message, expected);
    }
}
