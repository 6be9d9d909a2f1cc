//! The verbs. A verb is a file here, a variant in `args.rs` and a line in `cli::dispatch`.

mod bundle;
mod convert;
mod devices;
mod env;
mod launch;
mod models;
mod new;
mod plot;
mod run;
mod schema;
mod version;

pub(super) use bundle::bundle;
pub(super) use convert::convert;
pub(super) use devices::devices;
pub(super) use env::env;
pub(super) use launch::launch;
pub(super) use models::models;
pub(super) use new::new;
pub(super) use plot::plot;
pub(super) use run::run;
pub(super) use schema::{completion, schema};
pub(super) use version::version;
