//! Stores and process groups of libtorch's c10d, and the buckets that gradients are averaged in.

use std::ffi::{CString, c_void};
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::{TorchError, TorchErrorKind};
use crate::ffi::check::{check, pointers};
use crate::ffi::graph::frozen::note_writes;
use crate::ffi::ranks::seal::{JobSecret, seal_for_store};
use crate::ffi::tensor::rng::take;

fn c_string(op: &'static str, text: &str) -> Result<CString, TorchError> {
    CString::new(text).map_err(|_| TorchError::new(op, TorchErrorKind::Other, "a text holds a NUL byte"))
}

pub(in crate::ffi) fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX)
}

/// While one lives, c10d writes nothing to standard error: an error says what there is to say, and c10d would put the
/// frames of its stack before it. With debug lines of voltaic on, or with `TORCH_CPP_LOG_LEVEL` set, it writes.
struct Quiet(());

/// How many there are, and libtorch's level from before the first.
static QUIET: Mutex<(usize, i32)> = Mutex::new((0, 0));
/// Above all of c10's levels but the one that ends the process.
const FATAL: i32 = 3;

impl Quiet {
    fn enter() -> Option<Self> {
        if tracing::enabled!(tracing::Level::DEBUG) || std::env::var_os("TORCH_CPP_LOG_LEVEL").is_some() {
            return None;
        }
        let mut quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
        if quiet.0 == 0 {
            // SAFETY: an int of libc10 that lives as long as the process, and that c10 itself reads and writes without
            // more ado; the lock keeps other threads of ours away.
            quiet.1 = unsafe { (&raw mut sys::FLAGS_caffe2_log_level).replace(FATAL) };
        }
        quiet.0 += 1;
        Some(Self(()))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let mut quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
        quiet.0 -= 1;
        if quiet.0 == 0 {
            // SAFETY: as above.
            unsafe { (&raw mut sys::FLAGS_caffe2_log_level).write(quiet.1) };
        }
    }
}

/// Where the server of a store listens.
#[derive(Debug)]
pub enum Listen {
    /// On a socket that listens already.
    At(TcpListener),
    /// On all addresses of this host.
    Everywhere,
}

/// Requests of this process's stores.
#[cfg(test)]
static REQUESTS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// How many requests the stores of this process have made.
#[cfg(test)]
pub fn store_requests() -> u64 {
    REQUESTS.load(std::sync::atomic::Ordering::Relaxed)
}

/// Counts requests, which tests measure.
fn count_requests(_number: u64) {
    #[cfg(test)]
    REQUESTS.fetch_add(_number, std::sync::atomic::Ordering::Relaxed);
}

/// Keys and values that all ranks of a run see: a client of a TCP server, or the server itself.
#[derive(Debug)]
pub struct Store(*mut sys::vt_store);

