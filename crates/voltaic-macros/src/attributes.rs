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

/// The expression of `#[module(type_name = EXPRESSION)]`, if the struct has one.
pub fn type_name(attributes: &[Attribute]) -> Result<Option<Expr>> {
    let mut found = None;
    for attribute in module_attributes(attributes) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("type_name") {
                return Err(meta.error(
                    "a struct knows #[module(type_name = ...)]; skip and training belong to a field",
                ));
            }
            found = Some(meta.value()?.parse()?);
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
