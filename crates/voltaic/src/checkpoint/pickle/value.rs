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