// SAFETY: c10d's TCPStore and PrefixStore have no thread affinity, and TCPStore takes a lock around each request.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    /// Connects to the server at `host:port`, which is started first if `server` says where it listens. Returns the store
    /// and the server's port.
    ///
    /// Never returns if what answers is not a store: call it with a limit.
    ///
    /// # Errors
    /// libtorch's, if there is no server within `timeout`, or the port is taken.
    pub fn tcp(
        host: &str,
        port: u16,
        server: Option<Listen>,
        timeout: Duration,
    ) -> Result<(Self, u16), TorchError> {
        const OP: &str = "TCPStore";
        let host = c_string(OP, host)?;
        let is_server = server.is_some();
        let (port, listener) = match server {
            Some(Listen::At(listener)) => {
                let address = listener
                    .local_addr()
                    .map_err(|e| TorchError::new(OP, TorchErrorKind::Other, &e.to_string()))?;
                (address.port(), listener.into_raw_fd())
            }
            Some(Listen::Everywhere) | None => (port, -1),
        };
        let _quiet = Quiet::enter();
        let (mut store, mut actual_port) = (ptr::null_mut(), 0);
        // SAFETY: the text and the out-pointers are valid for the call.
        check(OP, unsafe {
            sys::vt_store_tcp(
                host.as_ptr(),
                port,
                is_server.into(),
                listener,
                millis(timeout),
                &mut store,
                &mut actual_port,
            )
        })?;
        Ok((Self(store), actual_port))
    }

    /// The same store with sealed values: a seal can only be made with the secret, and values without a valid one are rejected.
    /// Counters, and whether a key exists, are not sealed.
    ///
    /// # Errors
    /// libtorch's.
    pub fn sealed(&self, secret: &JobSecret) -> Result<Self, TorchError> {
        let mut store = ptr::null_mut();
        // SAFETY: self's pointer is valid while self lives; the secret is copied; the function lives as long as the process, has
        // the shim's type and may be called from any thread; the new store shares ownership of what is below it.
        check("SealedStore", unsafe {
            sys::vt_store_sealed(self.0, secret.bytes().as_ptr(), seal_for_store, &mut store)
        })?;
        Ok(Self(store))
    }

    /// The same store, with `prefix` before each key.
    ///
    /// # Errors
    /// If `prefix` holds a NUL byte.
    pub fn with_prefix(&self, prefix: &str) -> Result<Self, TorchError> {
        const OP: &str = "PrefixStore";
        let prefix = c_string(OP, prefix)?;
        let mut store = ptr::null_mut();
        // SAFETY: self's pointer is valid while self lives; the new store shares ownership of what is below it.
        check(OP, unsafe { sys::vt_store_with_prefix(self.0, prefix.as_ptr(), &mut store) })?;
        Ok(Self(store))
    }

    /// Sets a key.
    ///
    /// # Errors
    /// libtorch's, if the server is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), TorchError> {
        const OP: &str = "store set";
        count_requests(1);
        let _quiet = Quiet::enter();
        let key = c_string(OP, key)?;
        // SAFETY: key and value are borrowed for the call.
        check(OP, unsafe { sys::vt_store_set(self.0, key.as_ptr(), value.as_ptr(), value.len()) })
    }

    /// Waits for a key and returns its value.
    ///
    /// # Errors
    /// libtorch's, if the key is not there within `timeout` or the server is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, TorchError> {
        const OP: &str = "store get";
        count_requests(2);
        extern "C" fn receive(data: *mut c_void, value: *const u8, len: usize) {
            // SAFETY: data is the vector below, to which there is no other reference during the call; the shim gives `len`
            // readable bytes, or a pointer that is not read if there are none.
            unsafe {
                if len > 0 {
                    (*data.cast::<Vec<u8>>()).extend_from_slice(std::slice::from_raw_parts(value, len));
                }
            }
        }
        let _quiet = Quiet::enter();
        let key = c_string(OP, key)?;
        let mut value: Vec<u8> = Vec::new();
        // SAFETY: `receive` is called during the call only, with the pointer to `value`.
        check(OP, unsafe {
            sys::vt_store_get(self.0, key.as_ptr(), millis(timeout), receive, (&raw mut value).cast())
        })?;
        Ok(value)
    }

    /// Waits on the server for a key; `None` if it is not set within `timeout`. One request, however long it takes; other requests
    /// of this process to the same server wait meanwhile.
    ///
    /// # Errors
    /// libtorch's, if the server is gone, or the value is not sealed as it should be.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, TorchError> {
        match self.get(key, timeout) {
            Ok(value) => Ok(Some(value)),
            Err(_) if !self.has(key)? => Ok(None),
            Err(_) => self.get(key, timeout).map(Some),
        }
    }

    /// Adds to a counter, 0 at first; returns the sum.
    ///
    /// # Errors
    /// libtorch's, if the server is gone.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, TorchError> {
        const OP: &str = "store add";
        count_requests(1);
        let _quiet = Quiet::enter();
        let key = c_string(OP, key)?;
        let mut sum = 0;
        // SAFETY: the out-pointer is a valid i64 on this stack.
        check(OP, unsafe { sys::vt_store_add(self.0, key.as_ptr(), amount, &mut sum) })?;
        Ok(sum)
    }

    /// Whether a key is set.
    ///
    /// # Errors
    /// libtorch's, if the server is gone.
    pub fn has(&self, key: &str) -> Result<bool, TorchError> {
        const OP: &str = "store check";
        count_requests(1);
        let _quiet = Quiet::enter();
        let key = c_string(OP, key)?;
        let mut has = 0;
        // SAFETY: the out-pointer is a valid i32 on this stack.
        check(OP, unsafe { sys::vt_store_has(self.0, key.as_ptr(), &mut has) })?;
        Ok(has != 0)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once, here.
        unsafe { sys::vt_store_free(self.0) }
    }
}

