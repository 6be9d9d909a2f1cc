//! Macros of voltaic: `#[derive(Module)]`, documented at `voltaic::nn::Module`; `#[derive(Defaults)]` for configurations; and `#[settings]`,
//! which only `voltaic::optim` uses.
//!
//! What the derive generates names everything by its path from `::voltaic`, so it compiles in any crate that depends on
//! voltaic under that name, and in voltaic itself, which calls itself `voltaic`.

mod attributes;
mod defaults;
mod module;
mod settings;

use proc_macro::TokenStream;

/// Implements `voltaic::nn::Module` for a struct: its fields, in declaration order, are its members.
///
/// - A field may be a `Parameter`, a `Buffer`, any type that is a `Module`, a plain number, `bool` or string, or an
///   `Option`, `Vec` or array of those. Elements of a `Vec` or array are named `field.0`, `field.1`, ... as by
///   PyTorch's `ModuleList`; the fields of a tuple struct are named `0`, `1`, ... as by its `Sequential`.
/// - `#[module(skip)]` on a field: it is not part of the tree, and may have any type that is `Send + 'static`.
/// - `#[module(training)]` on a `bool` field: it is `true` in training mode and `false` in evaluation mode.
/// - `#[module(type_name = EXPRESSION)]` on the struct: what `Module::type_name` returns, for a generic type whose
///   instances have names of their own.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    module::expand(&input).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Implements `Default` for a struct: a field has the value of its `#[default(VALUE)]`, or the default of its type.
#[doc(hidden)]
#[proc_macro_derive(Defaults, attributes(default))]
pub fn derive_defaults(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    defaults::expand(&input).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// The settings of an optimizer or of a learning rate schedule: adds what follows from the fields. For `voltaic::optim`.
///
/// `#[setting(...)]` on a field knows:
///
/// - `default = VALUE`: the setting's value unless it is set. It gets a setter; without a default, a setting is required.
/// - `check = FUNCTION`: `FUNCTION(problems, key, &value)` reports a value that is out of range. `check_each` calls all.
/// - `per_group`: a group of parameters may set it for itself. `with_overrides` gives the settings of a group.
/// - `into`: the setter takes what can be converted; for an `Option<T>`, what can be converted to a `T`.
///
/// The struct can be read from and written to a configuration file, and has a schema. If all settings have a default, it has
/// `Default`, else `with_required`, which takes the required ones. `#[settings(lr = VALUE)]` adds the settings that all optimizers
/// have: `lr` with this default, `maximize` and `master_weights`, unless they are written out.
#[doc(hidden)]
#[proc_macro_attribute]
pub fn settings(arguments: TokenStream, input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    settings::expand(arguments.into(), input).unwrap_or_else(syn::Error::into_compile_error).into()
}
