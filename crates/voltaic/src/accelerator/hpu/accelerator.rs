//! The HPUs of a machine, whatever stands behind them.

use super::emulator::{Generation, HpuEmulator, HpuSettings};
use super::flags::RuntimeFlags;
use super::gaudi::{Gaudi, LOADED};
use crate::accelerator::accelerator::Accelerator;
use crate::accelerator::cards::Card;
use crate::accelerator::devices::{Devices, Wanted};
use crate::accelerator::memory::memory_stats;
use crate::config::format_size;
use crate::device::Device;
use crate::error::{DeviceError, Problem, Result};
use crate::ffi::{self, HlmlCard};

/// The HPUs of this machine: its Gaudi cards, or emulated ones if it has none.
#[derive(Debug, Clone)]
pub struct HpuAccelerator {
    backend: Backend,
}

/// What stands behind the name.
#[derive(Debug, Clone)]
enum Backend {
    Gaudi(Gaudi),
    Emulator {
        settings: HpuSettings,
        /// Why it is not Gaudi cards.
        why: String,
        /// What the environment says.
        flags: RuntimeFlags,
    },
    /// `VOLTAIC_HPU=gaudi` requires cards, and this is why there are none.
    Absent(Problem),
}

const NUM_DEVICES: &str = "VOLTAIC_HPU_DEVICES";
const VISIBLE: &str = "HABANA_VISIBLE_MODULES";
const ACCEPTED: &str = "a number of cards from 1, the same as text, -1 for all, or auto";

impl HpuAccelerator {
    /// What `VOLTAIC_HPU` asks for: `gaudi`, `emulator`, or `auto`, which is Gaudi cards if there are any. If HPUs are
    /// set up in this process already, those.
    ///
    /// # Errors
    /// [`DeviceError::Setting`] if a variable of the environment is invalid.
    pub fn from_env() -> Result<Self, DeviceError> {
        if let Some(emulator) = HpuEmulator::get() {
            let why = "they are set up in this process".to_owned();
            let (settings, flags) = (emulator.settings().clone(), RuntimeFlags::from_env()?);
            return Ok(Self { backend: Backend::Emulator { settings, why, flags } });
        }
        if let Some(gaudi) = LOADED.get() {
            return Ok(Self { backend: Backend::Gaudi(gaudi.clone()) });
        }
        let flags = RuntimeFlags::from_env()?;
        let emulator =
            |why| Backend::Emulator { settings: HpuSettings::of_flags(&flags), why, flags: flags.clone() };
        let backend = match flags.word("VOLTAIC_HPU").as_deref() {
            Some("emulator") => emulator("VOLTAIC_HPU asks for them".to_owned()),
            Some("gaudi") => Gaudi::find(&flags).map_or_else(Backend::Absent, Backend::Gaudi),
            _ => Gaudi::find(&flags).map_or_else(|problem| emulator(problem.to_string()), Backend::Gaudi),
        };
        Ok(Self { backend })
    }

    /// Whether these are cards, not emulated.
    pub fn is_real(&self) -> bool {
        !matches!(self.backend, Backend::Emulator { .. })
    }
}

