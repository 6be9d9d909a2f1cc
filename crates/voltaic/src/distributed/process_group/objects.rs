//! Values that serde knows, between ranks.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use super::group::ProcessGroup;
use crate::error::{Error, Result};

impl ProcessGroup {
    /// The value that rank `root` gives; others' arguments are not looked at.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, value: &T, root: usize) -> Result<T> {
        let bytes = if self.rank() == root { to_bytes(value)? } else { Vec::new() };
        let len = Tensor::from(bytes.len() as i64);
        self.broadcast(&len, root)?;
        let len = len.f_int64_value(&[])?;
        let data = if self.rank() == root {
            Tensor::f_from_slice(&bytes)?
        } else {
            Tensor::f_zeros([len], (Kind::Uint8, tch::Device::Cpu))?
        };
        self.broadcast(&data, root)?;
        from_bytes(&data)
    }

    /// The values that the ranks give, in their order.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = to_bytes(value)?;
        let lens = self.all_gather(&Tensor::from(bytes.len() as i64))?;
        let lens: Vec<i64> = Vec::try_from(&lens)?;
        let max = lens.iter().copied().max().unwrap_or(0);
        let mut padded = bytes;
        padded.resize(max as usize, 0);
        let all = self.all_gather(&Tensor::f_from_slice(&padded)?)?;
        let parts = lens.into_iter().enumerate();
        parts.map(|(rank, len)| from_bytes(&all.f_get(rank as i64)?.f_narrow(0, 0, len)?)).collect()
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

fn to_bytes<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::io("serialize", "a value for other ranks", error.into()))
}

fn to_vec(data: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0_u8; data.numel()];
    data.f_copy_data(&mut bytes, data.numel())?;
    Ok(bytes)
}

fn from_bytes<T: DeserializeOwned>(data: &Tensor) -> Result<T> {
    serde_json::from_slice(&to_vec(data)?)
        .map_err(|error| Error::io("read", "a value of another rank", error.into()))
}
