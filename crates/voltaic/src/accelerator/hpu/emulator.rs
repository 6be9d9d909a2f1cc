//! The emulated Gaudi: which cards there seem to be, what they allow, and setting them up.
//!
//! Policy only: the kernels are the CPU's, the memory is a pool of the host's with a limit, and the back end that
//! joins both to libtorch is in voltaic-sys.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::flags::RuntimeFlags;
use crate::config::format_size;
use crate::dtype::DtypeNames;
use crate::error::{DeviceError, Problem, Result};
use crate::ffi::{self, HpuOptions, MAX_HPUS};

/// A generation of Gaudi cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Generation {
    /// The first one: 32 GB, no float16, no float8.
    Gaudi,
    /// 96 GB.
    #[default]
    Gaudi2,
    /// 128 GB.
    Gaudi3,
}

impl Generation {
    /// The name that chooses it, such as `gaudi2`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaudi => "gaudi",
            Self::Gaudi2 => "gaudi2",
            Self::Gaudi3 => "gaudi3",
        }
    }

    /// Bytes of memory on a card.
    pub fn memory_bytes(self) -> usize {
        match self {
            Self::Gaudi => 32 << 30,
            Self::Gaudi2 => 96 << 30,
            Self::Gaudi3 => 128 << 30,
        }
    }

    /// Why a card has no tensors of a dtype, by c10's number; none if it has.
    fn refusal(self, dtype: i32) -> Option<String> {
        let name = DtypeNames::of_number(dtype).map_or("this dtype", |dtype| dtype.name);
        let remedy = match (name, self) {
            ("uint8" | "int8" | "int16" | "int32" | "int64" | "float32" | "bool" | "bfloat16", _) => {
                return None;
            }
            ("float16" | "float8_e5m2" | "float8_e4m3fn", Self::Gaudi) => {
                "the first generation lacks it; use bfloat16, or set VOLTAIC_HPU_GENERATION=gaudi2"
            }
            ("float16" | "float8_e5m2" | "float8_e4m3fn", _) => return None,
            ("float64", _) => {
                "the cards compute in 32 bits; convert to float32, or keep this tensor on the cpu"
            }
            ("complex32" | "complex64" | "complex128", _) => {
                "keep this tensor on the cpu, or compute with real and imaginary parts"
            }
            _ => "use a signed integer, float32 or bfloat16, or keep this tensor on the cpu",
        };
        Some(format!(
            "{name} does not exist on {}: {remedy}; VOLTAIC_HPU_STRICT=0 lets the emulator allow it",
            self.name()
        ))
    }
}

impl FromStr for Generation {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Gaudi, Self::Gaudi2, Self::Gaudi3]
            .into_iter()
            .find(|generation| generation.name().eq_ignore_ascii_case(text.trim()))
            .ok_or(())
    }
}

/// Which cards there seem to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HpuSettings {
    /// Generation of all cards.
    pub generation: Generation,
    /// Cards of this node, 1 to 8.
    pub num_devices: usize,
    /// Bytes that may be in use on each card. More than the host has is allowed: the host pays when they are used.
    pub memory_bytes: usize,
    /// Refuse the dtypes that the cards do not have.
    pub strict: bool,
}

impl Default for HpuSettings {
    fn default() -> Self {
        Self::of(Generation::default())
    }
}

impl HpuSettings {
    /// Eight cards of a generation, with its memory, strict.
    pub fn of(generation: Generation) -> Self {
        Self { generation, num_devices: MAX_HPUS, memory_bytes: generation.memory_bytes(), strict: true }
    }

    /// The settings that the environment asks for: `VOLTAIC_HPU_GENERATION` (`gaudi`, `gaudi2`, `gaudi3`),
    /// `VOLTAIC_HPU_DEVICES` (1 to 8), `VOLTAIC_HPU_MEMORY` (such as `4GiB`), `VOLTAIC_HPU_STRICT` (0 or 1), and
    /// Habana's own flags for the same.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] for an invalid value.
    pub fn from_env() -> Result<Self, DeviceError> {
        Ok(Self::of_flags(&RuntimeFlags::from_env()?))
    }