/// Where Gloo listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GlooInterface {
    /// A network interface by name, such as `eth0`.
    Name(String),
    /// The interface that has this address.
    Address(String),
}

/// How values of the ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their mean.
    Avg,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// Their product.
    Product,
}

impl ReduceOp {
    fn number(self) -> i32 {
        match self {
            Self::Sum => sys::VT_REDUCE_SUM,
            Self::Avg => sys::VT_REDUCE_AVG,
            Self::Min => sys::VT_REDUCE_MIN,
            Self::Max => sys::VT_REDUCE_MAX,
            Self::Product => sys::VT_REDUCE_PRODUCT,
        }
    }
}

/// A back end of c10d: ranks that are connected. All ranks call the same operations in the same order.
#[derive(Debug)]
pub struct Backend {
    group: *mut sys::vt_group,
    /// How many ranks there are.
    size: usize,
}

// SAFETY: c10d's back ends have no thread affinity. Not Sync: operations must be started by one thread at a time.
unsafe impl Send for Backend {}

type Start = unsafe extern "C" fn(
    *const sys::vt_group,
    sys::vt_tensor,
    i32,
    *mut *mut sys::vt_work,
) -> *mut sys::vt_error;

impl Backend {
    /// Gloo. Returns when all ranks are connected.
    ///
    /// # Errors
    /// libtorch's, if they are not within `timeout`, or `interface` is not there.
    pub fn gloo(
        store: &Store,
        rank: usize,
        size: usize,
        timeout: Duration,
        interface: &GlooInterface,
    ) -> Result<Self, TorchError> {
        const OP: &str = "ProcessGroupGloo";
        let (name, address) = match interface {
            GlooInterface::Name(name) => (Some(c_string(OP, name)?), None),
            GlooInterface::Address(address) => (None, Some(c_string(OP, address)?)),
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let mut group = ptr::null_mut();
        // SAFETY: the texts live to the end of this function; the group shares ownership of the store.
        check(OP, unsafe {
            sys::vt_group_gloo(
                store.0,
                rank as i32,
                size as i32,
                millis(timeout),
                pointer(&name),
                pointer(&address),
                &mut group,
            )
        })?;
        Ok(Self { group, size })
    }

    /// Takes ownership of a group that a shim function has just made.
    pub(in crate::ffi) fn from_raw(group: *mut sys::vt_group, size: usize) -> Self {
        Self { group, size }
    }

    /// Changes how long operations wait for other ranks.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), TorchError> {
        // SAFETY: the group is alive.
        check("set_timeout", unsafe { sys::vt_group_set_timeout(self.group, millis(timeout)) })
    }

    /// Starts one of the operations on a tensor and a number.
    fn start(&self, op: &'static str, f: Start, tensor: &Tensor, number: i32) -> Result<Work, TorchError> {
        let mut work = ptr::null_mut();
        // SAFETY: the tensor is borrowed for the call, and the work shares ownership of it afterwards.
        check(op, unsafe { f(self.group, tensor.as_ptr().cast_mut(), number, &mut work) })?;
        Ok(Work { work, op })
    }

