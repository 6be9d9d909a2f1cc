//! What `voltaic devices` shows: the accelerators of this machine with their cards.

use std::fmt;

use serde::Serialize;

use super::accelerator::Accelerator;
use super::cards::Card;
use super::cpu::CpuAccelerator;
use super::cuda::CudaAccelerator;
use super::hpu::HpuAccelerator;
use crate::error::DeviceError;

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
    /// All accelerators that voltaic supports.
    pub accelerators: Vec<Listed>,
    /// What `accelerator=auto` takes.
    pub auto: &'static str,
}

impl Inventory {
    /// What this machine has. Takes no device.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] if a variable of the environment that describes devices is invalid.
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
        description: availability.map_or_else(|problem| problem.to_string(), |()| accelerator.description()),
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
