//! Setters of settings.

/// Setter methods that take and give back the struct.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        }
    )*};
}
pub(super) use setters;
