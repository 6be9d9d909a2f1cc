//! NCCL, and HCCL with Synapse: libraries for operations between devices, loaded on first use.
//!
//! HCCL has NCCL's interface with names of its own. Both are declared from their public documentation. On Gaudi, data goes
//! through memory of our own, which Synapse allocates and copies.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use voltaic_sys as sys;

use crate::device::Device;
use crate::error::TorchError;
use crate::ffi::check::check;
use crate::ffi::device::backend::loader_message;
use crate::ffi::ranks::c10d::{Backend, millis};

type Function = unsafe extern "C" fn();

/// A family of functions by the names of its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CollectiveApi {
    /// NVIDIA's `libnccl.so.2`.
    Nccl,
    /// Habana's `libhcl.so`.
    Hccl,
}

impl CollectiveApi {
    /// As c10d names the back end.
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    fn c_name(self) -> &'static CStr {
        match self {
            Self::Nccl => c"nccl",
            Self::Hccl => c"hccl",
        }
    }
}

/// The place of a process in a communicator.
#[derive(Debug, Clone, Copy)]
pub struct Seat {
    /// Global rank.
    pub rank: usize,
    /// Ranks in all.
    pub size: usize,
    /// Where the tensors are.
    pub device: Device,
    /// How long an operation may take.
    pub timeout: Duration,
}

/// A library that is loaded, for the rest of the process.
#[derive(Clone, Copy)]
pub struct CollectiveLibrary {
    api: CollectiveApi,
    table: sys::vt_collective_library,
}

// SAFETY: the table holds addresses of functions in libraries that are never unloaded, and of a static text; NCCL's and
// Synapse's functions may be called from any thread.
unsafe impl Send for CollectiveLibrary {}
// SAFETY: as above; nothing is changed.
unsafe impl Sync for CollectiveLibrary {}

impl fmt::Debug for CollectiveLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CollectiveLibrary({})", self.api.name())
    }
}

/// Where functions are looked up, in this order.
struct Libraries(Vec<(PathBuf, Library)>);

impl Libraries {
    fn open(paths: &[PathBuf]) -> Result<Self, String> {
        let open = |path: &PathBuf| {
            // SAFETY: the caller names a vendor's library, whose initialisers are made to run in any process.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
            library.map(|library| (path.clone(), library)).map_err(|error| loader_message(&error))
        };
        Ok(Self(paths.iter().map(open).collect::<Result<_, _>>()?))
    }

    fn find(&self, name: &str) -> Option<Function> {
        self.0.iter().find_map(|(_, library)| {
            // SAFETY: the address is only stored; the shim calls it with the type that the vendor documents.
            unsafe { library.get::<Function>(name) }.ok().map(|symbol| *symbol)
        })
    }

    fn require(&self, name: &str) -> Result<Option<Function>, String> {
        let paths: Vec<String> = self.0.iter().map(|(path, _)| path.display().to_string()).collect();
        self.find(name).map(Some).ok_or_else(|| format!("{} has no {name}", paths.join(" and ")))
    }
}

impl CollectiveLibrary {
    /// Loads the libraries at `paths`: NCCL's, or HCCL's and Synapse's.
    ///
    /// # Errors
    /// What the loader says, or which function is missing.
    pub fn open(api: CollectiveApi, paths: &[impl AsRef<Path>]) -> Result<Self, String> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().to_owned()).collect();
        let libraries = Libraries::open(&paths)?;
        let own = |name: &str| format!("{}{name}", api.name());
        let require = |name: &str| libraries.require(&own(name));
        let is_hccl = api == CollectiveApi::Hccl;
        let synapse = |name: &str| if is_hccl { libraries.require(name) } else { Ok(None) };
        let table = sys::vt_collective_library {
            name: api.c_name().as_ptr(),
            has_average: i32::from(!is_hccl),
            get_unique_id: require("GetUniqueId")?,
            init_rank: require("CommInitRank")?,
            all_reduce: require("AllReduce")?,
            broadcast: require("Broadcast")?,
            all_gather: require("AllGather")?,
            reduce_scatter: require("ReduceScatter")?,
            reduce: require("Reduce")?,
            send: require("Send")?,
            recv: require("Recv")?,
            group_start: require("GroupStart")?,
            group_end: require("GroupEnd")?,
            async_error: libraries.find(&own("CommGetAsyncError")),
            abort: libraries.find(&own("CommAbort")),
            destroy: require("CommDestroy")?,
            error_text: require("GetErrorString")?,
            device_malloc: synapse("synDeviceMalloc")?,
            device_free: synapse("synDeviceFree")?,
            host_malloc: synapse("synHostMalloc")?,
            host_free: synapse("synHostFree")?,
            copy: synapse("synMemCopyAsync")?,
            stream_create: synapse("synStreamCreateGeneric")?,
            stream_query: synapse("synStreamQuery")?,
        };
        std::mem::forget(libraries); // the table points into them
        Ok(Self { api, table })
    }

    /// As c10d names the back end: `nccl` or `hccl`.
    pub fn name(&self) -> &'static str {
        self.api.name()
    }

    /// A new id for a communicator, to be given to all its ranks.
    ///
    /// # Errors
    /// The library's.
    pub fn unique_id(&self) -> Result<Vec<u8>, TorchError> {
        let mut id = vec![0; sys::VT_COLLECTIVE_ID_BYTES];
        // SAFETY: the table is complete; `id` has the length that the shim writes.
        check("unique_id", unsafe { sys::vt_collective_id(&self.table, id.as_mut_ptr()) })?;
        Ok(id)
    }

    /// Joins the communicator of `id`; returns when all ranks have, without a time-out.
    ///
    /// # Errors
    /// The library's.
    pub fn join(&self, id: &[u8], seat: Seat) -> Result<Backend, TorchError> {
        let Seat { rank, size, device, timeout } = seat;
        let mut own = vec![0; sys::VT_COLLECTIVE_ID_BYTES];
        let len = id.len().min(own.len());
        own[..len].copy_from_slice(&id[..len]);
        let (device_type, device_index) = device.numbers();
        let mut group = ptr::null_mut();
        // SAFETY: the table is complete and copied; `own` has the length that the shim reads.
        check("join", unsafe {
            sys::vt_collective_join(
                &self.table,
                own.as_ptr(),
                rank as i32,
                size as i32,
                device_type,
                device_index,
                millis(timeout),
                &mut group,
            )
        })?;
        Ok(Backend::from_raw(group, size))
    }
}
