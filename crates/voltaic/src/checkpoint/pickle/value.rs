//! What a pickle holds.

use tch::Tensor;

/// Plain data of a pickle. Sets are lists, and named tuples, `torch.Size` are tuples; paths, dtypes and devices are text.
#[derive(Debug)]
pub enum Value {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A string.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list or set.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dictionary, in its order.
    Dict(Vec<(Value, Value)>),
    /// A tensor on the CPU.
    Tensor(Tensor),
    /// What Python makes of a class when it reads the file. Only written: a reader gives the data of it.
    Object(Object),
}

/// An instance of a Python class, or the class itself.
#[derive(Debug)]
pub struct Object {
    pub(super) module: &'static str,
    pub(super) name: &'static str,
    pub(super) made: Made,
}

/// How an [`Object`] is made.
#[derive(Debug)]
pub(super) enum Made {
    /// It is the class or value that has the name.
    Named,
    /// The class is called with these arguments.
    Called(Vec<Value>),
    /// The class makes an instance, which gets these attributes.
    Built(Vec<(Value, Value)>),
}

impl Value {
    /// The value at a key of a dictionary.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries()?
            .iter()
            .rev()
            .find(|(k, _)| matches!(k, Value::Text(text) if text == key))
            .map(|(_, v)| v)
    }

    /// Keys and values of a dictionary.
    pub fn entries(&self) -> Option<&[(Value, Value)]> {
        if let Self::Dict(entries) = self { Some(entries) } else { None }
    }

    /// Elements of a list or tuple.
    pub fn items(&self) -> Option<&[Value]> {
        if let Self::List(items) | Self::Tuple(items) = self { Some(items) } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// A whole number; also a float that is one.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(int) => Some(*int),
            Self::Float(float) if float.fract() == 0.0 && float.abs() < 9e15 => Some(*float as i64),
            _ => None,
        }
    }

    /// A number, also that of a tensor of one element.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Int(int) => Some(*int as f64),
            Self::Float(float) => Some(*float),
            Self::Tensor(tensor) if tensor.numel() == 1 => tensor.f_double_value(&[]).ok(),
            _ => None,
        }
    }

    /// A tensor.
    pub fn as_tensor(&self) -> Option<&Tensor> {
        if let Self::Tensor(tensor) = self { Some(tensor) } else { None }
    }

    /// A dictionary with text keys.
    pub fn dict<K: Into<String>>(entries: impl IntoIterator<Item = (K, Value)>) -> Self {
        Self::Dict(entries.into_iter().map(|(key, value)| (Self::Text(key.into()), value)).collect())
    }

    /// A shape, as `torch.Size`.
    pub(in crate::checkpoint) fn size(shape: &[i64]) -> Self {
        let sizes = Self::Tuple(shape.iter().map(|&size| Self::Int(size)).collect());
        Self::Object(Object { module: "torch", name: "Size", made: Made::Called(vec![sizes]) })
    }

    /// What has a name in Python, such as `torch.float16`.
    pub(in crate::checkpoint) fn named(module: &'static str, name: &'static str) -> Self {
        Self::Object(Object { module, name, made: Made::Named })
    }

    /// An instance with these attributes.
    pub(in crate::checkpoint) fn built<const N: usize>(
        module: &'static str,
        name: &'static str,
        attributes: [(&str, Value); N],
    ) -> Self {
        let attributes = attributes.map(|(key, value)| (Self::Text(key.to_owned()), value));
        Self::Object(Object { module, name, made: Made::Built(attributes.into()) })
    }

    /// As JSON; tensors of one element are numbers, tuples are lists, numbers that are not finite are text.
    ///
    /// # Errors
    /// The path of a value that JSON cannot hold.
    pub fn to_json(&self) -> Result<serde_json::Value, String> {
        use serde_json::Value as Json;
        let float = |value: f64| {
            serde_json::Number::from_f64(value).map_or_else(|| Json::from(value.to_string()), Json::Number)
        };
        Ok(match self {
            Self::None => Json::Null,
            Self::Bool(flag) => Json::Bool(*flag),
            Self::Int(int) => Json::from(*int),
            Self::Float(value) => float(*value),
            Self::Text(text) => Json::String(text.clone()),
            Self::Bytes(bytes) => Json::from(bytes.clone()),
            Self::List(items) | Self::Tuple(items) => {
                let items = items.iter().enumerate();
                Json::Array(
                    items
                        .map(|(i, item)| item.to_json().map_err(|path| format!("{i}.{path}")))
                        .collect::<Result<_, _>>()?,
                )
            }
            Self::Dict(entries) => {
                let mut map = serde_json::Map::new();
                for (key, value) in entries {
                    let name = match key {
                        Self::Text(text) => text.clone(),
                        Self::Int(int) => int.to_string(),
                        Self::Bool(flag) => flag.to_string(),
                        other => return Err(format!("{other:?} as a key")),
                    };
                    let json = value.to_json().map_err(|path| format!("{name}.{path}"))?;
                    map.insert(name, json);
                }
                Json::Object(map)
            }
            Self::Tensor(tensor) => match self.as_f64() {
                Some(value) => float(value),
                None => return Err(format!("a tensor of shape {:?}", tensor.size())),
            },
            Self::Object(Object { module, name, .. }) => return Err(format!("an object of {module}.{name}")),
        })
    }

    /// From JSON.
    pub fn from_json(json: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match json {
            Json::Null => Self::None,
            Json::Bool(flag) => Self::Bool(*flag),
            Json::Number(number) => match number.as_i64() {
                Some(int) => Self::Int(int),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::Text(text.clone()),
            Json::Array(items) => Self::List(items.iter().map(Self::from_json).collect()),
            Json::Object(map) => {
                Self::dict(map.iter().map(|(key, value)| (key.clone(), Self::from_json(value))))
            }
        }
    }
}
