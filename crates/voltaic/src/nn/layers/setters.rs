//! Setters of builders.

/// Setter methods that take and give back the builder; `, sizes` for a size that may be given as one number for all
/// dimensions.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty $(, $convert:ident)?;)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name$(.$convert())?;
            self
        }
    )*};
}
pub(super) use setters;
