//! Buckets: gradients that are reduced together.

use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::error::Result;

/// Most bytes of the first bucket: it starts to travel while most of backward is still to come.
const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// Gradients that travel together, in one tensor of which each is a view.
#[derive(Debug)]
pub(super) struct Bucket {
    /// Indices of the parameters.
    pub params: Vec<usize>,
    /// What it is called if it does not arrive.
    pub name: Arc<str>,
    /// `[sum of their sizes]`.
    pub flat: Tensor,
    /// A view of `flat` with the shape of each parameter.
    pub views: Vec<Tensor>,
}

/// Divides parameters, given by dtype and bytes, into buckets of at most `cap_bytes`; each holds one dtype. Takes them in
/// `order`, in which their gradients are expected.
pub(super) fn assign(params: &[(Kind, usize)], order: &[usize], cap_bytes: usize) -> Vec<Vec<usize>> {
    // by dtype: whether its first bucket is full, bytes and parameters of the open one
    let mut open: Vec<(Kind, bool, usize, Vec<usize>)> = Vec::new();
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    for &index in order {
        let (kind, bytes) = params[index];
        let at = open.iter().position(|(known, ..)| *known == kind).unwrap_or_else(|| {
            open.push((kind, false, 0, Vec::new()));
            open.len() - 1
        });
        let (_, is_past_first, size, members) = &mut open[at];
        members.push(index);
        *size += bytes;
        let limit = if *is_past_first { cap_bytes } else { FIRST_BUCKET_BYTES.min(cap_bytes) };
        if *size >= limit {
            buckets.push(std::mem::take(members));
            (*is_past_first, *size) = (true, 0);
        }
    }
    buckets.extend(open.into_iter().map(|(.., members)| members).filter(|members| !members.is_empty()));
    buckets
}

impl Bucket {
    /// A bucket for `members`; `params` are all parameters, `names` their fqn.
    pub fn new(members: Vec<usize>, params: &[Tensor], names: &[String]) -> Result<Self> {
        let total: i64 = members.iter().map(|&index| params[index].numel() as i64).sum();
        let like = &params[members[0]];
        let flat = Tensor::f_zeros([total], (like.kind(), like.device()))?;
        let mut views = Vec::with_capacity(members.len());
        let mut start = 0;
        for &index in &members {
            let param = &params[index];
            let len = param.numel() as i64;
            views.push(view_like(&flat.f_narrow(0, start, len)?, param)?);
            start += len;
        }
        let name = match (names.get(members[0]), members.len()) {
            (None, _) => "gradients".into(),
            (Some(first), 1) => format!("gradient of {first}").into(),
            (Some(first), len) => format!("gradients of {first} and {} more", len - 1).into(),
        };
        Ok(Self { params: members, name, flat, views })
    }
}

/// `part` with shape and, if the parameter is dense without gaps, the memory order of `param`, so that optimizers get the
/// layout they expect.
fn view_like(part: &Tensor, param: &Tensor) -> Result<Tensor> {
    let (size, stride) = (param.size(), param.stride());
    let mut dims: Vec<(i64, i64)> =
        stride.iter().copied().zip(size.iter().copied()).filter(|(_, n)| *n != 1).collect();
    dims.sort_unstable();
    let mut expected = 1;
    let is_dense = dims.iter().all(|&(stride, n)| {
        let fits = stride == expected;
        expected *= n;
        fits
    });
    if is_dense { Ok(part.f_as_strided(&size, &stride, None)?) } else { Ok(part.f_view(size.as_slice())?) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn buckets_fill_in_order_and_hold_one_dtype() {
        let f32s = |sizes: &[usize]| sizes.iter().map(|&size| (Kind::Float, size)).collect::<Vec<_>>();
        let all = |n: usize| (0..n).rev().collect::<Vec<_>>();
        assert_eq!(assign(&f32s(&[8, 8, 8]), &all(3), 25 * MIB), [[2, 1, 0]]);
        // the first one is closed at 1 MiB
        assert_eq!(assign(&f32s(&[8, MIB, 8]), &all(3), 25 * MIB), [vec![2, 1], vec![0]]);
        assert_eq!(assign(&f32s(&[MIB, MIB, MIB, MIB]), &all(4), 2 * MIB), [vec![3], vec![2, 1], vec![0]]);
        let mixed = [(Kind::Float, 8), (Kind::Half, 4), (Kind::Float, 8)];
        assert_eq!(assign(&mixed, &[0, 1, 2], MIB), [vec![0, 2], vec![1]]);
        assert!(assign(&[], &[], MIB).is_empty());
    }

    #[test]
    fn views_have_the_layout_of_their_parameters() {
        let plain = Tensor::zeros([4, 3], (Kind::Float, tch::Device::Cpu));
        let transposed = Tensor::zeros([3, 5], (Kind::Float, tch::Device::Cpu)).transpose(0, 1);
        let bucket = Bucket::new(vec![1, 0], &[plain, transposed], &[]).unwrap();
        assert_eq!(bucket.flat.size(), [12 + 15]);
        assert_eq!((bucket.views[0].size(), bucket.views[0].stride()), (vec![5, 3], vec![1, 5]));
        assert_eq!((bucket.views[1].size(), bucket.views[1].stride()), (vec![4, 3], vec![3, 1]));
    }
}
