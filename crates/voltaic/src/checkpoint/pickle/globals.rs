//! The classes and functions that a pickle may name: those that make plain data.

use tch::Kind;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Global {
    /// A dictionary; what is built into it beside its entries does not count.
    Dict,
    /// An object whose attributes are entries.
    Namespace,
    List,
    Tuple,
    /// `torch._utils._rebuild_tensor_v2`: storage, offset, size, stride, ...
    Tensor,
    /// `torch._utils._rebuild_tensor_v3`: as the above, with the dtype at place 6.
    TypedTensor,
    /// Gives its first argument.
    First,
    /// `torch.FloatStorage` and so on; none for bytes.
    Storage(Option<Kind>),
    Dtype(&'static str, Kind),
    Device,
    /// `_codecs.encode`: text whose characters are bytes.
    Encode,
    Bytes,
    Path,
}

/// dtype, its name, and the name of its storage's class in a file.
pub(super) const DTYPES: [(Kind, &str, &str); 12] = [
    (Kind::Float, "float32", "FloatStorage"),
    (Kind::Double, "float64", "DoubleStorage"),
    (Kind::Half, "float16", "HalfStorage"),
    (Kind::BFloat16, "bfloat16", "BFloat16Storage"),
    (Kind::Int64, "int64", "LongStorage"),
    (Kind::Int, "int32", "IntStorage"),
    (Kind::Int16, "int16", "ShortStorage"),
    (Kind::Int8, "int8", "CharStorage"),
    (Kind::Uint8, "uint8", "ByteStorage"),
    (Kind::Bool, "bool", "BoolStorage"),
    (Kind::Float8e4m3fn, "float8_e4m3fn", "UntypedStorage"),
    (Kind::Float8e5m2, "float8_e5m2", "UntypedStorage"),
];

/// What `module.name` stands for, if it is known.
pub(super) fn find(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict" | "defaultdict" | "Counter") | ("builtins" | "__builtin__", "dict") => {
            Global::Dict
        }
        (
            "lightning_fabric.utilities.data"
            | "lightning.fabric.utilities.data"
            | "pytorch_lightning.utilities.parsing"
            | "lightning.pytorch.utilities.parsing",
            "AttributeDict",
        ) => Global::Dict,
        ("argparse", "Namespace") => Global::Namespace,
        ("builtins" | "__builtin__", "list" | "set" | "frozenset") => Global::List,
        ("builtins" | "__builtin__", "tuple") | ("torch", "Size") => Global::Tuple,
        ("builtins" | "__builtin__", "bytes" | "bytearray") => Global::Bytes,
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TypedTensor,
        ("torch._utils", "_rebuild_parameter") => Global::First,
        ("torch.storage", "UntypedStorage") | ("torch", "UntypedStorage") => Global::Storage(None),
        ("torch", "device") => Global::Device,
        ("_codecs", "encode") => Global::Encode,
        (
            "pathlib" | "pathlib._local",
            "PosixPath" | "PurePosixPath" | "Path" | "WindowsPath" | "PureWindowsPath",
        ) => Global::Path,
        ("torch", name) => {
            let is_storage = |(_, _, storage): &&(Kind, &str, &str)| *storage == name;
            let is_dtype = |(_, dtype, _): &&(Kind, &str, &str)| *dtype == name;
            match DTYPES.iter().find(is_storage) {
                Some((kind, ..)) => Global::Storage(Some(*kind)),
                None => DTYPES.iter().find(is_dtype).map(|(kind, dtype, _)| Global::Dtype(dtype, *kind))?,
            }
        }
        _ => return None,
    })
}
