//! Derive macros of voltaic: `#[derive(Module)]`, documented at `voltaic::nn::Module`.
//!
//! The generated code names everything by its path from `::voltaic`, so it compiles in any crate that depends on
//! voltaic under that name, and in voltaic itself, which calls itself `voltaic`.

mod attributes;
mod module;

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
