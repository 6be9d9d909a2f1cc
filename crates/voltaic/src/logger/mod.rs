//! Where metrics are written: CSV, JSON lines or TensorBoard event files in a folder of the run ([`RunFolders`]), and plots of the
//! curves and of the device's memory.
//!
//! [`Logger`] is the trait: it gets the hyper-parameters once, then rows of metrics with their step.

mod config;
mod csv;
mod json_lines;
#[expect(clippy::module_inception, reason = "the trait of the folder")]
mod logger;
mod plot;
mod plot_lr;
mod plot_memory;
mod plot_quant;
mod run_folder;
mod tensorboard;
pub mod tfevents;

pub use config::{LoggerConfig, Loggers};
pub use csv::{CsvLogger, CsvLoggerConfig};
pub use json_lines::{JsonLinesLogger, JsonLinesLoggerConfig};
pub(crate) use logger::DEVICE_STATS;
pub use logger::Logger;
pub use plot::{plot_metrics, plot_runs};
pub use plot_lr::plot_lr_find;
pub use plot_memory::plot_memory;
pub use plot_quant::plot_quantization;
pub use run_folder::{RunFolders, Version};
pub use tensorboard::{TensorBoardLogger, TensorBoardLoggerConfig};
