//! The number formats of tensors: what libtorch, its files and safetensors call each.

use safetensors::Dtype;
use tch::{Kind, Tensor};

/// Bytes of a tensor's elements.
pub(crate) fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// A number format by all its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DtypeNames {
    /// c10's `ScalarType`.
    pub number: i32,
    /// PyTorch's name, without `torch.`.
    pub name: &'static str,
    /// tch's, if it has it.
    pub kind: Option<Kind>,
    /// That of safetensors files, if tensors of it are saved.
    pub safetensors: Option<Dtype>,
    /// The class of its storage in PyTorch's files; the youngest formats have none of their own.
    pub storage: Option<&'static str>,
}

macro_rules! dtypes {
    ($($number:literal $name:literal $kind:tt $safetensors:tt $storage:tt;)*) => {
        /// All of them, by number.
        pub(crate) const DTYPES: &[DtypeNames] = &[$(DtypeNames {
            number: $number,
            name: $name,
            kind: dtypes!(@ Kind $kind),
            safetensors: dtypes!(@ Dtype $safetensors),
            storage: dtypes!(@ str $storage),
        }),*];
    };
    (@ $type:tt _) => { None };
    (@ str $name:literal) => { Some($name) };
    (@ $type:tt $variant:ident) => { Some($type::$variant) };
}

dtypes! {
    0 "uint8" Uint8 U8 "ByteStorage";
    1 "int8" Int8 I8 "CharStorage";
    2 "int16" Int16 I16 "ShortStorage";
    3 "int32" Int I32 "IntStorage";
    4 "int64" Int64 I64 "LongStorage";
    5 "float16" Half F16 "HalfStorage";
    6 "float32" Float F32 "FloatStorage";
    7 "float64" Double F64 "DoubleStorage";
    8 "complex32" ComplexHalf _ _;
    9 "complex64" ComplexFloat _ _;
    10 "complex128" ComplexDouble _ _;
    11 "bool" Bool BOOL "BoolStorage";
    15 "bfloat16" BFloat16 BF16 "BFloat16Storage";
    23 "float8_e5m2" Float8e5m2 F8_E5M2 _;
    24 "float8_e4m3fn" Float8e4m3fn F8_E4M3 _;
    27 "uint16" _ _ _;
    28 "uint32" _ _ _;
    29 "uint64" _ _ _;
}

impl DtypeNames {
    pub fn of_kind(kind: Kind) -> Option<&'static Self> {
        DTYPES.iter().find(|dtype| dtype.kind == Some(kind))
    }

    pub fn of_number(number: i32) -> Option<&'static Self> {
        DTYPES.iter().find(|dtype| dtype.number == number)
    }

    pub fn of_name(name: &str) -> Option<&'static Self> {
        DTYPES.iter().find(|dtype| dtype.name == name)
    }

    pub fn of_safetensors(dtype: Dtype) -> Option<&'static Self> {
        DTYPES.iter().find(|known| known.safetensors == Some(dtype))
    }

    pub fn of_storage(class: &str) -> Option<&'static Self> {
        DTYPES.iter().find(|dtype| dtype.storage == Some(class))
    }

    /// Whether PyTorch's files hold tensors of it.
    pub fn is_in_torch_files(&self) -> bool {
        self.safetensors.is_some()
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    #[test]
    fn each_name_stands_for_one_dtype() {
        for dtype in DTYPES {
            assert_eq!(DtypeNames::of_number(dtype.number), Some(dtype));
            assert_eq!(DtypeNames::of_name(dtype.name), Some(dtype));
            assert!(dtype.kind.is_none_or(|kind| DtypeNames::of_kind(kind) == Some(dtype)));
            assert!(dtype.safetensors.is_none_or(|name| DtypeNames::of_safetensors(name) == Some(dtype)));
            assert!(dtype.storage.is_none_or(|class| DtypeNames::of_storage(class) == Some(dtype)));
        }
    }

    #[test]
    fn sizes_are_those_of_libtorch() {
        for dtype in DTYPES {
            let (Some(kind), Some(saved)) = (dtype.kind, dtype.safetensors) else { continue };
            let tensor = Tensor::zeros([3], (kind, tch::Device::Cpu));
            assert_eq!(tensor.kind().elt_size_in_bytes() * 8, saved.bitsize(), "{}", dtype.name);
        }
    }
}
