//! What types of settings are written with: their setters, and what they are made of.

/// Setter methods that take and give back the value; `= VALUE` for what is stored where that is not the argument itself, and `in FIELD;` at
/// the beginning for settings that are those of a field.
macro_rules! setters {
    (@stored $name:ident) => { $name };
    (@stored $name:ident $value:expr) => { $value };
    (in $field:tt; $($(#[$attribute:meta])* $name:ident: $type:ty $(= $value:expr)?;)*) => {$(
        $(#[$attribute])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$field.$name = setters!(@stored $name $($value)?);
            self
        }
    )*};
    ($($(#[$attribute:meta])* $name:ident: $type:ty $(= $value:expr)?;)*) => {$(
        $(#[$attribute])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = setters!(@stored $name $($value)?);
            self
        }
    )*};
}

/// Implementations of `From` for a type: `conversions! { Devices: i64 => |count| Self::Count(count), }`.
macro_rules! conversions {
    ($target:ty: $($(#[$doc:meta])* $source:ty => |$value:pat_param| $into:expr,)*) => {$(
        impl From<$source> for $target {
            $(#[$doc])*
            fn from($value: $source) -> Self {
                $into
            }
        }
    )*};
}

pub(crate) use {conversions, setters};
