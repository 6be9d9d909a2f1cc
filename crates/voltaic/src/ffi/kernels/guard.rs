//! The way back to C++ from a kernel: what panics, or finds no memory, becomes an error of the operator.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_char;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use voltaic_sys as sys;

use crate::ffi::activities::note_kernel;
use crate::ffi::check::panic_text;
use crate::kernels::OutOfMemory;

/// Why a kernel failed.
struct Failure {
    kind: i32,
    message: String,
}

thread_local! {
    /// Of the last kernel that failed.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Runs a kernel that computes all it is called for, and gives a `vt_kernel_status`. All that C++ calls goes through this, or
/// through [`guard`], since a panic that leaves an `extern "C"` function ends the process. A profile shows the kernel.
pub(super) fn guard_done(kernel: &'static str, run: impl FnOnce()) -> i32 {
    guard_some(kernel, || {
        run();
        true
    })
}

/// Runs a kernel that may leave a call to libtorch.
pub(super) fn guard_some(kernel: &'static str, run: impl FnOnce() -> bool) -> i32 {
    guard_noted(kernel, || run().then_some(()), |()| String::new())
}

/// Runs one of several kernels, which says which it was, or leaves the call to libtorch.
pub(super) fn guard_chosen<K: fmt::Debug>(kernel: &'static str, run: impl FnOnce() -> Option<K>) -> i32 {
    guard_noted(kernel, run, |chosen| format!(" ({chosen:?})"))
}

fn guard_noted<K>(
    kernel: &'static str,
    run: impl FnOnce() -> Option<K>,
    suffix: impl FnOnce(&K) -> String,
) -> i32 {
    guard(kernel, || match note_kernel(kernel, run, suffix) {
        Some(_) => sys::VT_KERNEL_DONE,
        None => sys::VT_KERNEL_DECLINED,
    })
}

/// Gives what `run` does, a question or a kernel; `VT_KERNEL_FAILED` if it panics, whose message is kept for [`failure`].
pub(super) fn guard(kernel: &'static str, run: impl FnOnce() -> i32) -> i32 {
    // what a kernel leaves half done is its output, which the operator then does not give, and scratch, which the next
    // kernel writes before it reads
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(status) => status,
        Err(payload) => {
            let failure = Failure::new(kernel, &*payload);
            FAILURE.with_borrow_mut(|last| *last = Some(failure));
            sys::VT_KERNEL_FAILED
        }
    }
}

impl Failure {
    fn new(kernel: &'static str, payload: &(dyn Any + Send)) -> Self {
        if let Some(OutOfMemory { bytes }) = payload.downcast_ref() {
            let message =
                format!("no memory for the {bytes} bytes that voltaic's kernel `{kernel}` works in");
            return Self { kind: sys::VT_ERROR_OUT_OF_MEMORY, message };
        }
        let text = panic_text(payload);
        let message = format!(
            "voltaic's kernel `{kernel}` panicked: {text}; set VOLTAIC_CPU_KERNELS=0 to use libtorch's kernels"
        );
        Self { kind: sys::VT_ERROR_OTHER, message }
    }
}

