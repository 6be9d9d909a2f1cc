//! Named tensors, such as weights, that must be the same.

use voltaic::{Kind, Tensor};

/// Asserts the same names and bits.
pub fn assert_same(what: &str, own: &[(String, Tensor)], expected: &[(String, Tensor)]) {
    assert_within(what, own, expected, 0.0);
}

/// Asserts the same names and values within a part of the largest one.
pub fn assert_within(what: &str, own: &[(String, Tensor)], expected: &[(String, Tensor)], tolerance: f64) {
    let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(own), names(expected), "{what}");
    for ((name, own), (_, expected)) in own.iter().zip(expected) {
        assert_eq!((own.size(), own.kind()), (expected.size(), expected.kind()), "{what}: {name}");
        if own.numel() == 0 || own.equal(expected) {
            continue;
        }
        let largest = |tensor: &Tensor| tensor.to_kind(Kind::Double).abs().max().double_value(&[]);
        let difference = largest(&(own.to_kind(Kind::Double) - expected.to_kind(Kind::Double)));
        let limit = tolerance * largest(expected).max(1e-3);
        assert!(difference <= limit, "{what}: {name} differs by {difference}, limit {limit}");
    }
}
