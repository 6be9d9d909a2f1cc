//! Threads for the kernels: those of the OpenMP library that the process has loaded, as libtorch's operators use them. Without
//! one, all is done on the calling thread.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::host::{host, loaded_symbol};

/// Numbers that are worth a thread, as for libtorch.
pub(crate) const GRAIN: usize = 32_768;

/// How many threads this thread may use.
pub(crate) fn num_threads() -> usize {
    (host().num_threads)().max(1)
}

/// How many of them have something to do with `len`, of which `grain` is worth a thread.
pub(crate) fn threads_for(len: usize, grain: usize) -> usize {
    num_threads().min(len.div_ceil(grain))
}

/// Functions of the OpenMP library that the process has loaded.
#[derive(Clone, Copy)]
struct OpenMp {
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

/// Calls `body` for parts of `0..len` on OpenMP's threads, and waits. With `grain` or fewer there is one part.
///
/// # Panics
/// If `body` does on one of the threads, with what the first of them panicked with, when all are done.
pub fn parallel_for<F: Fn(Range<usize>) + Sync>(len: usize, grain: usize, body: F) {
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
    let threads = threads_for(len, grain);
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
}
