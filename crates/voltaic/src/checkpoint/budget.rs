//! How much may be made of a file: a few bytes can ask for all memory there is.

use voltaic_macros::Defaults;

/// Whatever is made of a small file may be this large.
const FLOOR: u64 = 64 << 20;

/// How much memory the contents of an untrusted file may take.
#[derive(Defaults, Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadLimits {
    /// All values and tensors together may take 64 MiB, and so many times the size of the file (16).
    #[default(16)]
    pub max_growth: u64,
}

/// Bytes that may still be made of a file.
#[derive(Debug)]
pub(super) struct Budget {
    left: u64,
    file_size: u64,
    limits: ReadLimits,
}

impl Budget {
    /// For a file of so many bytes.
    pub fn new(file_size: u64, limits: ReadLimits) -> Self {
        let left = file_size.saturating_mul(limits.max_growth).saturating_add(FLOOR);
        Self { left, file_size, limits }
    }

    /// Takes bytes that are about to be used.
    ///
    /// # Errors
    /// If that is too much; names the size of the file and the limit.
    pub fn take(&mut self, bytes: usize) -> Result<(), String> {
        self.left = self.left.checked_sub(bytes as u64).ok_or_else(|| {
            let Self { file_size, limits, .. } = self;
            format!(
                "its {file_size} bytes make more than 64 MiB and {} times its size, which is max_growth",
                limits.max_growth
            )
        })?;
        Ok(())
    }

    /// Takes what the values of a JSON text will use, at least.
    ///
    /// # Errors
    /// As [`Budget::take`].
    pub fn take_json(&mut self, text: &str) -> Result<(), String> {
        let values = text.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() + 1;
        self.take(values * size_of::<serde_json::Value>())
    }
}
