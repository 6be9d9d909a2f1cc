//! libtorch's threads: work for them, and how many of them one operator may use, for the calling thread only.
//!
//! `at::set_num_threads` cannot do this: besides the calling thread's OpenMP setting it writes the process-wide
//! default that threads take over at their first operator, which would slow down autograd and trainer threads started
//! later. OpenMP's own setting belongs to the calling thread alone, so that is what is changed here.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::backend::loaded_symbol;

/// Functions of the OpenMP library that libtorch has loaded.
#[derive(Clone, Copy)]
struct OpenMp {
    set_num_threads: unsafe extern "C" fn(c_int),
    num_threads: unsafe extern "C" fn() -> c_int,
    thread_num: unsafe extern "C" fn() -> c_int,
    in_parallel: unsafe extern "C" fn() -> c_int,
    parallel: unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint),
}

impl OpenMp {
    /// Those of the libraries that are loaded, if there is one with OpenMP.
    fn get() -> Option<Self> {
        static FOUND: OnceLock<Option<OpenMp>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            // SAFETY: the OpenMP specification, and for the last one GCC's and LLVM's common interface, fix the C
            // signatures of these functions; the library that holds them (libgomp, a dependency of libtorch_cpu.so) is
            // never unloaded.
            unsafe {
                use std::mem::transmute;
                Some(Self {
                    set_num_threads: transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(loaded_symbol(
                        c"omp_set_num_threads",
                    )?),
                    num_threads: transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(loaded_symbol(
                        c"omp_get_num_threads",
                    )?),
                    thread_num: transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(loaded_symbol(
                        c"omp_get_thread_num",
                    )?),
                    in_parallel: transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(loaded_symbol(
                        c"omp_in_parallel",
                    )?),
                    parallel: transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint),
                    >(loaded_symbol(c"GOMP_parallel")?),
                })
            }
        })
    }
}

/// Calls `body` for parts of `0..len` on libtorch's threads, and waits. With `grain` or fewer there is one part.
///
/// # Panics
/// If `body` does on one of the threads, with what the first of them panicked with, when all are done.
pub(super) fn parallel_for<F: Fn(Range<usize>) + Sync>(len: usize, grain: usize, body: F) {
    struct Call<'a, F> {
        openmp: OpenMp,
        len: usize,
        body: &'a F,
        /// What a thread panicked with, which must not unwind into OpenMP.
        panic: Mutex<Option<Box<dyn Any + Send>>>,
    }
    extern "C" fn run<F: Fn(Range<usize>) + Sync>(call: *mut c_void) {
        // SAFETY: `parallel_for` below passes a call of this type, which lives until all threads are done with it.
        let call = unsafe { &*call.cast::<Call<F>>() };
        // SAFETY: OpenMP allows these calls from any thread.
        let (thread, threads) =
            unsafe { ((call.openmp.thread_num)() as usize, (call.openmp.num_threads)() as usize) };
        let part = call.len.div_ceil(threads);
        let (first, last) = ((part * thread).min(call.len), (part * (thread + 1)).min(call.len));
        if first >= last {
            return;
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (call.body)(first..last))) {
            call.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
    let threads = (tch::get_num_threads().max(1) as usize).min(len.div_ceil(grain));
    match OpenMp::get() {
        // SAFETY: OpenMP allows the call from any thread.
        Some(openmp) if threads > 1 && unsafe { (openmp.in_parallel)() } == 0 => {
            let call = Call { openmp, len, body: &body, panic: Mutex::new(None) };
            let data = (&raw const call).cast_mut().cast();
            // SAFETY: the call outlives the parallel region, at whose end the function returns; its body may be
            // shared between threads.
            unsafe { (openmp.parallel)(run::<F>, data, threads as c_uint, 0) };
            if let Some(panic) = call.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
                resume_unwind(panic);
            }
        }
        _ => body(0..len),
    }
}

/// Makes libtorch's operators use `num_threads` threads when they are called from this thread, and leaves every
/// other thread as it is. Returns whether that could be done (not with a libtorch built without OpenMP).
pub fn set_thread_num_threads(num_threads: usize) -> bool {
    let Some(openmp) = OpenMp::get() else { return false };
    // libtorch sets a thread's number when the thread first asks for it, which would overwrite ours later on
    tch::get_num_threads();
    // SAFETY: OpenMP allows the call from any thread outside a parallel region; it writes a setting of this thread.
    unsafe { (openmp.set_num_threads)(num_threads.max(1) as c_int) };
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn each_number_is_in_one_part() {
        for (len, grain) in [(0, 1), (1, 1), (7, 1), (1000, 3), (10, 100)] {
            let counts: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
            parallel_for(len, grain, |part| {
                parallel_for(part.len(), 1, |inner| {
                    for i in inner {
                        counts[part.start + i].fetch_add(1, Ordering::Relaxed);
                    }
                });
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{len} by {grain}");
        }
    }

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
