//! The batch sizes of a DeepSpeed file: `train_batch_size = train_micro_batch_size_per_gpu * accumulation * ranks`.

use crate::error::ConfigError;

/// The sizes that a file gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BatchSizes {
    /// Samples of one optimizer step, of all ranks together.
    pub train_batch_size: Option<u64>,
    /// Samples of one batch of a rank.
    pub train_micro_batch_size_per_gpu: Option<u64>,
}

/// The resolved sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    pub train_batch_size: u64,
    pub micro_batch_size: u64,
}

impl BatchSizes {
    /// Works out what is missing and checks the rule. `micro_of_loader` is the batch size of the loader, if it is known.
    pub fn resolve(
        self,
        accumulation: u64,
        ranks: u64,
        micro_of_loader: Option<u64>,
    ) -> Result<Batch, ConfigError> {
        let steps = accumulation.saturating_mul(ranks).max(1);
        let micro = match (self.train_batch_size, self.train_micro_batch_size_per_gpu) {
            (_, Some(micro)) => micro,
            (Some(batch), None) => micro_of_loader.unwrap_or(batch / steps),
            (None, None) => micro_of_loader.unwrap_or(1),
        };
        let product = micro.saturating_mul(steps);
        let batch = self.train_batch_size.unwrap_or(product);
        if batch == product && micro > 0 {
            return Ok(Batch { train_batch_size: batch, micro_batch_size: micro });
        }
        let what = format!(
            "train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} * accumulate_grad_batches \
             {accumulation} * ranks {ranks} = {product}"
        );
        let remedy = if micro == 0 {
            format!("set train_batch_size to a multiple of {steps}, or leave it out")
        } else {
            format!("set train_batch_size to {product}, or leave it out")
        };
        Err(ConfigError::new("train_batch_size", what, remedy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deepspeeds_golden_cases() {
        // tests/unit/runtime/test_ds_config_dict.py, on two ranks
        for (batch, micro, accumulation, fits) in
            [(32, 16, 1, true), (32, 8, 2, true), (33, 17, 2, false), (32, 18, 1, false)]
        {
            let sizes =
                BatchSizes { train_batch_size: Some(batch), train_micro_batch_size_per_gpu: Some(micro) };
            let found = sizes.resolve(accumulation, 2, None);
            assert_eq!(found.is_ok(), fits, "{batch} {micro} {accumulation}: {found:?}");
        }
        let sizes = BatchSizes { train_batch_size: Some(8), train_micro_batch_size_per_gpu: Some(2) };
        let error = sizes.resolve(2, 8, None).expect_err("8 is not 2 * 2 * 8").to_string();
        assert!(
            error.contains(
                "8 is not train_micro_batch_size_per_gpu 2 * accumulate_grad_batches 2 * ranks 8 = 32"
            ),
            "{error}"
        );
    }

    #[test]
    fn what_is_missing_is_worked_out() {
        let sizes =
            |batch, micro| BatchSizes { train_batch_size: batch, train_micro_batch_size_per_gpu: micro };
        let of = |sizes: BatchSizes, loader| {
            sizes.resolve(2, 4, loader).map(|batch| (batch.train_batch_size, batch.micro_batch_size))
        };
        assert_eq!(of(sizes(Some(16), None), None), Ok((16, 2)));
        assert_eq!(of(sizes(None, Some(3)), None), Ok((24, 3)));
        assert_eq!(of(sizes(None, None), Some(5)), Ok((40, 5)));
        assert_eq!(of(sizes(None, None), None), Ok((8, 1)));
        assert!(of(sizes(Some(17), None), None).is_err());
        assert!(of(sizes(Some(4), None), None).is_err(), "less than one sample for each rank");
    }
}
