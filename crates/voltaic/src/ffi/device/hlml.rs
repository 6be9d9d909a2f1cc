//! HLML, Habana's management library: which Gaudi cards there are and how they are, without taking one.
//!
//! `libhlml.so` has a C interface, declared here from its public documentation; it is loaded on first use.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::ffi::device::backend::loader_message;

type Code = c_int;
type Device = *mut c_void;
type GetNumber = unsafe extern "C" fn(Device, *mut u32) -> Code;
type GetText = unsafe extern "C" fn(Device, *mut c_char, u32) -> Code;

/// `hlml_memory_t`, bytes.
#[repr(C)]
#[derive(Default)]
struct Memory {
    free: u64,
    total: u64,
    used: u64,
}

/// `hlml_utilization_t`, percent; room for fields that a newer library may write.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    aip: u32,
    _memory: u32,
    _reserved: [u32; 6],
}

const SENSOR_ON_AIP: u32 = 0;
const TEXT_BYTES: usize = 128;

/// One Gaudi card, as HLML describes it. What a library or card does not report is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HlmlCard {
    /// Number of the device file, `/dev/accel/accel<index>`.
    pub index: usize,
    /// Such as `HL-225`.
    pub name: String,
    /// Unique identifier of the card.
    pub uuid: Option<String>,
    /// The number by which a process asks for it (`HLS_MODULE_ID`).
    pub module_id: Option<u32>,
    /// Bytes of memory.
    pub memory_total: Option<u64>,
    /// Bytes that all processes use.
    pub memory_used: Option<u64>,
    /// Percent of the last second in which the card worked.
    pub utilization: Option<u32>,
    /// Degrees Celsius on the chip.
    pub temperature: Option<u32>,
    /// Milliwatts.
    pub power: Option<u32>,
}

/// The library, initialised until it is dropped.
pub struct Hlml {
    library: Library,
    path: PathBuf,
}

impl fmt::Debug for Hlml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hlml({})", self.path.display())
    }
}

