//! stub
/// stub
pub fn to_yaml(v: &serde_json::Value) -> String { v.to_string() }
