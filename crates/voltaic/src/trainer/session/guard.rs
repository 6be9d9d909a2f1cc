//! Runs the user's code so that a panic on its way becomes an error with the place it came from.
//!
//! tch's operators panic when shapes do not fit. Inside a guarded call such a panic is not printed; its message and
//! place become the error.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::ffi::panic_text;
use crate::nn::GatherWatch;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Chains a panic hook that keeps quiet inside guarded calls of its thread and notes what happened.
fn install_panic_hook() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                return previous(info);
            }
            let text = panic_text(info.payload());
            // tch prints its error's Debug form, with libtorch's stack behind it
            let text = text.split("\\nException raised from").next().unwrap_or(&text);
            let place = info.location().map(|place| format!(" at {}:{}", place.file(), place.line()));
            MESSAGE.set(Some(format!("{text}{}", place.unwrap_or_default())));
        }));
    });
}

/// Calls `body`; a panic becomes an error, and so does a weight that could not be gathered.
pub(crate) fn guarded<T>(body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let watch = GatherWatch::begin();
    let result = without_panic(body);
    watch.end().map_or(result, |failure| Err(failure.into()))
}

/// Calls `body`; a panic becomes an error.
pub(crate) fn without_panic<T>(body: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    install_panic_hook();
    let was_guarded = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    GUARDED.set(was_guarded);
    result.unwrap_or_else(|_| {
        let message = MESSAGE.take().unwrap_or_else(|| "panic without a message".to_owned());
        Err(anyhow::anyhow!("panicked: {message}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_message_and_place() {
        let error = guarded(|| -> anyhow::Result<()> {
            let a = tch::Tensor::ones([2, 3], (tch::Kind::Float, tch::Device::Cpu));
            let _ = a.matmul(&a);
            Ok(())
        })
        .expect_err("shapes do not fit")
        .to_string();
        assert!(error.contains("mat1 and mat2 shapes cannot be multiplied"), "{error}");
        assert!(error.contains(".rs:") && !error.contains("Exception raised from"), "{error}");
        assert_eq!(guarded(|| Ok(3)).expect("no panic"), 3);
    }
}
