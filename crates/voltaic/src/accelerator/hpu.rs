//! Intel Gaudi cards, here emulated.

use super::{Accelerator, Devices, HpuEmulator, HpuSettings};
use crate::device::Device;
use crate::error::{DeviceError, Result};

/// The emulated Gaudi cards, as the environment describes them.
#[derive(Debug, Clone)]
pub struct HpuAccelerator {
    settings: HpuSettings,
}

const ACCEPTED: &str = "a number of cards from 1, the same as text, or auto";

impl HpuAccelerator {
    /// With the settings of the environment; see [`HpuSettings::from_env`]. If the emulator is set up already, with
    /// its settings.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] if a variable makes no sense.
    pub fn from_env() -> Result<Self, DeviceError> {
        let settings = match HpuEmulator::get() {
            Some(emulator) => emulator.settings().clone(),
            None => HpuSettings::from_env()?,
        };
        Ok(Self { settings })
    }
}

impl Accelerator for HpuAccelerator {
    fn name(&self) -> &'static str {
        "hpu"
    }

    fn description(&self) -> String {
        self.settings.to_string()
    }

    fn availability(&self) -> Result<(), String> {
        Ok(())
    }

    fn device_count(&self) -> usize {
        self.settings.num_devices
    }

    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, String> {
        use super::devices::Wanted;
        let available = self.device_count();
        match devices.wanted(ACCEPTED)? {
            Wanted::Indices(_) | Wanted::All => {
                Err(format!("the cards of a node are not chosen one by one; use {ACCEPTED}"))
            }
            // one process drives one card, and several processes are more than one trainer starts unasked
            wanted => wanted.resolve(self.name(), available, 1),
        }
    }

    fn device(&self, index: usize) -> Device {
        Device::Hpu(index)
    }

    fn setup(&self) -> Result<()> {
        let was_there = HpuEmulator::get().is_some();
        HpuEmulator::init(self.settings.clone())?;
        if !was_there {
            tracing::info!("hpu: {}; its speed says nothing about a real card", self.description());
        }
        Ok(())
    }

    /// The emulator does all work when it is asked for.
    fn synchronize(&self, _device: Device) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_counted_not_chosen() {
        let hpu = HpuAccelerator { settings: HpuSettings::default() };
        assert_eq!(hpu.parse_devices(&Devices::from("auto")), Ok(vec![0]));
        assert_eq!(hpu.parse_devices(&Devices::from("2")), Ok(vec![0, 1]));
        for refused in [Devices::from(vec![1]), Devices::from(-1), Devices::from("x")] {
            let message = hpu.parse_devices(&refused).unwrap_err();
            assert!(message.ends_with(ACCEPTED), "{message}");
        }
        assert!(hpu.parse_devices(&Devices::from(9)).unwrap_err().contains("8 hpu devices"));
    }
}
