//! Implements `Default` for a struct by what its fields say.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Expr, Fields, Result};

/// The implementation of `#[derive(Defaults)]`.
pub fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let Data::Struct(syn::DataStruct { fields: Fields::Named(fields), .. }) = &input.data else {
        return Err(Error::new_spanned(input, "Defaults is for structs with named fields"));
    };
    let values = fields.named.iter().map(|field| {
        let ident = &field.ident;
        let given = field.attrs.iter().find(|attribute| attribute.path().is_ident("default"));
        let value = given.map(|attribute| attribute.parse_args::<Expr>()).transpose()?;
        Ok(value.map_or_else(
            || quote!(#ident: ::core::default::Default::default()),
            |value| quote!(#ident: #value),
        ))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let name = &input.ident;
    Ok(quote! {
        impl ::core::default::Default for #name {
            fn default() -> Self {
                Self { #(#values),* }
            }
        }
    })
}
