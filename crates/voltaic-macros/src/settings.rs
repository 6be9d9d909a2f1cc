//! Generates what the settings of an optimizer or of a schedule need beside their fields.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::parse::Parser;
use syn::{Attribute, Data, DeriveInput, Error, Expr, Field, Fields, Ident, LitStr, Path, Result, Type};

/// A field, and what `#[setting(...)]` says of it.
struct Setting {
    ident: Ident,
    ty: Type,
    docs: Vec<Attribute>,
    /// The name in a configuration file.
    key: String,
    /// Its value unless it is set; a setting without one is required.
    default: Option<Expr>,
    /// `check(problems, key, &value)` reports what is wrong with a value.
    check: Option<Path>,
    /// A group of parameters may set it for itself.
    is_per_group: bool,
    /// The setter takes what can be converted.
    takes_into: bool,
}

impl Setting {
    /// Reads a field, and removes its `#[setting(...)]`.
    fn of(field: &mut Field) -> Result<Self> {
        let Some(ident) = field.ident.clone() else {
            return Err(Error::new_spanned(field, "#[settings] needs named fields"));
        };
        let docs = field.attrs.iter().filter(|attribute| attribute.path().is_ident("doc"));
        let mut setting = Self {
            key: ident.unraw().to_string(),
            ty: field.ty.clone(),
            docs: docs.cloned().collect(),
            ident,
            default: None,
            check: None,
            is_per_group: false,
            takes_into: false,
        };
        for attribute in &field.attrs {
            if attribute.path().is_ident("setting") {
                attribute.parse_nested_meta(|meta| setting.read(&meta))?;
            } else if attribute.path().is_ident("serde") {
                attribute.parse_nested_meta(|meta| {
                    if meta.path.is_ident("rename") {
                        setting.key = meta.value()?.parse::<LitStr>()?.value();
                        return Ok(());
                    }
                    Err(meta.error("a setting knows #[serde(rename = ...)]"))
                })?;
            }
        }
        field.attrs.retain(|attribute| !attribute.path().is_ident("setting"));
        Ok(setting)
    }

    fn read(&mut self, meta: &ParseNestedMeta<'_>) -> Result<()> {
        if meta.path.is_ident("default") {
            self.default = Some(meta.value()?.parse()?);
        } else if meta.path.is_ident("check") {
            self.check = Some(meta.value()?.parse()?);
        } else if meta.path.is_ident("per_group") {
            self.is_per_group = true;
        } else if meta.path.is_ident("into") {
            self.takes_into = true;
        } else {
            return Err(meta.error("a setting knows default = VALUE, check = FUNCTION, per_group and into"));
        }
        Ok(())
    }

