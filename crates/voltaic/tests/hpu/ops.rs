//! A call of each operator that autocast's lists name, on two matrices `[4, 4]` of one device.

use tch::{Kind, Reduction, Tensor};

/// Gives a result of the operator.
pub type Op = fn(&Tensor, &Tensor) -> Tensor;

const NONE: Option<Tensor> = None;
const MEAN: Reduction = Reduction::Mean;

fn image(x: &Tensor) -> Tensor {
    x.view([1, 1, 4, 4])
}

fn volume(x: &Tensor) -> Tensor {
    x.view([1, 1, 2, 2, 4])
}

fn batch(x: &Tensor) -> Tensor {
    x.view([1, 4, 4])
}

fn classes(x: &Tensor) -> Tensor {
    Tensor::from_slice(&[0_i64, 1, 2, 3]).to_device(x.device())
}

/// Weight or bias of a norm, which stay float32 whatever the input is cast to.
fn weights(x: &Tensor) -> Option<Tensor> {
    Some(Tensor::ones([4], (Kind::Float, x.device())))
}

/// Values that are probabilities, without an operator that a list names.
fn probabilities(x: &Tensor) -> Tensor {
    x.clamp(0.1, 0.9)
}

/// Targets of 1 and -1, in the dtype of `x`.
fn signs(x: &Tensor) -> Tensor {
    x.ones_like()
}