impl Accelerator for HpuAccelerator {
    fn name(&self) -> &'static str {
        "hpu"
    }

    fn description(&self) -> String {
        match &self.backend {
            Backend::Emulator { settings, why, .. } => format!("{settings} ({why})"),
            Backend::Gaudi(gaudi) => {
                let driver = gaudi.driver.as_deref().unwrap_or("unknown");
                format!("{} {} cards, driver {driver}", gaudi.cards.len(), gaudi.generation())
            }
            Backend::Absent(_) => "no cards".to_owned(),
        }
    }

    fn availability(&self) -> Result<(), Problem> {
        match &self.backend {
            Backend::Emulator { .. } => Ok(()),
            Backend::Gaudi(gaudi) => gaudi.plugin().map(drop),
            Backend::Absent(problem) => {
                let remedy =
                    format!("{}; or leave VOLTAIC_HPU unset to train on emulated cards", problem.remedy);
                Err(Problem::new(&*problem.what, remedy))
            }
        }
    }

    fn device_count(&self) -> usize {
        match &self.backend {
            Backend::Emulator { settings, .. } => settings.num_devices,
            Backend::Gaudi(gaudi) => gaudi.cards.len(),
            Backend::Absent(_) => 0,
        }
    }

    /// All cards; of emulated ones, which share the cores of this processor, as many as `VOLTAIC_HPU_DEVICES` names, else
    /// one.
    fn auto_device_count(&self) -> usize {
        match &self.backend {
            Backend::Emulator { flags, .. } => {
                flags.number(NUM_DEVICES).unwrap_or(1).min(self.device_count())
            }
            Backend::Gaudi(_) | Backend::Absent(_) => self.device_count(),
        }
    }

    /// The first generation lacks it.
    fn has_float16(&self) -> bool {
        match &self.backend {
            Backend::Emulator { settings, .. } => settings.has_float16(),
            Backend::Gaudi(gaudi) => gaudi.generation() != Generation::Gaudi.name(),
            Backend::Absent(_) => true,
        }
    }

    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, Problem> {
        match devices.wanted(ACCEPTED)? {
            Wanted::Indices(_) => Err(Problem::new(
                "the cards of a node are not chosen one by one",
                format!("use {ACCEPTED}, and HABANA_VISIBLE_MODULES to say which"),
            )),
            wanted => wanted
                .resolve(self.name(), self.device_count(), self.auto_device_count())
                .map_err(|what| self.more_than_visible(what)),
        }
    }

    fn auto_devices(&self) -> Option<String> {
        let Backend::Emulator { settings, flags, .. } = &self.backend else { return None };
        Some(match flags.number(NUM_DEVICES) {
            Some(named) => {
                format!("{named} emulated cards, as {NUM_DEVICES} names; they share this processor")
            }
            None => format!(
                "1 of {} emulated cards, since all of them share this processor; {NUM_DEVICES} names another number",
                settings.num_devices
            ),
        })
    }

    /// A process drives one Gaudi card, which is its `hpu:0`.
    fn device(&self, index: usize) -> Device {
        match self.backend {
            Backend::Emulator { .. } => Device::Hpu(index),
            Backend::Gaudi(_) | Backend::Absent(_) => Device::Hpu(0),
        }
    }

    fn cards(&self) -> Vec<Card> {
        match &self.backend {
            Backend::Emulator { settings, .. } => emulated_cards(settings),
            Backend::Gaudi(gaudi) => {
                gaudi.current_cards().into_iter().map(|card| real_card(card, gaudi)).collect()
            }
            Backend::Absent(_) => Vec::new(),
        }
    }

    fn setup(&self) -> Result<()> {
        match &self.backend {
            Backend::Emulator { settings, flags, .. } => {
                let was_there = HpuEmulator::get().is_some();
                HpuEmulator::init(settings.clone())?;
                if !was_there {
                    tracing::info!("hpu: {}; its speed says nothing about a real card", self.description());
                    let idle = flags.without_effect_when_emulated();
                    if !idle.is_empty() {
                        tracing::info!("hpu: without effect on emulated cards: {}", idle.join(", "));
                    }
                    warn_of_unknown_flags();
                }
                Ok(())
            }
            Backend::Gaudi(gaudi) => {
                ffi::set_engine_multithreading(false)?;
                gaudi.load()?;
                if LOADED.set(gaudi.clone()).is_ok() {
                    tracing::info!("hpu: {}", self.description());
                    warn_of_unknown_flags();
                }
                Ok(())
            }
            Backend::Absent(problem) => {
                let (device, problem) = ("hpu".to_owned(), problem.clone());
                Err(DeviceError::Unavailable { device, problem }.into())
            }
        }
    }

    /// The emulator does all work when it is asked for.
    fn synchronize(&self, device: Device) -> Result<()> {
        if self.is_real() {
            ffi::synchronize(device)?;
        }
        Ok(())
    }

    /// The ten metrics of the memory, and on a card what HLML reports: `utilization` in percent, `temperature` in
    /// degrees Celsius, `power` in watts.
    fn device_stats(&self, device: Device) -> Result<Vec<(&'static str, f64)>> {
        let metrics = memory_stats(device)?.metrics();
        let mut stats: Vec<(&'static str, f64)> = metrics.map(|(name, value)| (name, value as f64)).to_vec();
        if let Backend::Gaudi(gaudi) = &self.backend
            && let Ok(card) = gaudi.current_card()
        {
            let told = [
                ("utilization", card.utilization.map(f64::from)),
                ("temperature", card.temperature.map(f64::from)),
                ("power", card.power.map(|milliwatts| f64::from(milliwatts) / 1000.0)),
            ];
            stats.extend(told.into_iter().filter_map(|(name, value)| Some((name, value?))));
        }
        Ok(stats)
    }
}