impl Hlml {
    /// Loads `libhlml.so` and initialises it.
    ///
    /// # Errors
    /// What the loader or the library says.
    pub fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: the caller names Habana's library, whose initialisers are made to run in any process.
        let library = unsafe { Library::new(path) }.map_err(|error| loader_message(&error))?;
        let hlml = Self { library, path: path.to_owned() };
        // SAFETY: `int hlml_init(void)`.
        let init = unsafe { hlml.function::<unsafe extern "C" fn() -> Code>(c"hlml_init") }?;
        // SAFETY: called once per `Hlml`; HLML counts the initialisations.
        match unsafe { init() } {
            0 | 5 => Ok(hlml),
            code => Err(failure("hlml_init", code)),
        }
    }

    /// The function `name`.
    ///
    /// # Safety
    /// `F` must be its C signature.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        // SAFETY: the caller promises the type; the library outlives the copy, which is used within this object's
        // methods only.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }
            .map(|symbol| *symbol)
            .map_err(|_| format!("{} has no {}", self.path.display(), name.to_string_lossy()))
    }

    /// Number of cards.
    ///
    /// # Errors
    /// What the library says.
    pub fn device_count(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: `int hlml_device_get_count(unsigned *)`.
        let function =
            unsafe { self.function::<unsafe extern "C" fn(*mut u32) -> Code>(c"hlml_device_get_count") }?;
        // SAFETY: the pointer is to a u32 on this stack.
        match unsafe { function(&mut count) } {
            0 => Ok(count as usize),
            code => Err(failure("hlml_device_get_count", code)),
        }
    }

    /// Version of the driver; `None` if the library does not report it.
    pub fn driver_version(&self) -> Option<String> {
        type Get = unsafe extern "C" fn(*mut c_char, u32) -> Code;
        // SAFETY: `int hlml_get_driver_version(char *, unsigned)`.
        let function = unsafe { self.function::<Get>(c"hlml_get_driver_version") }.ok()?;
        // SAFETY: the buffer has the length that is passed.
        text(|buffer, len| unsafe { function(buffer, len) })
    }

    /// Card `index` as the library describes it.
    ///
    /// # Errors
    /// If there is no such card, or it has no name.
    pub fn card(&self, index: usize) -> Result<HlmlCard, String> {
        let device = self.handle(index)?;
        let name = self.text(device, c"hlml_device_get_name");
        let memory = self.memory(device);
        Ok(HlmlCard {
            index,
            name: name.ok_or_else(|| format!("{} gives card {index} no name", self.path.display()))?,
            uuid: self.text(device, c"hlml_device_get_uuid"),
            module_id: self.number(device, c"hlml_device_get_module_id"),
            memory_total: memory.as_ref().map(|memory| memory.total),
            memory_used: memory.as_ref().map(|memory| memory.used),
            utilization: self.utilization(device),
            temperature: self.temperature(device),
            power: self.number(device, c"hlml_device_get_power_usage"),
        })
    }

    fn handle(&self, index: usize) -> Result<Device, String> {
        type Get = unsafe extern "C" fn(u32, *mut Device) -> Code;
        // SAFETY: `int hlml_device_get_handle_by_index(unsigned, hlml_device_t *)`.
        let function = unsafe { self.function::<Get>(c"hlml_device_get_handle_by_index") }?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the pointer is to a handle on this stack.
        match unsafe { function(index as u32, &mut device) } {
            0 => Ok(device),
            code => Err(failure("hlml_device_get_handle_by_index", code)),
        }
    }

    fn number(&self, device: Device, name: &CStr) -> Option<u32> {
        // SAFETY: the functions asked for here are `int f(hlml_device_t, unsigned *)`.
        let function = unsafe { self.function::<GetNumber>(name) }.ok()?;
        let mut value = 0;
        // SAFETY: the handle is HLML's; the pointer is to a u32 on this stack.
        (unsafe { function(device, &mut value) } == 0).then_some(value)
    }

    fn text(&self, device: Device, name: &CStr) -> Option<String> {
        // SAFETY: the functions asked for here are `int f(hlml_device_t, char *, unsigned)`.
        let function = unsafe { self.function::<GetText>(name) }.ok()?;
        // SAFETY: the handle is HLML's; the buffer has the length that is passed.
        text(|buffer, len| unsafe { function(device, buffer, len) })
    }

    fn memory(&self, device: Device) -> Option<Memory> {
        type Get = unsafe extern "C" fn(Device, *mut Memory) -> Code;
        // SAFETY: `int hlml_device_get_memory_info(hlml_device_t, hlml_memory_t *)`.
        let function = unsafe { self.function::<Get>(c"hlml_device_get_memory_info") }.ok()?;
        let mut memory = Memory::default();
        // SAFETY: the handle is HLML's; the struct has C's layout.
        (unsafe { function(device, &mut memory) } == 0).then_some(memory)
    }

    fn utilization(&self, device: Device) -> Option<u32> {
        type Get = unsafe extern "C" fn(Device, *mut Utilization) -> Code;
        // SAFETY: `int hlml_device_get_utilization_rates(hlml_device_t, hlml_utilization_t *)`.
        let function = unsafe { self.function::<Get>(c"hlml_device_get_utilization_rates") }.ok()?;
        let mut utilization = Utilization::default();
        // SAFETY: the handle is HLML's; the struct begins with C's fields and is larger than they are.
        (unsafe { function(device, &mut utilization) } == 0).then_some(utilization.aip)
    }

    fn temperature(&self, device: Device) -> Option<u32> {
        type Get = unsafe extern "C" fn(Device, u32, *mut u32) -> Code;
        // SAFETY: `int hlml_device_get_temperature(hlml_device_t, sensor, unsigned *)`.
        let function = unsafe { self.function::<Get>(c"hlml_device_get_temperature") }.ok()?;
        let mut value = 0;
        // SAFETY: the handle is HLML's; the pointer is to a u32 on this stack.
        (unsafe { function(device, SENSOR_ON_AIP, &mut value) } == 0).then_some(value)
    }
}

impl Drop for Hlml {
    fn drop(&mut self) {
        // SAFETY: `int hlml_shutdown(void)`, the counterpart of the hlml_init in `open`.
        if let Ok(shutdown) = unsafe { self.function::<unsafe extern "C" fn() -> Code>(c"hlml_shutdown") } {
            // SAFETY: no handle of this object is in use.
            unsafe { shutdown() };
        }
    }
}

/// The text that `get` writes to a buffer of some length; none if it fails or writes nothing.
fn text(get: impl FnOnce(*mut c_char, u32) -> Code) -> Option<String> {
    let mut buffer = [0_u8; TEXT_BYTES];
    // one byte less, so that the text ends within the buffer whatever the library does
    if get(buffer.as_mut_ptr().cast(), TEXT_BYTES as u32 - 1) != 0 {
        return None;
    }
    let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn failure(function: &str, code: Code) -> String {
    let meaning = match code {
        1 => "not initialised",
        2 => "invalid argument",
        3 => "not supported",
        6 => "not found",
        9 => "the driver is not loaded",
        10 => "timed out",
        15 => "the card is lost",
        20 => "out of memory",
        21 => "no data",
        _ => "unknown error",
    };
    format!("{function} gave {code}, {meaning}")
}