/// Copies the message of this thread's last failure to `text`, as many bytes as fit with a 0 behind them, and gives its kind.
pub(super) extern "C" fn failure(text: *mut c_char, len: usize) -> i32 {
    let Some(Failure { kind, message }) = FAILURE.with_borrow_mut(Option::take) else {
        return sys::VT_ERROR_OTHER;
    };
    let mut end = message.len().min(len.saturating_sub(1));
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let bytes = &message.as_bytes()[..end];
    if len > 0 {
        // SAFETY: the shim passes room for `len` bytes, which `bytes` and the 0 fit in.
        unsafe {
            text.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            text.add(bytes.len()).write(0);
        }
    }
    kind
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::process::Command;
    use std::{env, fs, path::Path};

    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::kernels::{parallel_for, sized};

    extern "C" fn gelu(_: i32, _: i32, _: *const c_void, _: *mut c_void, _: i64) -> i32 {
        guard_done("gelu", || panic!("on purpose"))
    }

    extern "C" fn add(_: i32, _: *const c_void, _: *const c_void, _: *mut c_void, len: i64) -> i32 {
        guard_done("add_bf16", || {
            parallel_for(len as usize, 1, |part| assert!(part.start == 0, "on another thread"));
        })
    }

    extern "C" fn relu_backward(_: *const c_void, _: *const c_void, _: *mut c_void, _: i64) -> i32 {
        guard_done("relu_backward_bf16", || panic!("in the backward pass"))
    }

    extern "C" fn convert(_: i32, _: *const c_void, _: *mut c_void, _: i64) -> i32 {
        guard_done("convert", || {
            sized(&mut Vec::<f32>::new(), usize::MAX / 16);
        })
    }

    const CHILD: &str = "VOLTAIC_TEST_FAILING_KERNELS";

    /// With such kernels in place of libtorch's, which so are in a process of their own.
    fn with_failing_kernels() {
        let table = sys::vt_kernels {
            failure: Some(failure),
            gelu: Some(gelu),
            add_bf16: Some(add),
            relu_backward_bf16: Some(relu_backward),
            convert: Some(convert),
            ..Default::default()
        };
        super::super::host::hand_in_host();
        // SAFETY: the functions read none of their arguments.
        crate::ffi::check::check("install_kernels", unsafe { sys::vt_install_kernels(&table) }).unwrap();
        tch::set_num_threads(2);
        let ones = |kind| Tensor::ones([1000], (kind, Device::Cpu));
        let (wide, narrow) = (ones(Kind::Float), ones(Kind::BFloat16));

        let message = wide.f_gelu("none").unwrap_err().to_string();
        assert!(message.contains("`gelu` panicked: on purpose; set VOLTAIC_CPU_KERNELS=0"), "{message}");
        let message = narrow.f_add(&narrow).unwrap_err().to_string();
        assert!(message.contains("`add_bf16` panicked: on another thread"), "{message}");
        let leaf = narrow.copy().set_requires_grad(true);
        let message = (leaf.relu() * &narrow).sum(Kind::BFloat16).f_backward().unwrap_err().to_string();
        assert!(message.contains("in the backward pass"), "{message}");
        let message = wide.f_to_kind(Kind::BFloat16).unwrap_err().to_string();
        assert!(message.contains("no memory for the") && message.contains("`convert`"), "{message}");
        // and operators that do not fail still run
        assert_eq!(wide.f_relu().unwrap(), wide);
        assert!(wide.f_gelu("none").is_err());
    }

    #[test]
    fn a_kernel_that_panics_is_an_error_of_its_operator() {
        if env::var_os(CHILD).is_some() {
            return with_failing_kernels();
        }
        let test = "ffi::kernels::guard::tests::a_kernel_that_panics_is_an_error_of_its_operator";
        let mut command = Command::new(env::current_exe().unwrap());
        let output = command.args([test, "--exact"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    fn a_long_message_is_cut_to_whole_characters() {
        assert_eq!(guard_done("test", || panic!("ä on purpose")), sys::VT_KERNEL_FAILED);
        let mut text = [1_u8; 31];
        assert_eq!(failure(text.as_mut_ptr().cast(), text.len()), sys::VT_ERROR_OTHER);
        assert_eq!(text.split(|byte| *byte == 0).next(), Some(b"voltaic's kernel `test` panick".as_slice()));
        let mut byte = [1_u8];
        assert_eq!(guard_done("test", || panic!()), sys::VT_KERNEL_FAILED);
        failure(byte.as_mut_ptr().cast(), 1);
        assert_eq!(byte, [0]);
    }

    /// No function that C++ calls may unwind.
    #[test]
    fn all_entries_of_kernels_are_guarded() {
        fn visit(folder: &Path, entries: &mut usize) {
            for item in fs::read_dir(folder).unwrap() {
                let path = item.unwrap().path();
                if path.is_dir() {
                    visit(&path, entries);
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]").next().unwrap_or_default();
                for entry in
                    text.split("extern \"C\" fn ").skip(1).filter(|entry| !entry.starts_with("failure("))
                {
                    let body = entry.split_once("{\n").map(|(_, body)| body).unwrap_or_default();
                    let first = body.lines().map(str::trim).find(|line| !line.starts_with("//"));
                    let is_guarded = first.is_some_and(|line| line.starts_with("guard"));
                    assert!(is_guarded, "{}: {}", path.display(), entry.lines().next().unwrap());
                    *entries += 1;
                }
            }
        }
        let mut entries = 0;
        visit(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ffi/kernels"), &mut entries);
        assert_eq!(entries, 29);
    }
}
