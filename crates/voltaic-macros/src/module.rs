//! Generates the `Module` implementation.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Generics, Index, Member, Result, Type, parse_quote};

use crate::attributes::{self, OfStruct, Role};

/// The implementation of `Module` for `input`.
pub fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let Data::Struct(data) = &input.data else {
        return Err(Error::new(
            input.ident.span(),
            "#[derive(Module)] needs a struct; hold the variants in a struct, or implement Module by hand",
        ));
    };
    let mut members = Vec::new();
    let mut training = None;
    for (index, field) in data.fields.iter().enumerate() {
        let (member, name) = match &field.ident {
            Some(ident) => (Member::Named(ident.clone()), ident.unraw().to_string()),
            None => (Member::Unnamed(Index::from(index)), index.to_string()),
        };
        match attributes::role(field)? {
            Role::Member => members.push((member, name, &field.ty)),
            Role::Skipped => {}
            Role::Training if training.is_some() => {
                return Err(Error::new(
                    field.span(),
                    "a module has one #[module(training)] flag; remove the others",
                ));
            }
            Role::Training => training = Some(member),
        }
    }

    let ident = &input.ident;
    let generics = with_bounds(&input.generics, members.iter().map(|(_, _, ty)| *ty));
    let (impl_generics, _, where_clause) = generics.split_for_impl();
    let (_, ty_generics, _) = input.generics.split_for_impl();
    // spanned at the field's type, so that an error about the type points there
    let visits = members.iter().map(|(member, name, ty)| {
        quote_spanned!(ty.span()=> <#ty as ::voltaic::nn::Field>::members(&self.#member, #name, visit);)
    });
    let visits_mut = members.iter().map(|(member, name, ty)| {
        quote_spanned!(ty.span()=> <#ty as ::voltaic::nn::Field>::children_mut(&mut self.#member, #name, visit);)
    });
    let settings = members.iter().map(|(member, _, ty)| {
        quote_spanned!(ty.span()=> <#ty as ::voltaic::nn::Field>::settings(&self.#member, visit);)
    });
    let modes = training.map(|member| modes(&member));
    let of_struct = methods_of_struct(attributes::of_struct(&input.attrs)?);
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics ::voltaic::nn::Module for #ident #ty_generics #where_clause {
            fn members<'module>(
                &'module self,
                visit: &mut dyn ::core::ops::FnMut(&str, ::voltaic::nn::Member<'module>),
            ) {
                let _ = &visit;
                #(#visits)*
            }

            fn children_mut<'module>(
                &'module mut self,
                visit: &mut dyn ::core::ops::FnMut(&str, &'module mut dyn ::voltaic::nn::Module),
            ) {
                let _ = &visit;
                #(#visits_mut)*
            }

            fn settings(&self, visit: &mut dyn ::core::ops::FnMut(u64)) {
                let _ = &visit;
                #(#settings)*
            }

            #modes
            #of_struct
        }
    })
}

/// The methods that attributes of the struct give.
fn methods_of_struct(of_struct: OfStruct) -> TokenStream {
    let metric = of_struct.is_metric.then(|| {
        quote! {
            fn metric(&self) -> ::core::option::Option<::std::sync::Arc<dyn ::voltaic::metrics::Metric>> {
                ::core::option::Option::Some(::std::sync::Arc::new(::core::clone::Clone::clone(self)))
            }
        }
    });
    let type_name = of_struct.type_name.map(|expression| {
        quote! {
            fn type_name(&self) -> &'static str {
                #expression
            }
        }
    });
    let parallel_plan = of_struct.parallel_plan.map(|expression| {
        quote! {
            fn parallel_plan(&self) -> ::core::option::Option<::voltaic::nn::parallel::ParallelPlan> {
                ::core::option::Option::Some((#expression)(self))
            }
        }
    });
    quote! {
        #type_name
        #parallel_plan
        #metric
    }
}

/// The methods for the mode that the field `member` keeps.
fn modes(member: &impl ToTokens) -> TokenStream {
    quote! {
        fn set_training(&mut self, training: bool) {
            self.#member = training;
        }

        fn is_training(&self) -> ::core::option::Option<bool> {
            ::core::option::Option::Some(self.#member)
        }
    }
}

/// Adds what the implementation needs of type parameters: that they may be part of a module at all, and that the
/// fields that mention them are members.
fn with_bounds<'a>(generics: &Generics, fields: impl Iterator<Item = &'a Type>) -> Generics {
    let parameters: Vec<_> = generics.type_params().map(|parameter| parameter.ident.clone()).collect();
    let mut generics = generics.clone();
    if parameters.is_empty() {
        return generics;
    }
    let clause = generics.make_where_clause();
    for parameter in &parameters {
        clause.predicates.push(parse_quote!(#parameter: ::core::marker::Send + 'static));
    }
    for ty in fields.filter(|ty| parameters.iter().any(|parameter| mentions(ty.to_token_stream(), parameter)))
    {
        clause.predicates.push(parse_quote!(#ty: ::voltaic::nn::Field));
    }
    generics
}

fn mentions(tokens: TokenStream, parameter: &syn::Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *parameter,
        TokenTree::Group(group) => mentions(group.stream(), parameter),
        _ => false,
    })
}