    /// Voltaic's own flags win over Habana's.
    pub(super) fn of_flags(flags: &RuntimeFlags) -> Self {
        const ALL_OF_THE_MEMORY: usize = 24; // what Habana's pool takes for "no size given"
        let generation = flags.text("VOLTAIC_HPU_GENERATION").and_then(|name| name.parse().ok());
        let mut settings = Self::of(generation.unwrap_or_default());
        let visible = flags.visible_modules().map(|modules| modules.len());
        if let Some(devices) = flags.number("VOLTAIC_HPU_DEVICES").or(visible) {
            settings.num_devices = devices;
        }
        if let Some(percent) = flags.number("PT_HPU_POOL_MEM_ACQUIRE_PERC") {
            settings.memory_bytes = (settings.memory_bytes as u128 * percent as u128 / 100) as usize;
        }
        if let Some(gib) = flags.number("PT_HABANA_POOL_SIZE").filter(|&gib| gib != ALL_OF_THE_MEMORY) {
            settings.memory_bytes = settings.memory_bytes.min(gib << 30);
        }
        if let Some(bytes) = flags.size("VOLTAIC_HPU_MEMORY") {
            settings.memory_bytes = bytes;
        }
        settings.strict = flags.switch("VOLTAIC_HPU_STRICT").unwrap_or(true);
        settings
    }

    /// Whether tensors may be float16.
    pub(crate) fn has_float16(&self) -> bool {
        !self.strict || self.generation != Generation::Gaudi
    }

    fn dtypes(&self) -> u64 {
        let exists = |number: i32| !self.strict || self.generation.refusal(number).is_none();
        (0..64).filter(|&number| exists(number)).fold(0, |bits, number| bits | 1 << number)
    }
}

impl fmt::Display for HpuSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cards, name) = (self.num_devices, self.generation.name());
        write!(f, "{cards} emulated {name} with {} each", format_size(self.memory_bytes))
    }
}

/// The emulator, once it is set up in this process.
#[derive(Debug)]
pub struct HpuEmulator {
    settings: HpuSettings,
}

static EMULATOR: OnceLock<HpuEmulator> = OnceLock::new();

impl HpuEmulator {
    /// Sets the emulator up, so that `Device::Hpu` works in this process. A second call with the same settings changes
    /// nothing. To be called before threads that use libtorch start.
    ///
    /// Backward passes of the calling thread run on that thread from then on, not on the engine's device threads,
    /// which would cost more than they save.
    ///
    /// The trainer calls this for `accelerator("hpu")`; a program without a trainer calls it itself:
    ///
    /// ```
    /// use voltaic::accelerator::{HpuEmulator, HpuSettings, memory_stats};
    /// use voltaic::{Device, Kind, Tensor};
    ///
    /// # fn main() -> voltaic::Result<()> {
    /// HpuEmulator::init(HpuSettings::default())?;
    /// let x = Tensor::ones([1024], (Kind::Float, Device::Hpu(0).into()));
    /// assert_eq!(memory_stats(Device::Hpu(0))?.in_use, 4096);
    /// # drop(x);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if the program was linked without voltaic's linker flags;
    /// [`DeviceError::AlreadySetUp`] if it is set up with other settings; libtorch's error if it has another HPU back
    /// end, or has trained before without voltaic.
    pub fn init(settings: HpuSettings) -> Result<&'static Self> {
        static SETTING_UP: Mutex<()> = Mutex::new(());
        let _one_at_a_time = SETTING_UP.lock().unwrap_or_else(PoisonError::into_inner);
        ffi::set_engine_multithreading(false)?;
        if let Some(emulator) = Self::get() {
            return emulator.check_same(&settings);
        }
        if !ffi::tch_names_hpu() {
            let problem = Problem::new(
                "this program was linked without voltaic's linker flags",
                "add voltaic-build to its [build-dependencies] and call voltaic_build::link() in its build.rs",
            );
            return Err(DeviceError::Unavailable { device: "hpu".to_owned(), problem }.into());
        }
        for index in 0..settings.num_devices {
            if let Some(pool) = ffi::hpu_pool(index) {
                pool.set_limit(Some(settings.memory_bytes));
            }
        }
        let options =
            HpuOptions { num_devices: settings.num_devices, dtypes: settings.dtypes(), explain_dtype };
        ffi::init_hpu_emulator(options)?;
        Ok(EMULATOR.get_or_init(|| Self { settings }))
    }

    fn check_same(&'static self, settings: &HpuSettings) -> Result<&'static Self> {
        if self.settings == *settings {
            return Ok(self);
        }
        let error =
            DeviceError::AlreadySetUp { settings: self.settings.to_string(), asked: settings.to_string() };
        Err(error.into())
    }

    /// The emulator, if it is set up.
    pub fn get() -> Option<&'static Self> {
        EMULATOR.get()
    }

    /// What it was set up as. A limit changed later is not in here, but in the statistics of the device.
    pub fn settings(&self) -> &HpuSettings {
        &self.settings
    }

    /// Changes how many bytes may be in use on a device. What is in use stays, even above the limit.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] if there is no device of this index.
    pub fn set_memory_limit(&self, index: usize, bytes: usize) -> Result<()> {
        let pool = ffi::hpu_pool(index).filter(|_| index < self.settings.num_devices);
        let Some(pool) = pool else {
            let what = format!("there are {} emulated devices", self.settings.num_devices);
            let problem = Problem::new(what, "count from 0");
            return Err(DeviceError::Unavailable { device: format!("hpu:{index}"), problem }.into());
        };
        pool.set_limit(Some(bytes));
        pool.trim();
        Ok(())
    }
}