    /// Replaces each rank's `tensor`, contiguous, by the reduction of all.
    ///
    /// # Errors
    /// libtorch's.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work, TorchError> {
        self.start("all_reduce", sys::vt_group_all_reduce, tensor, op.number())
    }

    /// Replaces each rank's `tensor`, contiguous, by that of rank `root`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work, TorchError> {
        self.start("broadcast", sys::vt_group_broadcast, tensor, root as i32)
    }

    /// Sends a contiguous tensor to rank `peer`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn send(&self, tensor: &Tensor, peer: usize) -> Result<Work, TorchError> {
        self.start("send", sys::vt_group_send, tensor, peer as i32)
    }

    /// Fills a contiguous tensor with what rank `peer` sends.
    ///
    /// # Errors
    /// libtorch's.
    pub fn recv(&self, tensor: &Tensor, peer: usize) -> Result<Work, TorchError> {
        self.start("recv", sys::vt_group_recv, tensor, peer as i32)
    }

    /// Fills `output` with the `input` of rank 0, 1, ...; both contiguous, `output` as large as all inputs.
    ///
    /// # Errors
    /// libtorch's.
    pub fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Work, TorchError> {
        let (input, output) = (input.as_ptr().cast_mut(), output.as_ptr().cast_mut());
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`.
        check("all_gather", unsafe { sys::vt_group_all_gather(self.group, input, output, &mut work) })?;
        Ok(Work { work, op: "all_gather" })
    }

    /// Reduces the `input`s, each as large as all outputs, and leaves rank r's part in its `output`; both contiguous.
    ///
    /// # Errors
    /// libtorch's.
    pub fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<Work, TorchError> {
        let (input, output) = (input.as_ptr().cast_mut(), output.as_ptr().cast_mut());
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`.
        let error =
            unsafe { sys::vt_group_reduce_scatter(self.group, input, output, op.number(), &mut work) };
        check("reduce_scatter", error)?;
        Ok(Work { work, op: "reduce_scatter" })
    }

    /// Leaves the reduction of all ranks' `tensor`, contiguous, in that of rank `root`; the others' hold anything then.
    ///
    /// # Errors
    /// libtorch's.
    pub fn reduce(&self, tensor: &Tensor, root: usize, op: ReduceOp) -> Result<Work, TorchError> {
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`.
        check("reduce", unsafe {
            sys::vt_group_reduce(self.group, tensor.as_ptr().cast_mut(), root as i32, op.number(), &mut work)
        })?;
        Ok(Work { work, op: "reduce" })
    }

    /// Stacks the inputs of all ranks in rank `root`'s `output`; others' `output` is not looked at. All contiguous.
    ///
    /// # Errors
    /// libtorch's.
    pub fn gather(&self, input: &Tensor, output: &Tensor, root: usize) -> Result<Work, TorchError> {
        let (input, output) = (input.as_ptr().cast_mut(), output.as_ptr().cast_mut());
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`.
        check("gather", unsafe { sys::vt_group_gather(self.group, input, output, root as i32, &mut work) })?;
        Ok(Work { work, op: "gather" })
    }

    /// Fills each rank's `output` with its part of rank `root`'s `input`; others' `input` is not looked at. All contiguous.
    ///
    /// # Errors
    /// libtorch's.
    pub fn scatter(&self, input: &Tensor, output: &Tensor, root: usize) -> Result<Work, TorchError> {
        let (input, output) = (input.as_ptr().cast_mut(), output.as_ptr().cast_mut());
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`.
        check("scatter", unsafe {
            sys::vt_group_scatter(self.group, input, output, root as i32, &mut work)
        })?;
        Ok(Work { work, op: "scatter" })
    }

    /// Sends each rank its rows of `input`, and takes from each its rows of `output`. The splits say how many, for each
    /// of the ranks of the group, and add up to the rows.
    ///
    /// # Errors
    /// libtorch's.
    pub fn all_to_all(
        &self,
        input: &Tensor,
        input_splits: &[i64],
        output: &Tensor,
        output_splits: &[i64],
    ) -> Result<Work, TorchError> {
        const OP: &str = "all_to_all";
        if [input_splits, output_splits].iter().any(|splits| splits.len() != self.size) {
            let what = format!("as many splits as ranks are needed, which are {}", self.size);
            return Err(TorchError::new(OP, TorchErrorKind::Other, &what));
        }
        let (input, output) = (input.as_ptr().cast_mut(), output.as_ptr().cast_mut());
        let mut work = ptr::null_mut();
        // SAFETY: as in `start`; there is a split for each rank of the group.
        check(OP, unsafe {
            sys::vt_group_all_to_all(
                self.group,
                input,
                input_splits.as_ptr(),
                output,
                output_splits.as_ptr(),
                &mut work,
            )
        })?;
        Ok(Work { work, op: OP })
    }

    /// Is done when all ranks have started it.
    ///
    /// # Errors
    /// libtorch's.
    pub fn barrier(&self) -> Result<Work, TorchError> {
        let mut work = ptr::null_mut();
        // SAFETY: the out-pointer is valid for the call.
        check("barrier", unsafe { sys::vt_group_barrier(self.group, &mut work) })?;
        Ok(Work { work, op: "barrier" })
    }

    /// The sum over the ranks as a new tensor, which autograd follows: its gradient is the sum over the ranks of theirs.
    ///
    /// # Errors
    /// libtorch's.
    pub fn differentiable_sum(&self, input: &Tensor) -> Result<Tensor, TorchError> {
        let mut output = ptr::null_mut();
        // SAFETY: the tensor is borrowed for the call; the graph node shares ownership of the back end.
        check("all_reduce", unsafe {
            sys::vt_group_all_reduce_sum_function(self.group, input.as_ptr().cast_mut(), &mut output)
        })?;
        Ok(take(output))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once, here; works under way share ownership of what they need.
        unsafe { sys::vt_group_free(self.group) }
    }
}

/// An operation in progress, whose tensors must be left alone until [`Work::wait`] returns. Dropping it waits, too.
#[derive(Debug)]
pub struct Work {
    work: *mut sys::vt_work,
    op: &'static str,
}

// SAFETY: c10d's Work is waited for under its own lock, from any thread.
unsafe impl Send for Work {}

impl Work {
    /// Waits until it is done.
    ///
    /// # Errors
    /// libtorch's, if a rank is gone or does not come within the time-out.
    pub fn wait(self) -> Result<(), TorchError> {
        // SAFETY: the pointer is valid until drop.
        let done = check(self.op, unsafe { sys::vt_work_wait(self.work) });
        note_writes();
        done
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once, here.
        unsafe { sys::vt_work_free(self.work) }
    }
}

/// Writes each parameter's gradient times `scale` into its view; zeros where there is none.
///
/// # Errors
/// If a gradient is sparse, or of another shape or device than its view.
pub fn fill_bucket<'a>(
    params: impl IntoIterator<Item = &'a Tensor>,
    views: impl IntoIterator<Item = &'a Tensor>,
    scale: f64,
) -> Result<(), TorchError> {
    let (params, views) = (pointers(params), pointers(views));
    debug_assert_eq!(params.len(), views.len());
    // SAFETY: the pointers belong to tensors borrowed for the call; both lists have the length given.
    check("fill_bucket", unsafe {
        sys::vt_bucket_fill(params.as_ptr(), views.as_ptr(), params.len().min(views.len()), scale)
    })
}

/// Makes each view the gradient of its parameter.
///
/// # Errors
/// If they do not fit.
pub fn adopt_grads<'a>(
    params: impl IntoIterator<Item = &'a Tensor>,
    views: impl IntoIterator<Item = &'a Tensor>,
) -> Result<(), TorchError> {
    let (params, views) = (pointers(params), pointers(views));
    debug_assert_eq!(params.len(), views.len());
    // SAFETY: as above.
    check("adopt_grads", unsafe {
        sys::vt_bucket_adopt(params.as_ptr(), views.as_ptr(), params.len().min(views.len()))
    })
}

/// For each leaf, whether backward from `root` would give it a gradient.
///
/// # Errors
/// libtorch's.
pub fn reached_leaves<'a>(
    root: &Tensor,
    leaves: impl IntoIterator<Item = &'a Tensor>,
) -> Result<Vec<bool>, TorchError> {
    let leaves = pointers(leaves);
    let mut reached = vec![0_u8; leaves.len()];
    // SAFETY: all tensors are borrowed for the call; `reached` has room for as many bytes as there are leaves.
    check("reached_leaves", unsafe {
        sys::vt_reaches_leaves(root.as_ptr().cast_mut(), leaves.as_ptr(), leaves.len(), reached.as_mut_ptr())
    })?;
    Ok(reached.into_iter().map(|flag| flag != 0).collect())
}
