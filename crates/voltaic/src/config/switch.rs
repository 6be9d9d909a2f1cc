//! Switches in the environment between libtorch's own parts and voltaic's.

use std::env;

use crate::error::{Result, SwitchError};

/// What the variable `name` says: 1 is on, 0 off and keeps libtorch's own `what`; `None` if it is not set.
///
/// # Errors
/// [`SwitchError`] for another value.
pub(crate) fn read_switch(name: &'static str, what: &'static str) -> Result<Option<bool>> {
    let value = env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    parse(name, value, what)
}

fn parse(name: &'static str, value: Option<String>, what: &'static str) -> Result<Option<bool>> {
    match value.as_deref() {
        None => Ok(None),
        Some("1") => Ok(Some(true)),
        Some("0") => Ok(Some(false)),
        Some(_) => Err(SwitchError { name, value: value.unwrap_or_default(), what }.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_0_or_1() {
        let parse = |value: &str| parse("VOLTAIC_X", Some(value.to_owned()), "allocator");
        assert_eq!((parse("1").unwrap(), parse("0").unwrap()), (Some(true), Some(false)));
        assert_eq!(
            parse("yes").unwrap_err().to_string(),
            "VOLTAIC_X=`yes` in the environment is neither 0 nor 1; unset it, or set it to 0 to keep libtorch's own \
             allocator"
        );
    }
}