    /// The method that sets it.
    fn setter(&self) -> TokenStream {
        let Self { ident, ty, docs, .. } = self;
        let title = format!(" Sets `{}`.", self.ident.unraw());
        let (argument, value) = match option_of(ty) {
            _ if !self.takes_into => (quote!(#ty), quote!(#ident)),
            Some(inner) => (quote!(impl Into<#inner>), quote!(Some(#ident.into()))),
            None => (quote!(impl Into<#ty>), quote!(#ident.into())),
        };
        quote! {
            #[doc = #title]
            #[doc = ""]
            #(#docs)*
            #[must_use]
            pub fn #ident(mut self, #ident: #argument) -> Self {
                self.#ident = #value;
                self
            }
        }
    }
}

/// The `T` of an `Option<T>`.
fn option_of(ty: &Type) -> Option<&Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|segment| segment.ident == "Option")?;
    let syn::PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first() {
        Some(syn::GenericArgument::Type(inner)) => Some(inner),
        _ => None,
    }
}

/// Adds the fields that optimizers have in common, unless they are written out.
fn add_common(fields: &mut syn::FieldsNamed, lr: &Expr) -> Result<()> {
    let has = |fields: &syn::FieldsNamed, name: &str| {
        fields.named.iter().any(|field| field.ident.as_ref().is_some_and(|ident| ident == name))
    };
    let field = |tokens: TokenStream| Field::parse_named.parse2(tokens);
    if !has(fields, "lr") {
        let lr = field(quote! {
            /// Learning rate, at least 0.
            #[setting(default = #lr, check = crate::optim::checks::not_negative, per_group)]
            pub lr: f64
        })?;
        fields.named.insert(0, lr);
    }
    if !has(fields, "maximize") {
        fields.named.push(field(quote! {
            /// Ascends instead of descends.
            #[setting(default = false, per_group)]
            pub maximize: bool
        })?);
    }
    if !has(fields, "master_weights") {
        fields.named.push(field(quote! {
            /// Updates parameters in bfloat16 or float16 in float32 copies, which lose no small updates, and rounds
            /// these to the parameters after each step (arXiv:1710.03740, section 3.1).
            #[setting(default = false)]
            pub master_weights: bool
        })?);
    }
    Ok(())
}

/// The learning rate of `#[settings(lr = VALUE)]`.
fn read_lr(arguments: TokenStream) -> Result<Option<Expr>> {
    let mut lr = None;
    let read = |meta: ParseNestedMeta<'_>| {
        if !meta.path.is_ident("lr") {
            return Err(meta.error("settings know lr = VALUE"));
        }
        lr = Some(meta.value()?.parse()?);
        Ok(())
    };
    syn::meta::parser(read).parse2(arguments)?;
    Ok(lr)
}

/// The struct with what `#[settings]` adds.
pub fn expand(arguments: TokenStream, mut input: DeriveInput) -> Result<TokenStream> {
    let lr = read_lr(arguments)?;
    let ident = input.ident.clone();
    let Data::Struct(syn::DataStruct { fields: Fields::Named(fields), .. }) = &mut input.data else {
        return Err(Error::new(ident.span(), "#[settings] needs a struct with named fields"));
    };
    if let Some(lr) = &lr {
        add_common(fields, lr)?;
    }
    let settings: Vec<Setting> = fields.named.iter_mut().map(Setting::of).collect::<Result<_>>()?;
    let is_complete = settings.iter().all(|setting| setting.default.is_some());
    let (container, defaults) = if is_complete {
        (quote!(default, deny_unknown_fields), default_of_all(&ident, &settings))
    } else {
        for (field, setting) in fields.named.iter_mut().zip(&settings) {
            if setting.default.is_some() {
                let path = format!("{ident}::{}", default_name(setting));
                field.attrs.push(syn::parse_quote!(#[serde(default = #path)]));
            }
        }
        (quote!(deny_unknown_fields), defaults_of_each(&ident, &settings))
    };
    let setters = settings.iter().filter(|setting| setting.default.is_some()).map(Setting::setter);
    let (checks, overrides) = (checks(&settings), overrides(&settings));
    Ok(quote! {
        #[derive(Debug, Clone, PartialEq, ::serde::Serialize, ::serde::Deserialize, ::schemars::JsonSchema)]
        #[serde(#container)]
        #[schemars(extend("x-no-effect" = crate::optim::settings::no_effect(), "x-refused" = crate::optim::settings::refused()))]
        #input

        #defaults

        impl #ident {
            #(#setters)*
            #checks
            #overrides
        }
    })
}

fn default_name(setting: &Setting) -> Ident {
    format_ident!("default_{}", setting.ident.unraw())
}

/// `Default`, for settings that all have one.
fn default_of_all(ident: &Ident, settings: &[Setting]) -> TokenStream {
    let fields = settings.iter().map(|Setting { ident, default, .. }| quote!(#ident: #default));
    quote! {
        impl Default for #ident {
            fn default() -> Self {
                Self { #(#fields,)* }
            }
        }
    }
}

/// A function for the default of each setting that has one, and one that takes the others.
fn defaults_of_each(ident: &Ident, settings: &[Setting]) -> TokenStream {
    if settings.iter().all(|setting| setting.default.is_none()) {
        return TokenStream::new();
    }
    let functions = settings.iter().filter_map(|setting| {
        let (name, ty, default) = (default_name(setting), &setting.ty, setting.default.as_ref()?);
        Some(quote!(fn #name() -> #ty { #default }))
    });
    let required = settings.iter().filter(|setting| setting.default.is_none());
    let arguments = required.map(|Setting { ident, ty, .. }| quote!(#ident: #ty));
    let fields = settings.iter().map(|setting| {
        let (ident, name) = (&setting.ident, default_name(setting));
        if setting.default.is_some() { quote!(#ident: Self::#name()) } else { quote!(#ident) }
    });
    quote! {
        impl #ident {
            #(#functions)*

            /// The settings with these, and the others by default.
            fn with_required(#(#arguments),*) -> Self {
                Self { #(#fields,)* }
            }
        }
    }
}

/// What checks each setting by itself.
fn checks(settings: &[Setting]) -> Option<TokenStream> {
    let checks: Vec<_> = settings
        .iter()
        .filter_map(|Setting { ident, key, check, .. }| {
            let check = check.as_ref()?;
            Some(quote!(#check(problems, #key, &self.#ident);))
        })
        .collect();
    (!checks.is_empty()).then(|| {
        quote! {
            /// Reports each setting that is out of range.
            fn check_each(&self, problems: &mut crate::optim::problems::Problems) {
                #(#checks)*
            }
        }
    })
}

/// What merges the settings that a group of parameters has for itself.
fn overrides(settings: &[Setting]) -> Option<TokenStream> {
    let names: Vec<&Ident> =
        settings.iter().filter(|setting| setting.is_per_group).map(|setting| &setting.ident).collect();
    (!names.is_empty()).then(|| {
        quote! {
            /// Settings that a group may set for itself.
            const PER_GROUP: &'static [&'static str] = &[#(stringify!(#names)),*];

            /// These settings with those that a group sets for itself.
            fn with_overrides(&self, own: &crate::optim::param_group::Overrides) -> Self {
                let mut merged = self.clone();
                #(if let Some(value) = own.#names {
                    merged.#names = value;
                })*
                merged
            }
        }
    })
}
