//! What a loader yields: tensors that travel together.

use std::collections::HashMap;

use tch::Tensor;

use crate::{Device, Result};

/// Tensors of some samples, stacked along dimension 0.
///
/// Implemented for [`Tensor`], pairs and triples of batches, `Vec` of batches and `HashMap<String, Tensor>`; a struct
/// of your own implements it by passing the calls on to its fields.
pub trait Batch: Send + Sized + 'static {
    /// Moves all tensors to `device`. A tensor that is there already is handed on without a copy.
    ///
    /// # Errors
    /// libtorch's error if the device is absent or out of memory.
    fn to_device(self, device: Device) -> Result<Self>;

    /// Number of samples: size of dimension 0 of the first tensor found; `None` if there is no tensor, or a scalar.
    fn batch_size(&self) -> Option<usize>;
}

impl Batch for Tensor {
    fn to_device(self, device: Device) -> Result<Self> {
        if Device::of(&self)? == device {
            return Ok(self);
        }
        Ok(self.f_to_device(device.tch())?)
    }

    fn batch_size(&self) -> Option<usize> {
        self.size().first().map(|&size| size as usize)
    }
}

impl<A: Batch, B: Batch> Batch for (A, B) {
    fn to_device(self, device: Device) -> Result<Self> {
        Ok((self.0.to_device(device)?, self.1.to_device(device)?))
    }

    fn batch_size(&self) -> Option<usize> {
        self.0.batch_size().or_else(|| self.1.batch_size())
    }
}

impl<A: Batch, B: Batch, C: Batch> Batch for (A, B, C) {
    fn to_device(self, device: Device) -> Result<Self> {
        Ok((self.0.to_device(device)?, self.1.to_device(device)?, self.2.to_device(device)?))
    }

    fn batch_size(&self) -> Option<usize> {
        self.0.batch_size().or_else(|| self.1.batch_size()).or_else(|| self.2.batch_size())
    }
}

impl<A: Batch> Batch for Vec<A> {
    fn to_device(self, device: Device) -> Result<Self> {
        self.into_iter().map(|part| part.to_device(device)).collect()
    }

    fn batch_size(&self) -> Option<usize> {
        self.iter().find_map(Batch::batch_size)
    }
}

impl Batch for HashMap<String, Tensor> {
    fn to_device(self, device: Device) -> Result<Self> {
        self.into_iter().map(|(name, tensor)| Ok((name, tensor.to_device(device)?))).collect()
    }

    /// The entry with the smallest key decides, so that the answer does not hang on the map's random order.
    fn batch_size(&self) -> Option<usize> {
        self.iter().min_by_key(|(name, _)| *name).and_then(|(_, tensor)| Batch::batch_size(tensor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

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
        let (moved, _) = (tensor, zeros(&[1])).to_device(Device::Cpu).unwrap();
        assert_eq!(moved.data_ptr(), pointer);
    }
}