impl HpuAccelerator {
    /// More cards are asked for than there are: what decides how many that is.
    fn more_than_visible(&self, what: String) -> Problem {
        let flags = match &self.backend {
            Backend::Emulator { flags, .. } => Some(flags),
            Backend::Gaudi(gaudi) => Some(gaudi.flags()),
            Backend::Absent(_) => None,
        };
        let count = self.device_count();
        match flags.and_then(|flags| flags.text(VISIBLE)) {
            Some(modules) => Problem::new(
                format!("{what} ({VISIBLE}={modules})"),
                format!("use {count} or fewer, or let {VISIBLE} name more modules"),
            ),
            None => Problem::new(
                what,
                format!("use {count} or fewer ({VISIBLE}, which is not set, would leave even fewer)"),
            ),
        }
    }
}

fn warn_of_unknown_flags() {
    let unknown = RuntimeFlags::unknown_of_env();
    if !unknown.is_empty() {
        let remedy = "`voltaic devices --env` lists those that are known";
        tracing::warn!("hpu: {}; {remedy}", unknown.join("; "));
    }
}

fn emulated_cards(settings: &HpuSettings) -> Vec<Card> {
    let card = |index| Card {
        device: Device::Hpu(index).to_string(),
        name: format!("emulated {}", settings.generation.name()),
        memory: Some(format_size(settings.memory_bytes)),
        ..Card::default()
    };
    (0..settings.num_devices).map(card).collect()
}

fn real_card(card: HlmlCard, gaudi: &Gaudi) -> Card {
    let size = |bytes: u64| format_size(bytes as usize);
    Card {
        device: format!("hpu card {}", card.index),
        name: format!("{} {}", gaudi.generation(), card.name),
        uuid: card.uuid,
        module_id: card.module_id,
        memory: card.memory_total.map(size),
        memory_used: card.memory_used.map(size),
        driver: gaudi.driver.clone(),
        utilization: card.utilization,
        temperature: card.temperature,
        power_watts: card.power.map(|milliwatts| f64::from(milliwatts) / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_counted_not_chosen() {
        let of = |set: &[(&str, &str)]| {
            let get = |name: &str| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            let flags = RuntimeFlags::read(get).unwrap();
            let settings = HpuSettings::of_flags(&flags);
            HpuAccelerator { backend: Backend::Emulator { settings, why: "a test".to_owned(), flags } }
        };
        let hpu = of(&[]);
        assert_eq!(hpu.parse_devices(&Devices::from("auto")), Ok(vec![0]));
        assert_eq!((hpu.auto_device_count(), hpu.device_count()), (1, 8));
        assert!(hpu.auto_devices().unwrap().starts_with("1 of 8 emulated cards"));
        let named = of(&[(NUM_DEVICES, "2")]);
        assert_eq!(named.parse_devices(&Devices::from("auto")), Ok(vec![0, 1]));
        assert_eq!((named.auto_device_count(), named.device_count()), (2, 2));
        let hidden = of(&[(NUM_DEVICES, "4"), (VISIBLE, "0,3")]);
        assert_eq!(hidden.auto_device_count(), hidden.device_count());
        assert!(named.auto_devices().unwrap().starts_with("2 emulated cards, as VOLTAIC_HPU_DEVICES"));
        let visible = of(&[(VISIBLE, "0,3")]);
        assert_eq!(visible.parse_devices(&Devices::from("auto")), Ok(vec![0]));
        let error = visible.parse_devices(&Devices::from(3)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "asks for 3, but there are 2 hpu devices (HABANA_VISIBLE_MODULES=0,3); use 2 or fewer, or let \
             HABANA_VISIBLE_MODULES name more modules"
        );
        assert_eq!(hpu.parse_devices(&Devices::from("2")), Ok(vec![0, 1]));
        assert_eq!(hpu.parse_devices(&Devices::from(-1)), Ok((0..8).collect()));
        for refused in [Devices::from(vec![1]), Devices::from(0), Devices::from("x")] {
            let message = hpu.parse_devices(&refused).unwrap_err();
            assert!(message.remedy.contains(ACCEPTED), "{message}");
        }
        let error = hpu.parse_devices(&Devices::from(9)).unwrap_err();
        assert!(
            error.to_string().contains("8 hpu devices; use 8 or fewer (HABANA_VISIBLE_MODULES, which"),
            "{error}"
        );
    }

    #[test]
    fn cards_that_were_asked_for_and_are_not_there_are_an_error() {
        let hpu = HpuAccelerator { backend: Backend::Absent(Problem::new("no Gaudi cards", "install one")) };
        assert!(hpu.is_real() && hpu.device_count() == 0);
        let message = hpu.availability().unwrap_err();
        assert!(
            message.what == "no Gaudi cards" && message.remedy.contains("leave VOLTAIC_HPU unset"),
            "{message}"
        );
        assert!(hpu.setup().unwrap_err().to_string().contains("no Gaudi cards"));
    }
}