#[rustfmt::skip]
pub const SAMPLES: [(&str, Op); 97] = [
    ("addmm", |a, b| a.addmm(a, b)),
    ("addbmm", |a, b| a.addbmm(&batch(a), &batch(b))),
    ("batch_norm", |a, _| Tensor::batch_norm(a, weights(a), weights(a), NONE, NONE, true, 0.1, 1e-5, false)),
    ("baddbmm", |a, b| batch(a).baddbmm(&batch(a), &batch(b), 1.0, 1.0)),
    ("bmm", |a, b| batch(a).bmm(&batch(b))),
    ("conv1d", |a, b| batch(a).conv1d(&b.view([4, 4, 1]), NONE, 1, 0, 1, 1)),
    ("conv2d", |a, b| image(a).conv2d(&image(b), NONE, 1, 0, 1, 1)),
    ("conv3d", |a, b| volume(a).conv3d(&volume(b), NONE, 1, 0, 1, 1)),
    ("conv_transpose1d", |a, b| batch(a).conv_transpose1d(&b.view([4, 4, 1]), NONE, 1, 0, 0, 1, 1)),
    ("conv_transpose2d", |a, b| image(a).conv_transpose2d(&image(b), NONE, 1, 0, 0, 1, 1)),
    ("conv_transpose3d", |a, b| volume(a).conv_transpose3d(&volume(b), NONE, 1, 0, 0, 1, 1)),
    ("dot", |a, b| a.view(-1).dot(&b.view(-1))),
    ("dropout", |a, _| a.dropout(0.5, true)),
    ("feature_dropout", |a, _| a.feature_dropout(0.5, true)),
    ("group_norm", |a, _| a.group_norm(2, weights(a), weights(a), 1e-5, false)),
    ("instance_norm", |a, _| {
        Tensor::instance_norm(&batch(a), weights(a), weights(a), NONE, NONE, true, 0.1, 1e-5, false)
    }),
    ("layer_norm", |a, _| a.layer_norm([4], weights(a), weights(a), 1e-5, false)),
    ("leaky_relu", |a, _| a.leaky_relu()),
    ("linear", |a, b| a.linear(b, NONE)),
    ("matmul", |a, b| a.matmul(b)),
    ("mean", |a, _| a.mean(None::<Kind>)),
    ("mm", |a, b| a.mm(b)),
    ("mul", |a, b| a * b),
    ("mv", |a, b| a.mv(&b.select(0, 0))),
    ("softmax", |a, _| a.softmax(-1, None::<Kind>)),
    ("log_softmax", |a, _| a.log_softmax(-1, None::<Kind>)),
    ("scaled_dot_product_attention", |a, b| {
        Tensor::scaled_dot_product_attention(&image(a), &image(b), &image(b), NONE, 0.0, false, None, false)
    }),
    ("acos", |a, _| a.acos()),
    ("addcdiv", |a, b| a.addcdiv(a, b)),
    ("asin", |a, _| a.asin()),
    ("atan2", |a, b| a.atan2(b)),
    ("bilinear", |a, b| Tensor::bilinear(a, b, &a.view([1, 4, 4]), NONE)),
    ("binary_cross_entropy", |a, b| probabilities(a).binary_cross_entropy(&probabilities(b), NONE, MEAN)),
    ("binary_cross_entropy_with_logits", |a, b| a.binary_cross_entropy_with_logits(&probabilities(b), NONE, NONE, MEAN)),
    ("cdist", |a, b| Tensor::cdist(a, b, 2.0, None)),
    ("cosh", |a, _| a.cosh()),
    ("cosine_embedding_loss", |a, b| Tensor::cosine_embedding_loss(a, b, &signs(a).select(0, 0), 0.0, MEAN)),
    ("cosine_similarity", |a, b| Tensor::cosine_similarity(a, b, 1, 1e-8)),
    ("cross_entropy_loss", |a, _| a.cross_entropy_loss(&classes(a), NONE, MEAN, -100, 0.0)),
    ("dist", |a, b| a.dist(b)),
    ("div", |a, b| a / b),
    ("divide", |a, b| a.divide(b)),
    ("embedding", |a, _| Tensor::embedding(a, &classes(a), -1, false, false)),
    ("embedding_bag", |a, _| {
        Tensor::embedding_bag(a, &classes(a), &Tensor::from_slice(&[0_i64]).to_device(a.device()), false, 0, false, NONE, false).0
    }),
    ("erfinv", |a, _| a.erfinv()),
    ("exp", |a, _| a.exp()),
    ("expm1", |a, _| a.expm1()),
    ("hinge_embedding_loss", |a, _| a.hinge_embedding_loss(&signs(a), 1.0, MEAN)),
    ("huber_loss", |a, b| a.huber_loss(b, MEAN, 1.0)),
    ("kl_div", |a, b| a.kl_div(b, MEAN, false)),
    ("l1_loss", |a, b| a.l1_loss(b, MEAN)),
    ("log", |a, _| a.log()),
    ("log10", |a, _| a.log10()),
    ("log1p", |a, _| a.log1p()),
    ("log2", |a, _| a.log2()),
    ("logsumexp", |a, _| a.logsumexp([0], false)),
    ("margin_ranking_loss", |a, b| Tensor::margin_ranking_loss(a, b, &signs(a), 0.0, MEAN)),
    ("mse_loss", |a, b| a.mse_loss(b, MEAN)),
    ("multilabel_margin_loss", |a, _| a.multilabel_margin_loss(&classes(a).expand([4, 4], false), MEAN)),
    ("nll_loss", |a, _| a.nll_loss(&classes(a))),
    ("pdist", |a, _| a.pdist(2.0)),
    ("poisson_nll_loss", |a, b| Tensor::poisson_nll_loss(a, b, true, false, 1e-8, MEAN)),
    ("pow", |a, b| a.pow(b)),
    ("reciprocal", |a, _| a.reciprocal()),
    ("renorm", |a, _| a.renorm(2.0, 0, 1.0)),
    ("rsqrt", |a, _| a.rsqrt()),
    ("sinh", |a, _| a.sinh()),
    ("smooth_l1_loss", |a, b| a.smooth_l1_loss(b, MEAN, 1.0)),
    ("soft_margin_loss", |a, _| a.soft_margin_loss(&signs(a), MEAN)),
    ("softplus", |a, _| a.softplus()),
    ("tan", |a, _| a.tan()),
    ("topk", |a, _| a.topk(2, -1, true, true).0),
    ("triplet_margin_loss", |a, b| Tensor::triplet_margin_loss(a, b, a, 1.0, 2.0, 1e-6, false, MEAN)),
    ("true_divide", |a, b| a.true_divide(b)),
    ("add", |a, b| a + b),
    ("addcmul", |a, b| a.addcmul(a, b)),
    ("cat", |a, b| Tensor::cat(&[a, b], 0)),
    ("sub", |a, b| a - b),
    ("stack", |a, b| Tensor::stack(&[a, b], 0)),
    ("relu", |a, _| a.relu()),
    ("t", |a, _| a.tr()),
    ("cumprod", |a, _| a.cumprod(0, None)),
    ("cumsum", |a, _| a.cumsum(0, None)),
    ("elu", |a, _| a.elu()),
    ("gelu", |a, _| a.gelu("none")),
    ("hardtanh", |a, _| a.hardtanh()),
    ("log_sigmoid", |a, _| a.log_sigmoid()),
    ("norm", |a, _| a.norm()),
    ("prod", |a, _| a.prod(None)),
    ("rsub", |a, b| a.rsub(b)),
    ("sigmoid", |a, _| a.sigmoid()),
    ("silu", |a, _| a.silu()),
    ("sqrt", |a, _| a.sqrt()),
    ("std", |a, _| a.std(true)),
    ("sum", |a, _| a.sum(None::<Kind>)),
    ("tanh", |a, _| a.tanh()),
    ("var", |a, _| a.var(true)),
];
