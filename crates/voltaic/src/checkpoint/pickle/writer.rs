//! Writes pickles of protocol 2, as `torch.save` does.

use std::collections::HashMap;

use tch::Tensor;

use super::value::{Made, Object, Value};
use crate::dtype::DtypeNames;

/// A pickle, and the tensors whose elements belong into its storages `0`, `1`, ...
pub(in crate::checkpoint) struct Written {
    pub pickle: Vec<u8>,
    /// Contiguous, on the CPU.
    pub storages: Vec<Tensor>,
}

/// Writes a value.
///
/// # Errors
/// If a tensor has a dtype that PyTorch's files do not hold here, or cannot be read back.
pub(in crate::checkpoint) fn write(value: &Value) -> Result<Written, String> {
    let mut writer = Writer { out: vec![0x80, 2], storages: Vec::new(), known: HashMap::new() };
    writer.value(value)?;
    writer.out.push(b'.');
    Ok(Written { pickle: writer.out, storages: writer.storages })
}

struct Writer {
    out: Vec<u8>,
    storages: Vec<Tensor>,
    /// Storage of each memory seen, so that tied weights stay tied.
    known: HashMap<(usize, usize), usize>,
}

impl Writer {
    fn value(&mut self, value: &Value) -> Result<(), String> {
        match value {
            Value::None => self.out.push(b'N'),
            Value::Bool(flag) => self.out.push(if *flag { 0x88 } else { 0x89 }),
            Value::Int(int) => self.int(*int),
            Value::Float(float) => {
                self.out.push(b'G');
                self.out.extend(float.to_be_bytes());
            }
            Value::Text(text) => self.text(text)?,
            Value::Bytes(bytes) => {
                // protocol 2 has no bytes: text whose characters are the bytes, encoded
                self.global("_codecs", "encode");
                self.out.push(b'(');
                self.text(&bytes.iter().map(|byte| char::from(*byte)).collect::<String>())?;
                self.text("latin1")?;
                self.out.extend(b"tR");
            }
            Value::List(items) => {
                self.out.extend(b"](");
                items.iter().try_for_each(|item| self.value(item))?;
                self.out.push(b'e');
            }
            Value::Tuple(items) => {
                self.out.push(b'(');
                items.iter().try_for_each(|item| self.value(item))?;
                self.out.push(b't');
            }
            Value::Dict(entries) => {
                self.out.extend(b"}(");
                for (key, value) in entries {
                    self.value(key)?;
                    self.value(value)?;
                }
                self.out.push(b'u');
            }
            Value::Tensor(tensor) => self.tensor(tensor)?,
            Value::Object(object) => self.object(object)?,
        }
        Ok(())
    }

    fn object(&mut self, Object { module, name, made }: &Object) -> Result<(), String> {
        self.global(module, name);
        match made {
            Made::Named => {}
            Made::Called(arguments) => {
                self.out.push(b'(');
                arguments.iter().try_for_each(|argument| self.value(argument))?;
                self.out.extend(b"tR");
            }
            Made::Built(attributes) => {
                self.out.extend(b")\x81}(");
                for (key, value) in attributes {
                    self.value(key)?;
                    self.value(value)?;
                }
                self.out.extend(b"ub");
            }
        }
        Ok(())
    }

    fn int(&mut self, int: i64) {
        match i32::try_from(int) {
            Ok(small) => {
                self.out.push(b'J');
                self.out.extend(small.to_le_bytes());
            }
            Err(_) => {
                self.out.extend([0x8a, 8]);
                self.out.extend(int.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) -> Result<(), String> {
        let length = u32::try_from(text.len()).map_err(|_| "a text of more than 4 GiB")?;
        self.out.push(b'X');
        self.out.extend(length.to_le_bytes());
        self.out.extend(text.as_bytes());
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str) {
        self.out.extend(format!("c{module}\n{name}\n").as_bytes());
    }

    fn integers(&mut self, integers: &[i64]) {
        self.out.push(b'(');
        integers.iter().for_each(|int| self.int(*int));
        self.out.push(b't');
    }

    fn tensor(&mut self, tensor: &Tensor) -> Result<(), String> {
        if !tensor.defined() {
            return Err("a tensor is undefined: a weight that could not be unsharded".to_owned());
        }
        let torch = |error: tch::TchError| error.to_string();
        let kind = tensor.kind();
        let dtype = DtypeNames::of_kind(kind)
            .filter(|dtype| dtype.is_in_torch_files())
            .ok_or_else(|| format!("a tensor has dtype {kind:?}, which is not written"))?;
        let tensor = tensor.f_to_device(tch::Device::Cpu).and_then(|t| t.f_contiguous()).map_err(torch)?;
        let (size, stride, numel) = (tensor.size(), tensor.stride(), tensor.numel());
        let is_typed = dtype.storage.is_none();
        self.global("torch._utils", if is_typed { "_rebuild_tensor_v3" } else { "_rebuild_tensor_v2" });
        self.out.push(b'('); // arguments
        self.out.push(b'('); // the storage
        self.text("storage")?;
        self.global(
            if is_typed { "torch.storage" } else { "torch" },
            dtype.storage.unwrap_or("UntypedStorage"),
        );
        let key = self.storage(tensor, numel * kind.elt_size_in_bytes());
        self.text(&key.to_string())?;
        self.text("cpu")?;
        self.int(if is_typed { numel * kind.elt_size_in_bytes() } else { numel } as i64);
        self.out.extend(b"tQ");
        self.int(0);
        self.integers(&size);
        self.integers(&stride);
        self.out.push(0x89); // requires_grad
        self.global("collections", "OrderedDict");
        self.out.extend(b")R"); // no hooks
        if is_typed {
            self.global("torch", dtype.name);
        }
        self.out.extend(b"tR");
        Ok(())
    }

    /// The number of the storage that holds a tensor's elements.
    fn storage(&mut self, tensor: Tensor, num_bytes: usize) -> usize {
        let place = (tensor.data_ptr() as usize, num_bytes);
        if num_bytes > 0
            && let Some(key) = self.known.get(&place)
        {
            return *key;
        }
        self.known.insert(place, self.storages.len());
        self.storages.push(tensor);
        self.storages.len() - 1
    }
}
