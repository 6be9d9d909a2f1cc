//! The secret of a job, and the seals that are made with it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Length of a seal.
pub const SEAL_BYTES: usize = 32;

/// The secret that all ranks of a job share. Its text is not kept, and `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret([u8; 32]);

impl JobSecret {
    /// The secret of a text, such as that of `VOLTAIC_JOB_SECRET`.
    pub fn of(text: &str) -> Self {
        Self(
            Sha256::new()
                .chain_update(b"voltaic job secret\0")
                .chain_update(text.as_bytes())
                .finalize()
                .into(),
        )
    }

    /// A random text that cannot be guessed.
    pub fn random_text() -> String {
        let bytes: [u8; 32] = rand::random();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// HMAC-SHA256 over parts, each with its length.
    pub fn seal(&self, parts: &[&[u8]]) -> [u8; SEAL_BYTES] {
        seal(&self.0, parts)
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(hidden)")
    }
}

fn seal(secret: &[u8; 32], parts: &[&[u8]]) -> [u8; SEAL_BYTES] {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else {
        return [0; SEAL_BYTES]; // HMAC takes keys of any length
    };
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// For the shim: the seal of a value under a key.
pub(super) extern "C" fn seal_for_store(
    secret: *const u8,
    key: *const u8,
    key_len: usize,
    value: *const u8,
    len: usize,
    seal_out: *mut u8,
) {
    // SAFETY: the shim gives 32 bytes of a secret that it has copied, `key_len` and `len` readable bytes (a pointer that is not
    // read where there are none), and room for a seal; all live for the call.
    unsafe {
        let bytes =
            |at: *const u8, len: usize| if len == 0 { &[][..] } else { std::slice::from_raw_parts(at, len) };
        let mut own = [0; 32];
        own.copy_from_slice(bytes(secret, 32));
        let seal = seal(&own, &[bytes(key, key_len), bytes(value, len)]);
        std::slice::from_raw_parts_mut(seal_out, SEAL_BYTES).copy_from_slice(&seal);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::ffi::{Listen, Store};

    #[test]
    fn a_seal_depends_on_the_secret_and_on_each_part() {
        let secret = JobSecret::of("a");
        let seal = secret.seal(&[b"key", b"value"]);
        assert_eq!(seal, JobSecret::of("a").seal(&[b"key", b"value"]));
        assert_ne!(seal, JobSecret::of("b").seal(&[b"key", b"value"]));
        assert_ne!(seal, secret.seal(&[b"keyv", b"alue"]));
        assert_ne!(JobSecret::random_text(), JobSecret::random_text());
        assert!(!format!("{secret:?}").contains('['), "{secret:?}");
    }

    #[test]
    fn a_seal_is_hmac_sha256() {
        // RFC 4231, test case 2, without the lengths that stand before parts
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        assert_eq!(mac.finalize().into_bytes()[..4], [0x5b, 0xdc, 0xc1, 0x46]);
    }

    #[test]
    fn a_sealed_store_believes_nobody_who_does_not_know_the_secret() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let second = Duration::from_secs(1);
        let (store, port) = Store::tcp("127.0.0.1", 0, Some(Listen::At(listener)), second).unwrap();
        let sealed = store.sealed(&JobSecret::of("a")).unwrap().with_prefix("job").unwrap();
        for value in [&b""[..], b"x", &[7; 100_000]] {
            sealed.set("key", value).unwrap();
            assert_eq!(sealed.get("key", second).unwrap(), value);
        }
        // a stranger reads, but what it writes, copies to another key or changes is refused
        let (stranger, _) = Store::tcp("127.0.0.1", port, None, second).unwrap();
        let with_seal = stranger.get("job/key", second).unwrap();
        let mut changed = with_seal.clone();
        *changed.last_mut().unwrap() ^= 1;
        let of_other = store.sealed(&JobSecret::of("b")).unwrap().with_prefix("job").unwrap();
        of_other.set("other", b"x").unwrap();
        for (key, value) in
            [("plain", &b"/evil.ckpt"[..]), ("short", b""), ("copied", &with_seal), ("key", &changed)]
        {
            stranger.set(&format!("job/{key}"), value).unwrap();
        }
        for key in ["plain", "short", "copied", "key", "other"] {
            let error = sealed.get(key, second).unwrap_err();
            assert!(error.message.contains("is not sealed with this job's secret"), "{key}: {error}");
        }
        assert_eq!((sealed.add("counter", 2).unwrap(), sealed.has("nothing").unwrap()), (2, false));
    }
}
