//! Weights and batches drawn as `peers/torch_peers.py` draws them, so that both train the same network on the same
//! data: libtorch's generator is the same in both.

use tch::{Device, Kind, Tensor};
use voltaic::data::{DataLoader, Dataset, StdRng};
use voltaic::ffi::{self, SharedTensor};
use voltaic::nn::{Parameter, init};

/// Batches that take turns.
const NUM_BATCHES: usize = 8;
const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const I64: (Kind, Device) = (Kind::Int64, Device::Cpu);

/// Draws the matrices and kernels in the order of their names, with variance 1 / fan_in; biases become 0. Weights of
/// norms stay what they are, 1.
pub fn set_weights(parameters: &[(String, Parameter)]) -> anyhow::Result<()> {
    let mut parameters: Vec<_> = parameters.iter().collect();
    parameters.sort_by_key(|(name, _)| name.as_str());
    ffi::manual_seed(1)?;
    for (name, parameter) in parameters {
        if parameter.dim() > 1 {
            let fan_in = parameter.numel() as f64 / parameter.size()[0] as f64;
            init::normal_(parameter, 0.0, fan_in.powf(-0.5))?;
        } else if name.ends_with("bias") {
            init::zeros_(parameter)?;
        }
    }
    Ok(())
}

/// Batches of one workload, drawn again in each process.
pub struct Batches {
    draw: Box<dyn Fn() -> Result<(Tensor, Tensor), tch::TchError>>,
}

impl Batches {
    /// Square images with values from 0 to 1, and labels of ten classes.
    pub fn images(batch_size: i64, channels: i64, side: i64) -> Self {
        Self {
            draw: Box::new(move || {
                let images = Tensor::f_rand([batch_size, channels, side, side], F32)?;
                Ok((images, Tensor::f_randint(10, [batch_size], I64)?))
            }),
        }
    }

    /// Random tokens, and the ones that follow them.
    pub fn tokens(batch_size: i64, time: i64, vocab_size: i64) -> Self {
        Self {
            draw: Box::new(move || {
                let text = Tensor::f_randint(vocab_size, [batch_size, time + 1], I64)?;
                let part = |start| text.f_narrow(1, start, time)?.f_contiguous();
                Ok((part(0)?, part(1)?))
            }),
        }
    }

    /// A loader of `num_steps` batches that are ready: handing one out costs what the loader itself costs.
    pub fn loader(self, num_steps: usize) -> anyhow::Result<DataLoader<(Tensor, Tensor)>> {
        ffi::manual_seed(2)?;
        let batches = (0..NUM_BATCHES)
            .map(|_| (self.draw)().map(|(x, y)| (SharedTensor::new(&x), SharedTensor::new(&y))))
            .collect::<Result<_, _>>()?;
        Ok(DataLoader::new(Ready { batches, num_steps }).unbatched().build()?)
    }
}

struct Ready {
    batches: Vec<(SharedTensor, SharedTensor)>,
    num_steps: usize,
}

impl Dataset for Ready {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.num_steps
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> anyhow::Result<Self::Batch> {
        let (inputs, targets) = &self.batches[indices[0] % NUM_BATCHES];
        Ok((inputs.get().shallow_clone(), targets.get().shallow_clone()))
    }
}
