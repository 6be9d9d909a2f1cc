//! How many of libtorch's threads one operator may use, for the calling thread only.
//!
//! `at::set_num_threads` cannot do this: besides the calling thread's OpenMP setting it writes the process-wide
//! default that threads take over at their first operator, which would slow down autograd and trainer threads started
//! later. OpenMP's own setting belongs to the calling thread alone, so that is what is changed here.

use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::OnceLock;

use crate::kernels::loaded_symbol;

/// OpenMP's function that sets how many threads the calling thread's operators use, in the library that libtorch has loaded.
fn omp_set_num_threads() -> Option<unsafe extern "C" fn(c_int)> {
    static FOUND: OnceLock<Option<unsafe extern "C" fn(c_int)>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let symbol = loaded_symbol(c"omp_set_num_threads")?;
        // SAFETY: the OpenMP specification fixes the C signature; the library that holds it (libgomp, a dependency of
        // libtorch_cpu.so) is never unloaded.
        Some(unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(symbol) })
    })
}

/// Makes libtorch's operators use `num_threads` threads when they are called from this thread, and leaves every
/// other thread as it is. Returns whether that could be done (not with a libtorch built without OpenMP).
pub fn set_thread_num_threads(num_threads: usize) -> bool {
    let Some(set) = omp_set_num_threads() else { return false };
    // libtorch sets a thread's number when the thread first asks for it, which would overwrite ours later on
    tch::get_num_threads();
    // SAFETY: OpenMP allows the call from any thread outside a parallel region; it writes a setting of this thread.
    unsafe { set(num_threads.max(1) as c_int) };
    true
}

/// Runs `f` with one thread per operator, for work so small that waking a second thread costs more than it saves.
pub fn with_one_thread<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_thread_num_threads(self.0);
        }
    }
    let before = tch::get_num_threads().max(1) as usize;
    let _restore = (before > 1).then(|| {
        set_thread_num_threads(1);
        Restore(before)
    });
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_calling_thread_alone() {
        let before = tch::get_num_threads();
        let inside = std::thread::spawn(|| {
            assert!(set_thread_num_threads(1));
            tch::get_num_threads()
        })
        .join()
        .unwrap();
        assert_eq!(inside, 1);
        assert_eq!(tch::get_num_threads(), before);
        assert_eq!(std::thread::spawn(tch::get_num_threads).join().unwrap(), before);
    }

    #[test]
    fn the_number_comes_back_even_after_a_panic() {
        std::thread::spawn(|| {
            set_thread_num_threads(3);
            assert_eq!(with_one_thread(tch::get_num_threads), 1);
            assert_eq!(tch::get_num_threads(), 3);
            let _ = std::panic::catch_unwind(|| with_one_thread(|| panic!("on purpose")));
            assert_eq!(tch::get_num_threads(), 3);
        })
        .join()
        .unwrap();
    }
}
