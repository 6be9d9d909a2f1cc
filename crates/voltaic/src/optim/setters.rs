//! Setters of settings.

/// Setter methods that take and give back the struct; `=> function` for a field of another type than is given.
macro_rules! setters {
    (@value $name:ident) => { $name };
    (@value $name:ident $function:path) => { $function($name) };
    ($($(#[$doc:meta])* $name:ident: $type:ty $(=> $function:path)?,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = setters!(@value $name $($function)?);
            self
        }
    )*};
}
pub(super) use setters;
