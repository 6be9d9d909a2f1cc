//! Reads `#[module(...)]` on a struct and on its fields.

use syn::spanned::Spanned;
use syn::{Attribute, Error, Expr, Field, Result, Type};

/// What the derive does with a field.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Part of the tree.
    Member,
    /// Left alone.
    Skipped,
    /// The flag that `set_training` sets.
    Training,
}

/// The role that a field's attributes give it.
pub fn role(field: &Field) -> Result<Role> {
    let mut role = Role::Member;
    for attribute in module_attributes(&field.attrs) {
        attribute.parse_nested_meta(|meta| {
            let given = if meta.path.is_ident("skip") {
                Role::Skipped
            } else if meta.path.is_ident("training") {
                Role::Training
            } else {
                return Err(meta.error("a field knows #[module(skip)] and #[module(training)]"));
            };
            if role != Role::Member {
                return Err(meta.error("a field is either skipped or the training flag; keep one of the two"));
            }
            role = given;
            Ok(())
        })?;
    }
    if role == Role::Training && !is_bool(&field.ty) {
        return Err(Error::new(
            field.ty.span(),
            "#[module(training)] marks the flag that is true in training mode; give the field the type bool",
        ));
    }
    Ok(role)
}

/// What `#[module(...)]` on a struct says.
#[derive(Default)]
pub struct OfStruct {
    /// The expression of `#[module(type_name = EXPRESSION)]`.
    pub type_name: Option<Expr>,
    /// The expression of `#[module(parallel_plan = EXPRESSION)]`, a function of the struct.
    pub parallel_plan: Option<Expr>,
    /// `#[module(metric)]`: the struct is a metric.
    pub is_metric: bool,
}

/// Reads the attributes of a struct.
pub fn of_struct(attributes: &[Attribute]) -> Result<OfStruct> {
    let mut found = OfStruct::default();
    for attribute in module_attributes(attributes) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("type_name") {
                found.type_name = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("parallel_plan") {
                found.parallel_plan = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("metric") {
                found.is_metric = true;
            } else {
                return Err(meta.error(
                    "a struct knows #[module(type_name = ...)], #[module(parallel_plan = ...)] and #[module(metric)]; \
                     skip and training belong to a field",
                ));
            }
            Ok(())
        })?;
    }
    Ok(found)
}

fn module_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("module"))
}

fn is_bool(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.qself.is_none() && path.path.is_ident("bool"))
}
