//! The format of TensorBoard's event files: records framed as in TensorFlow's TFRecord files, each a protocol buffer
//! message `Event` (`tensorboard/compat/proto/event.proto`, `summary.proto`, `plugins/hparams/*.proto`).
//!
//! A record is its length (`u64`), the masked CRC-32C of the length, the bytes, and the masked CRC-32C of the bytes, all
//! little-endian.

use std::io::{Read, Write};

use serde_json::Value;

/// Writes one record.
///
/// # Errors
/// Those of the writer.
pub fn write_record(writer: &mut impl Write, bytes: &[u8]) -> std::io::Result<()> {
    let length = (bytes.len() as u64).to_le_bytes();
    writer.write_all(&length)?;
    writer.write_all(&masked_crc32c(&length).to_le_bytes())?;
    writer.write_all(bytes)?;
    writer.write_all(&masked_crc32c(bytes).to_le_bytes())
}

/// Bytes of a record in a file.
pub(super) fn framed(bytes: &[u8]) -> u64 {
    8 + 4 + bytes.len() as u64 + 4
}

/// Reads one record; `None` at the end of the file, also in the middle of a record that is still being written.
///
/// # Errors
/// If a checksum is wrong, and those of the reader.
pub fn read_record(reader: &mut impl Read) -> std::io::Result<Option<Vec<u8>>> {
    let damaged =
        || std::io::Error::new(std::io::ErrorKind::InvalidData, "a checksum of the event file is wrong");
    let (mut length, mut crc) = ([0; 8], [0; 4]);
    for part in [&mut length[..], &mut crc[..]] {
        match reader.read_exact(part) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
    }
    if u32::from_le_bytes(crc) != masked_crc32c(&length) {
        return Err(damaged());
    }
    let length = u64::from_le_bytes(length);
    let mut bytes = Vec::new();
    reader.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length || reader.read_exact(&mut crc).is_err() {
        return Ok(None);
    }
    if u32::from_le_bytes(crc) == masked_crc32c(&bytes) { Ok(Some(bytes)) } else { Err(damaged()) }
}

/// CRC with Castagnoli's polynomial, a byte at a time.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0_u32; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut crc = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ (crc >> 8))
}

/// TensorFlow rotates the CRC, since a CRC of data that holds CRCs says little.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protocol buffer message being written. Fields are numbered.
#[derive(Debug, Clone, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn int(mut self, field: u64, value: u64) -> Self {
        self.key(field, 0);
        self.varint(value);
        self
    }

    fn double(mut self, field: u64, value: f64) -> Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    fn message(self, field: u64, value: &Message) -> Self {
        self.bytes(field, &value.0)
    }
}

/// A `SessionLog` with status START.
const START_STATUS: [u8; 2] = [1 << 3, 1];

/// One `Event`.
#[derive(Debug, Clone)]
pub struct Event(Message);

impl Event {
    /// The first event of a file.
    pub fn version(wall_time: f64) -> Self {
        Self(Message::default().double(1, wall_time).text(3, "brain.Event:2"))
    }

    /// The start of a session: TensorBoard drops what was written before it from `step` on.
    pub fn session_start(wall_time: f64, step: u64) -> Self {
        let session = Message(START_STATUS.to_vec());
        Self(Message::default().double(1, wall_time).int(2, step).message(7, &session))
    }

    /// Scalars of one step; `wall_time` in seconds since 1970.
    pub fn scalars(wall_time: f64, step: u64, scalars: &[(String, f64)]) -> Self {
        let values =
            scalars.iter().map(|(tag, value)| Message::default().text(1, tag).float(2, *value as f32));
        Self::summary(wall_time, step, values)
    }

    fn summary(wall_time: f64, step: u64, values: impl Iterator<Item = Message>) -> Self {
        let summary = values.fold(Message::default(), |summary, value| summary.message(1, &value));
        Self(Message::default().double(1, wall_time).int(2, step).message(5, &summary))
    }

    /// The bytes of the record.
    pub fn encode(&self) -> &[u8] {
        &self.0.0
    }
}

/// What a record says of how it changes what TensorBoard shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// It shows values of a step.
    Values(u64),
    /// It drops what was written before it, from a step on.
    Drops(u64),
}

