//! Collectives of serializable values.

use std::any::type_name;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use super::group::ProcessGroup;
use crate::error::{ConfigError, Error, Result};

const SHALLOW: &str = "give a value that is nested in at most 1,000 levels";
/// In the place of a length: the value of a rank cannot be sent.
const NONE: i64 = -1;

impl ProcessGroup {
    /// The value that rank `root` gives; others' arguments are not looked at. Values travel as MessagePack, which has one null: `Some(None)`
    /// arrives as `None`.
    ///
    /// # Errors
    /// On all ranks if the value cannot be written, or is not read back. [`DistributedError`](crate::error::DistributedError) if a
    /// rank is gone.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, value: &T, root: usize) -> Result<T> {
        const CALL: &str = "broadcast_object";
        let bytes = if self.rank() == root { to_bytes(CALL, value) } else { Ok(Vec::new()) };
        let len = Tensor::from(bytes.as_ref().map_or(NONE, |bytes| bytes.len() as i64));
        self.broadcast(&len, root)?;
        let bytes = bytes?;
        let len = len.f_int64_value(&[])?;
        if len == NONE {
            return Err(not_sent::<T>(CALL, root));
        }
        let data = if self.rank() == root {
            Tensor::f_from_slice(&bytes)?
        } else {
            Tensor::f_zeros([len], (Kind::Uint8, tch::Device::Cpu))?
        };
        self.broadcast(&data, root)?;
        from_bytes(CALL, root, &data)
    }

    /// The values that the ranks give, in their order.
    ///
    /// # Errors
    /// As [`ProcessGroup::broadcast_object`].
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        const CALL: &str = "all_gather_object";
        let bytes = to_bytes(CALL, value);
        let len = bytes.as_ref().map_or(NONE, |bytes| bytes.len() as i64);
        let lens = self.all_gather(&Tensor::from(len))?;
        let lens: Vec<i64> = Vec::try_from(&lens)?;
        let mut padded = bytes?;
        if let Some(rank) = lens.iter().position(|&len| len == NONE) {
            return Err(not_sent::<T>(CALL, rank));
        }
        let max = lens.iter().copied().max().unwrap_or(0);
        padded.resize(max as usize, 0);
        let all = self.all_gather(&Tensor::f_from_slice(&padded)?)?;
        let parts = lens.into_iter().enumerate();
        parts
            .map(|(rank, len)| from_bytes(CALL, rank, &all.f_get(rank as i64)?.f_narrow(0, 0, len)?))
            .collect()
    }

    /// What each rank gives, on rank `root` in the order of the ranks; nothing on the others.
    pub fn gather_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<Vec<u8>>> {
        self.check_peer("gather_bytes", root)?;
        let lens = self.all_gather(&Tensor::from(bytes.len() as i64))?;
        let lens: Vec<i64> = Vec::try_from(&lens)?;
        if self.rank() != root {
            if !bytes.is_empty() {
                self.send(&Tensor::f_from_slice(bytes)?, root)?;
            }
            return Ok(Vec::new());
        }
        let receive = |(rank, &len): (usize, &i64)| {
            if rank == root {
                return Ok(bytes.to_vec());
            }
            let data = Tensor::f_zeros([len], (Kind::Uint8, tch::Device::Cpu))?;
            if len > 0 {
                self.recv(&data, rank)?;
            }
            to_vec(&data)
        };
        lens.iter().enumerate().map(receive).collect()
    }
}

/// MessagePack, which has all numbers, also those that are not finite.
fn to_bytes<T: Serialize>(call: &str, value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|error| {
        let what = format!("the value of this rank, a {}, cannot be sent: {error}", type_name::<T>());
        let remedy = match error {
            rmp_serde::encode::Error::DepthLimitExceeded => SHALLOW,
            _ => "give a type that serde can write",
        };
        ConfigError::new(call, what, remedy).into()
    })
}

fn not_sent<T>(call: &str, rank: usize) -> Error {
    let what = format!("rank {rank} could not send its value, a {}", type_name::<T>());
    ConfigError::new(call, what, "look at the error of that rank").into()
}

fn to_vec(data: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0_u8; data.numel()];
    data.f_copy_data(&mut bytes, data.numel())?;
    Ok(bytes)
}

fn from_bytes<T: DeserializeOwned>(call: &str, rank: usize, data: &Tensor) -> Result<T> {
    rmp_serde::from_slice(&to_vec(data)?).map_err(|error| {
        let what = format!("the value of rank {rank} is not read as a {}: {error}", type_name::<T>());
        let remedy = match error {
            rmp_serde::decode::Error::DepthLimitExceeded => SHALLOW,
            _ => "give a value of the same type on all ranks",
        };
        ConfigError::new(call, what, remedy).into()
    })
}
