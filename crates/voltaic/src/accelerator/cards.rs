//! One device of a machine, as its driver describes it.

use std::fmt;

use serde::Serialize;

/// One device of a machine as its driver describes it. What the driver does not report is `None`.
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
}
