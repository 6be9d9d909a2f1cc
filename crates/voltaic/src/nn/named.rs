//! Modules of a tree by names that a user writes.

use crate::nn::calls::which::fits;
use crate::nn::module::Module;
use crate::nn::tree::ModuleExt;

/// The modules that have one of these names, with their fqn: the outermost of those that lie within each other. A name is that of a
/// type, an fqn or the end of one after a dot, or a pattern of fqns in which `*` stands for any number of characters.
///
/// # Errors
/// The first name that is that of no module.
pub(crate) fn modules_named<'a>(
    root: &'a dyn Module,
    names: &[String],
) -> Result<Vec<(String, &'a dyn Module)>, String> {
    let all = root.named_modules();
    let is_named = |(fqn, module): &(String, &dyn Module), name: &String| {
        module.type_name() == name
            || fits(name, fqn)
            || fqn.strip_suffix(name.as_str()).is_some_and(|rest| rest.ends_with('.'))
    };
    if let Some(name) = names.iter().find(|name| !all.iter().any(|module| is_named(module, name))) {
        return Err(name.clone());
    }
    let mut found: Vec<(String, &dyn Module)> = Vec::new();
    for named in all {
        let is_within = found.iter().any(|(outer, _)| is_member(&named.0, outer));
        if !is_within && names.iter().any(|name| is_named(&named, name)) {
            found.push(named);
        }
    }
    Ok(found)
}

/// Whether something lies in a module, by fqn.
pub(crate) fn is_member(fqn: &str, module: &str) -> bool {
    module.is_empty() || fqn.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}