/// Why libtorch may not make a tensor of a dtype.
fn explain_dtype(dtype: i32) -> String {
    let generation = HpuEmulator::get().map(|emulator| emulator.settings.generation).unwrap_or_default();
    generation.refusal(dtype).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[(&str, &str)]) -> HpuSettings {
        let get = |name: &str| {
            values.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        HpuSettings::of_flags(&RuntimeFlags::read(get).unwrap())
    }

    #[test]
    fn the_environment_describes_the_cards() {
        assert_eq!(read(&[]).to_string(), "8 emulated gaudi2 with 96 GiB each");
        let values =
            [("VOLTAIC_HPU_GENERATION", "Gaudi"), ("VOLTAIC_HPU_DEVICES", "2"), ("VOLTAIC_HPU_STRICT", "0")];
        let settings = read(&values);
        assert_eq!(settings.to_string(), "2 emulated gaudi with 32 GiB each");
        assert!(!settings.strict);
        assert_eq!(read(&[("VOLTAIC_HPU_MEMORY", "4GiB")]).memory_bytes, 4 << 30);
    }

    #[test]
    fn habanas_flags_describe_the_cards_too() {
        assert_eq!(read(&[("HABANA_VISIBLE_MODULES", "2,3")]).num_devices, 2);
        assert_eq!(read(&[("PT_HABANA_POOL_SIZE", "4")]).memory_bytes, 4 << 30);
        assert_eq!(read(&[("PT_HABANA_POOL_SIZE", "24")]).memory_bytes, 96 << 30, "24 stands for all");
        assert_eq!(read(&[("PT_HABANA_POOL_SIZE", "200")]).memory_bytes, 96 << 30, "no more than there is");
        assert_eq!(
            read(&[("PT_HPU_POOL_MEM_ACQUIRE_PERC", "50")]).to_string(),
            "8 emulated gaudi2 with 48 GiB each"
        );
        let both = read(&[("PT_HABANA_POOL_SIZE", "4"), ("VOLTAIC_HPU_MEMORY", "1GiB")]);
        assert_eq!(both.memory_bytes, 1 << 30);
    }

    #[test]
    fn dtypes_exist_by_generation() {
        let has = |generation, name| {
            let number = DtypeNames::of_name(name).unwrap().number;
            HpuSettings::of(generation).dtypes() >> number & 1 == 1
        };
        for (name, gaudi, gaudi2) in [
            ("float32", true, true),
            ("bfloat16", true, true),
            ("int64", true, true),
            ("float16", false, true),
            ("float8_e4m3fn", false, true),
            ("float64", false, false),
            ("complex64", false, false),
            ("uint32", false, false),
        ] {
            assert_eq!(
                (has(Generation::Gaudi, name), has(Generation::Gaudi2, name)),
                (gaudi, gaudi2),
                "{name}"
            );
            assert_eq!(has(Generation::Gaudi3, name), gaudi2, "{name}");
        }
        assert_eq!(HpuSettings { strict: false, ..HpuSettings::default() }.dtypes(), u64::MAX);
    }
}