impl Effect {
    /// That of a record that was read; `None` without one, or if the record is not an `Event`.
    pub(super) fn of(mut record: &[u8]) -> Option<Self> {
        let (mut step, mut has_values, mut drops) = (0, false, false);
        while !record.is_empty() {
            let key = take_varint(&mut record)?;
            let length = match key & 7 {
                0 => {
                    let value = take_varint(&mut record)?;
                    step = if key >> 3 == 2 { value } else { step };
                    continue;
                }
                1 => 8,
                5 => 4,
                _ => usize::try_from(take_varint(&mut record)?).ok()?,
            };
            let (content, rest) = record.split_at_checked(length)?;
            record = rest;
            has_values |= key >> 3 == 5;
            drops |= key >> 3 == 7 && content.starts_with(&START_STATUS);
        }
        match (drops, has_values) {
            (true, _) => Some(Self::Drops(step)),
            (false, true) => Some(Self::Values(step)),
            (false, false) => None,
        }
    }
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// The three events of a run for TensorBoard's HPARAMS page: which hyper-parameters and metrics there are, the values, and the end.
pub fn hparams(wall_time: f64, hparams: &[(String, Value)], metrics: &[(String, f64)]) -> [Event; 3] {
    const SUCCESS: u64 = 1;
    let mut experiment = Message::default().double(3, wall_time);
    let mut start = Message::default();
    for (name, value) in hparams {
        let (kind, value) = hparam(value);
        experiment = experiment.message(4, &Message::default().text(1, name).int(4, kind));
        start = start.message(1, &Message::default().text(1, name).message(2, &value));
    }
    for (tag, _) in metrics {
        let name = Message::default().text(2, tag);
        experiment = experiment.message(5, &Message::default().message(1, &name));
    }
    let start = start.double(5, wall_time);
    let end = Message::default().int(1, SUCCESS).double(2, wall_time);
    [
        (2, "_hparams_/experiment", experiment),
        (3, "_hparams_/session_start_info", start),
        (4, "_hparams_/session_end_info", end),
    ]
    .map(|(field, tag, content)| {
        let data = Message::default().message(field, &content);
        let plugin = Message::default().text(1, "hparams").message(2, &data);
        // TensorBoard requires a value: a float32 tensor of shape [0]
        let shape = Message::default().message(2, &Message::default());
        let tensor = Message::default().int(1, 1).message(2, &shape);
        let metadata = Message::default().message(1, &plugin);
        let value = Message::default().text(1, tag).message(9, &metadata).message(8, &tensor);
        Event::summary(wall_time, 0, std::iter::once(value))
    })
}

/// Type and value of a hyper-parameter, as a `google.protobuf.Value`; what is not a scalar is shown as text.
fn hparam(value: &Value) -> (u64, Message) {
    const STRING: u64 = 1;
    const BOOL: u64 = 2;
    const FLOAT64: u64 = 3;
    match value {
        Value::Bool(flag) => (BOOL, Message::default().int(4, u64::from(*flag))),
        Value::Number(number) => (FLOAT64, Message::default().double(2, number.as_f64().unwrap_or(f64::NAN))),
        Value::String(text) => (STRING, Message::default().text(3, text)),
        other => (STRING, Message::default().text(3, &other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of a message: number, and a varint, the bits of a number, or bytes.
    #[derive(Debug, PartialEq)]
    enum Field {
        Int(u64, u64),
        Fixed(u64, u64),
        Bytes(u64, Vec<u8>),
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }

    fn fields(mut bytes: &[u8]) -> Vec<Field> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let mut take = |n: usize| {
                let (head, rest) = bytes.split_at(n);
                bytes = rest;
                head.to_vec()
            };
            fields.push(match key & 7 {
                0 => Field::Int(key >> 3, varint(&mut bytes)),
                1 => Field::Fixed(key >> 3, u64::from_le_bytes(take(8).try_into().expect("8 bytes"))),
                5 => Field::Fixed(key >> 3, u32::from_le_bytes(take(4).try_into().expect("4 bytes")).into()),
                _ => {
                    let length = varint(&mut bytes) as usize;
                    let (head, rest) = bytes.split_at(length);
                    bytes = rest;
                    Field::Bytes(key >> 3, head.to_vec())
                }
            });
        }
        fields
    }

    #[test]
    fn the_effect_of_a_record_is_read_back() {
        let values = [("loss".to_owned(), 0.5)];
        let effect = |event: Event| Effect::of(event.encode());
        assert_eq!(effect(Event::scalars(1.0, 300, &values)), Some(Effect::Values(300)));
        assert_eq!(effect(Event::scalars(1.0, 0, &values)), Some(Effect::Values(0)));
        assert_eq!(effect(Event::session_start(1.0, 1 << 40)), Some(Effect::Drops(1 << 40)));
        assert_eq!(effect(Event::version(1.0)), None);
        let whole = Event::scalars(1.0, 300, &values);
        for length in 1..whole.encode().len() {
            assert!(Effect::of(&whole.encode()[..length]).is_none_or(|effect| effect == Effect::Values(300)));
        }
        assert_eq!(Effect::of(&[0xff; 20]), None);
    }

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_come_back_and_damage_is_seen() {
        let mut file = Vec::new();
        for record in [&b"one"[..], b"", b"three"] {
            write_record(&mut file, record).expect("writes");
        }
        let mut reader = &file[..];
        let mut records = Vec::new();
        while let Some(record) = read_record(&mut reader).expect("whole") {
            records.push(record);
        }
        assert_eq!(records, [&b"one"[..], b"", b"three"]);
        for at in 0..19 {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(read_record(&mut &damaged[..]).is_err(), "byte {at}");
        }
        assert_eq!(read_record(&mut &file[..10]).expect("being written"), None);
    }

    #[test]
    fn an_event_has_its_step_its_time_and_its_scalars() {
        let event = Event::scalars(2.5, 300, &[("loss".into(), 0.5), ("acc".into(), f64::NAN)]);
        let found = fields(event.encode());
        assert_eq!(found[..2], [Field::Fixed(1, 2.5_f64.to_bits()), Field::Int(2, 300)]);
        let Field::Bytes(5, summary) = &found[2] else { panic!("{found:?}") };
        let values = fields(summary);
        let Field::Bytes(1, first) = &values[0] else { panic!("{values:?}") };
        let expected = [Field::Bytes(1, b"loss".to_vec()), Field::Fixed(2, u64::from(0.5_f32.to_bits()))];
        assert_eq!(fields(first), expected);
        assert_eq!(values.len(), 2);
    }
}
