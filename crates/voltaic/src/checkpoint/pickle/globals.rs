//! The classes and functions that a pickle may name: those that make plain data.

use tch::Kind;

use crate::dtype::DtypeNames;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Global {
    /// A dictionary; what is built into it beside its entries does not count.
    Dict,
    /// An object whose attributes are entries.
    Namespace,
    /// An object whose attributes are entries, and whose arguments do not count.
    Opaque,
    List,
    Tuple,
    /// `torch._utils._rebuild_tensor_v2`: storage, offset, size, stride, ...
    Tensor,
    /// `torch._utils._rebuild_tensor_v3`: as the above, with the dtype at place 6.
    TypedTensor,
    /// `torch._tensor._rebuild_from_type_v2`: a function with the arguments at place 2, and attributes, which do not count.
    WithAttributes,
    /// The class of a tensor, which is not called itself.
    TensorClass,
    /// Gives its first argument: a parameter's tensor, the value of an enumeration.
    First,
    /// `torch.FloatStorage` and so on; none for bytes.
    Storage(Option<Kind>),
    Dtype(&'static str, Kind),
    Device,
    /// `_codecs.encode`: text whose characters are bytes.
    Encode,
    Bytes,
    /// `io.BytesIO`: the bytes of its state.
    Buffer,
    /// `torch.storage._load_from_bytes`: a storage with its elements.
    StorageBytes,
    Path,
}

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
        ("deepspeed.runtime.zero.config", "ZeroStageEnum") => Global::First,
        // loss scalers, addresses of fragments, its configuration: their attributes are data
        (module, _) if module.starts_with("deepspeed.") => Global::Opaque,
        ("builtins" | "__builtin__", "list" | "set" | "frozenset") => Global::List,
        ("builtins" | "__builtin__", "tuple") | ("torch", "Size") => Global::Tuple,
        ("builtins" | "__builtin__", "bytes" | "bytearray") => Global::Bytes,
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TypedTensor,
        ("torch._tensor", "_rebuild_from_type_v2") => Global::WithAttributes,
        ("torch", "Tensor") | ("torch.nn.parameter", "Parameter") => Global::TensorClass,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Global::First,
        ("torch.storage", "UntypedStorage") | ("torch", "UntypedStorage") => Global::Storage(None),
        ("torch.storage", "_load_from_bytes") => Global::StorageBytes,
        ("_io" | "io", "BytesIO") => Global::Buffer,
        ("torch", "device") => Global::Device,
        ("_codecs", "encode") => Global::Encode,
        (
            "pathlib" | "pathlib._local",
            "PosixPath" | "PurePosixPath" | "Path" | "WindowsPath" | "PureWindowsPath",
        ) => Global::Path,
        ("torch", name) => match DtypeNames::of_storage(name) {
            Some(dtype) => Global::Storage(Some(dtype.kind?)),
            None => {
                let dtype = DtypeNames::of_name(name).filter(|dtype| dtype.is_in_torch_files())?;
                Global::Dtype(dtype.name, dtype.kind?)
            }
        },
        _ => return None,
    })
}
