//! `models`: what the registry holds.

use crate::cli::registry::{Class, Registry};

/// A table of models with the data that fits them, and of data modules.
pub(in crate::cli) fn models(registry: &Registry) -> String {
    let mut text = String::new();
    let models: Vec<&Class> = registry.models().collect();
    let data: Vec<&Class> = registry.data_modules().collect();
    let width = models.iter().chain(&data).map(|class| class.name.len()).max().unwrap_or(0);
    text.push_str("Models:\n");
    for model in &models {
        let mut fitting = registry.data_for(model);
        if registry.has_own_data(model) {
            fitting.insert(0, "its own");
        }
        let fitting = if fitting.is_empty() { "none registered".to_owned() } else { fitting.join(", ") };
        text.push_str(&format!("  {:width$}  {}\n", model.name, model.summary));
        text.push_str(&format!("  {:width$}  data: {fitting} (batches of {})\n", "", model.batches()));
    }
    if models.is_empty() {
        text.push_str("  none registered\n");
    }
    text.push_str("Data:\n");
    for module in &data {
        text.push_str(&format!("  {:width$}  {}\n", module.name, module.summary));
        text.push_str(&format!("  {:width$}  batches of {}\n", "", module.batches()));
    }
    if data.is_empty() {
        text.push_str("  none registered\n");
    }
    text
}
