//! Words of the settings of fp8 inference.

use serde::{Deserialize, Serialize};

/// An enum of words that JSON may write in any case; the text is the error's.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $default:ident, $error:expr; $($(#[$variant_doc:meta])* $variant:ident = $word:literal),* $(,)?) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum $name { $($(#[$variant_doc])* $variant),* }

        impl $name {
            /// The word in JSON.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }

        impl Default for $name {
            fn default() -> Self { Self::$default }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self { value.name().to_owned() }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(word: String) -> std::result::Result<Self, String> {
                $(if word.eq_ignore_ascii_case($word) { return Ok(Self::$variant); })*
                Err(format!("{word:?}: {}; the words are {}", $error, [$($word),*].join(", ")))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.name()) }
        }
    };
}
pub(crate) use words;

words! {
    /// What a conversion does to the module.
    QuantMode, Quantize, "invalid mode in custom config. Enter Quantize or Measure";
    /// Nothing.
    None = "NONE",
    /// Layers compute in float8 with scales from measurements.
    Quantize = "QUANTIZE",
    /// Layers measure what they compute with.
    Measure = "MEASURE",
    /// Layers note the shapes of what they compute with.
    Shape = "SHAPE",
}

words! {
    /// What is measured of a tensor.
    Observer, Maxabs, "unknown observer";
    /// Its shape.
    Shape = "shape",
    /// The largest magnitude.
    Maxabs = "maxabs",
    /// The largest magnitude of each channel, which is the last dimension, of images the second one.
    MaxabsPerChannel = "maxabs_per_channel",
    /// The tensor itself, which goes to a file. No scales are made of it.
    Save = "save",
}

words! {
    /// What is not measured. Inputs are, whatever it says, as in the original.
    MeasureExclude, Output, "invalid measure exclude value in custom config. Enter OUTPUT or NONE";
    /// Outputs are measured, too.
    None = "NONE",
    /// Outputs are measured only where scales need them.
    Output = "OUTPUT",
    /// As `NONE`.
    Input = "INPUT",
    /// As `OUTPUT`.
    All = "ALL",
}

words! {
    /// The format of quantized numbers.
    QuantFormat, E4M3, "invalid fp8_config in custom config. Enter E4M3 or E5M2";
    /// Four bits of exponent, up to 240.
    E4M3 = "E4M3",
    /// Five bits of exponent, up to 57344.
    E5M2 = "E5M2",
}

words! {
    /// The dtype of what quantized layers give.
    HpDtype, Bf16, "invalid hp_dtype in custom config";
    /// bfloat16
    Bf16 = "BF16",
    /// float16
    Fp16 = "FP16",
    /// float32
    Fp32 = "FP32",
}

words! {
    /// How the original hands scales to its operators.
    ScaleFormat, Scalar, "invalid scale_format in custom config";
    /// As numbers.
    Scalar = "SCALAR",
    /// As tensors.
    Const = "CONST",
}

words! {
    /// The generation whose scales are used.
    ScaleDevice, Gaudi2, "invalid device in custom config";
    /// Scales of `maxabs_hw` are 2^4, 1, 2^-4 and 2^-8.
    Gaudi2 = "GAUDI2",
    /// Scales of `maxabs_hw` are powers of two from 2^-55 to 2^7.
    Gaudi3 = "GAUDI3",
}
