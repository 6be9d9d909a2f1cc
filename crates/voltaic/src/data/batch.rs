//! What a loader yields: tensors that travel together.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use crate::{Device, Result};

/// Tensors of some samples, stacked along dimension 0.
///
/// Implemented for [`Tensor`], pairs and triples of batches, `Vec` of batches and `HashMap<String, Tensor>`; a struct
/// of your own implements it by passing the calls on to its fields.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a batch",
    note = "a batch is a `Tensor`, a pair or triple of batches, a `Vec` of them, or a `HashMap<String, Tensor>`",
    note = "for a struct of tensors implement `Batch`, and pass the calls on to its fields"
)]
pub trait Batch: Send + Sized + 'static {
    /// Replaces each tensor by what `f` makes of it.
    ///
    /// # Errors
    /// The first error of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;

    /// Number of samples: size of dimension 0 of the first tensor found; `None` if there is no tensor, or a scalar.
    fn batch_size(&self) -> Option<usize>;

    /// Moves all tensors to `device`. A tensor that is there already is handed on without a copy.
    ///
    /// # Errors
    /// libtorch's error if the device is absent or out of memory.
    fn move_to(self, device: Device) -> Result<Self> {
        self.map_tensors(&mut |tensor| {
            Ok(if Device::of(&tensor)? == device { tensor } else { tensor.f_to_device(device.tch())? })
        })
    }

    /// Casts all floating-point tensors. A tensor that has the dtype already is handed on without a copy.
    ///
    /// # Errors
    /// libtorch's error if the device has not got the dtype, or is out of memory.
    fn to_dtype(self, dtype: Kind) -> Result<Self> {
        self.map_tensors(&mut |tensor| {
            let stays = !tensor.is_floating_point() || tensor.kind() == dtype;
            Ok(if stays { tensor } else { tensor.f_to_kind(dtype)? })
        })
    }
}

impl Batch for Tensor {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }

    fn batch_size(&self) -> Option<usize> {
        self.size().first().map(|&size| size as usize)
    }
}

impl<A: Batch, B: Batch> Batch for (A, B) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?))
    }

    fn batch_size(&self) -> Option<usize> {
        self.0.batch_size().or_else(|| self.1.batch_size())
    }
}

impl<A: Batch, B: Batch, C: Batch> Batch for (A, B, C) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?, self.2.map_tensors(f)?))
    }

    fn batch_size(&self) -> Option<usize> {
        self.0.batch_size().or_else(|| self.1.batch_size()).or_else(|| self.2.batch_size())
    }
}

impl<A: Batch> Batch for Vec<A> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(|part| part.map_tensors(f)).collect()
    }

    fn batch_size(&self) -> Option<usize> {
        self.iter().find_map(Batch::batch_size)
    }
}

impl Batch for HashMap<String, Tensor> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        // in the order of the keys, so that a tensor has the same turn in each batch
        let mut entries: Vec<(String, Tensor)> = self.into_iter().collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.into_iter().map(|(name, tensor)| Ok((name, f(tensor)?))).collect()
    }

    /// The entry with the smallest key decides, so that the answer does not hang on the map's random order.
    fn batch_size(&self) -> Option<usize> {
        self.iter().min_by_key(|(name, _)| *name).and_then(|(_, tensor)| Batch::batch_size(tensor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(size: &[i64]) -> Tensor {
        Tensor::zeros(size, (Kind::Float, tch::Device::Cpu))
    }

    #[test]
    fn size_is_that_of_the_first_tensor() {
        assert_eq!(Batch::batch_size(&zeros(&[4, 2])), Some(4));
        assert_eq!(Batch::batch_size(&zeros(&[])), None);
        assert_eq!((zeros(&[3]), zeros(&[5])).batch_size(), Some(3));
        assert_eq!((zeros(&[]), zeros(&[5]), zeros(&[6])).batch_size(), Some(5));
        assert_eq!(Vec::<Tensor>::new().batch_size(), None);
        let map = HashMap::from([("b".to_owned(), zeros(&[2])), ("a".to_owned(), zeros(&[7]))]);
        assert_eq!(map.batch_size(), Some(7));
    }

    #[test]
    fn a_tensor_already_there_is_not_copied() {
        let tensor = zeros(&[2, 2]);
        let pointer = tensor.data_ptr();
        let (moved, _) = (tensor, zeros(&[1])).move_to(Device::Cpu).unwrap();
        assert_eq!(moved.data_ptr(), pointer);
        let (cast, labels) = (moved, zeros(&[1]).to_kind(Kind::Int64)).to_dtype(Kind::Float).unwrap();
        assert_eq!((cast.data_ptr(), labels.kind()), (pointer, Kind::Int64));
        assert_eq!(cast.to_dtype(Kind::BFloat16).unwrap().kind(), Kind::BFloat16);
    }
}
