//! How many threads one operator may use, for the calling thread only.

use std::sync::OnceLock;

/// Makes libtorch's operators use `num_threads` threads when they are called from this thread, and leaves every
/// other thread as it is. Returns whether that could be done.
///
/// `at::set_num_threads` cannot do this: besides the calling thread's OpenMP setting it writes the process-wide
/// default that threads take over at their first operator, which would slow down the autograd and trainer threads
/// started later. OpenMP's own setting belongs to the calling thread alone, so that is what is changed here, after
/// libtorch has done its once-per-thread initialisation (which would overwrite it).
pub fn set_thread_num_threads(num_threads: usize) -> bool {
    type OmpSetNumThreads = unsafe extern "C" fn(libc::c_int);
    static SET: OnceLock<Option<OmpSetNumThreads>> = OnceLock::new();
    let set = SET.get_or_init(|| {
        // SAFETY: the name is NUL-terminated; dlsym only looks the symbol up among the libraries that are loaded.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"omp_set_num_threads".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: the OpenMP specification fixes this function's C signature as void(int), and the library that
        // holds it (libgomp, a dependency of libtorch_cpu.so) is never unloaded.
        Some(unsafe { std::mem::transmute::<*mut libc::c_void, OmpSetNumThreads>(symbol) })
    });
    let Some(set) = set else { return false };
    tch::get_num_threads();
    // SAFETY: OpenMP allows the call from any thread outside a parallel region; it writes a setting of this thread.
    unsafe { set(num_threads.max(1) as libc::c_int) };
    true
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
}
