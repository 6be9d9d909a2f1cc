//! What `voltaic devices` shows: the accelerators of this machine with their cards.

use std::fmt;

use serde::Serialize;

use super::accelerator::Accelerator;
use super::cpu::CpuAccelerator;
use super::cuda::CudaAccelerator;
use super::hpu::HpuAccelerator;
use crate::error::DeviceError;

/// One device of a machine as its driver describes it. What the driver does not tell is none.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Card {
    /// Its name here, such as `cuda:0`.
    pub device: String,
    /// Its name there, such as `NVIDIA H200`.
    pub name: String,
    /// Unique identifier.
    pub uuid: Option<String>,
    /// The number by which a process asks for a Gaudi card.
    pub module_id: Option<u32>,
    /// Its memory, such as `96 GiB`.
    pub memory: Option<String>,
    /// What all processes use of it.
    pub memory_used: Option<String>,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Percent of the last second in which it worked.
    pub utilization: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Power in watts.
    pub power_watts: Option<f64>,
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.device, self.name)?;
        if let Some(memory) = &self.memory {
            write!(f, ", {memory}")?;
        }
        if let Some(used) = &self.memory_used {
            write!(f, " ({used} in use)")?;
        }
        if let Some(utilization) = self.utilization {
            write!(f, ", {utilization} % busy")?;
        }
        if let Some(temperature) = self.temperature {
            write!(f, ", {temperature} C")?;
        }
        if let Some(watts) = self.power_watts {
            write!(f, ", {watts:.0} W")?;
        }
        if let Some(module) = self.module_id {
            write!(f, ", module {module}")?;
        }
        if let Some(uuid) = &self.uuid {
            write!(f, " (UUID: {uuid})")?;
        }
        Ok(())
    }
}

/// An accelerator of this machine, or why it has none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listed {
    /// `cpu`, `cuda` or `hpu`.
    pub name: &'static str,
    /// Whether it can be used.
    pub available: bool,
    /// One line on what it is; if it is not available, why not.
    pub description: String,
    /// Whether the devices are emulated.
    pub emulated: bool,
    /// Its devices.
    pub cards: Vec<Card>,
}

/// The accelerators of this machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inventory {
    /// Version of libtorch.
    pub libtorch: String,
    /// All that voltaic knows.
    pub accelerators: Vec<Listed>,
    /// What `accelerator=auto` takes.
    pub auto: &'static str,
}

impl Inventory {
    /// What this machine has. Takes no device.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] if a variable of the environment that describes devices makes no sense.
    pub fn of_machine() -> Result<Self, DeviceError> {
        let hpu = HpuAccelerator::from_env()?;
        let accelerators = vec![
            listed(&CpuAccelerator, false),
            listed(&CudaAccelerator, false),
            listed(&hpu, !hpu.is_real()),
        ];
        let real =
            |name: &str| accelerators.iter().any(|one| one.name == name && one.available && !one.emulated);
        let auto = ["hpu", "cuda"].into_iter().find(|name| real(name)).unwrap_or("cpu");
        Ok(Self { libtorch: crate::ffi::libtorch_version(), accelerators, auto })
    }
}

fn listed(accelerator: &dyn Accelerator, emulated: bool) -> Listed {
    let availability = accelerator.availability();
    Listed {
        name: accelerator.name(),
        available: availability.is_ok(),
        description: availability.err().unwrap_or_else(|| accelerator.description()),
        emulated,
        cards: accelerator.cards(),
    }
}

impl fmt::Display for Inventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Listed { name, available, description, cards, .. } in &self.accelerators {
            let state = if *available { "" } else { "not available: " };
            writeln!(f, "{name:<5} {state}{description}")?;
            for card in cards {
                writeln!(f, "      {card}")?;
            }
        }
        writeln!(f, "accelerator=auto takes {}; libtorch {}", self.auto, self.libtorch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_one_line() {
        let card = Card {
            device: "hpu card 3".to_owned(),
            name: "gaudi2 HL-225".to_owned(),
            uuid: Some("01P0-HL2080A0".to_owned()),
            module_id: Some(5),
            memory: Some("96 GiB".to_owned()),
            memory_used: Some("768 MiB".to_owned()),
            driver: Some("1.24.0".to_owned()),
            utilization: Some(12),
            temperature: Some(35),
            power_watts: Some(98.4),
        };
        assert_eq!(
            card.to_string(),
            "hpu card 3: gaudi2 HL-225, 96 GiB (768 MiB in use), 12 % busy, 35 C, 98 W, module 5 (UUID: 01P0-HL2080A0)"
        );
    }

    #[test]
    fn the_inventory_holds_every_accelerator() {
        let inventory = Inventory::of_machine().unwrap();
        assert_eq!(
            inventory.accelerators.iter().map(|one| one.name).collect::<Vec<_>>(),
            ["cpu", "cuda", "hpu"]
        );
        let text = inventory.to_string();
        assert!(text.contains(&format!("accelerator=auto takes {}", inventory.auto)), "{text}");
        let json = serde_json::to_value(&inventory).unwrap();
        assert_eq!(json["accelerators"][0]["available"], true);
    }
}
