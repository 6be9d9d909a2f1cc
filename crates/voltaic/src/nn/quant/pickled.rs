//! Files of `numpy.savez` that hold one pickled object, as Habana's tools read them. voltaic only writes them.

use std::io::{self, Cursor, Seek, Write};

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// What is pickled.
pub(super) enum Object {
    None,
    Integer(i32),
    Text(String),
    List(Vec<Object>),
    Dict(Vec<(String, Object)>),
    /// A matrix of one column, float32.
    Column(Vec<f32>),
}

/// `numpy.array` of one argument that is on the stack with the name of a dtype: numpy finds its own function by that name in all
/// versions.
const ARRAY: &[u8] = b"cnumpy\narray\n";

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Object {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::None => out.push(b'N'),
            Self::Integer(number) => {
                out.push(b'J');
                out.extend(number.to_le_bytes());
            }
            Self::Text(value) => text(out, value),
            Self::List(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| item.write(out));
                out.push(b'e');
            }
            Self::Dict(entries) => {
                out.extend(b"}(");
                for (key, value) in entries {
                    text(out, key);
                    value.write(out);
                }
                out.push(b'u');
            }
            Self::Column(numbers) => {
                out.extend(ARRAY);
                out.extend(b"(](");
                for number in numbers {
                    out.extend(b"](G");
                    out.extend(f64::from(*number).to_be_bytes());
                    out.push(b'e');
                }
                out.push(b'e');
                text(out, "float32");
                out.extend(b"tR");
            }
        }
    }

    /// An array of no dimensions that holds this object.
    fn pickled(&self) -> Vec<u8> {
        let mut out = b"\x80\x02".to_vec();
        out.extend(ARRAY);
        out.push(b'(');
        self.write(&mut out);
        text(&mut out, "object");
        out.extend(b"tR.");
        out
    }

    /// Writes it as `numpy.savez(file, object)` does: `arr_0`.
    pub(super) fn write_npz(&self, out: &mut impl Write) -> io::Result<()> {
        let mut header = "{'descr': '|O', 'fortran_order': False, 'shape': (), }".to_owned();
        let magic = b"\x93NUMPY\x01\x00";
        let length = magic.len() + 2 + header.len() + 1;
        header.extend(std::iter::repeat_n(' ', length.next_multiple_of(64) - length));
        header.push('\n');
        let mut bytes = magic.to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(self.pickled());
        let whole = zipped("arr_0.npy", &bytes, Cursor::new(Vec::new()))?.into_inner();
        out.write_all(&whole)
    }
}

fn zipped<W: Write + Seek>(name: &str, bytes: &[u8], to: W) -> io::Result<W> {
    let mut archive = ZipWriter::new(to);
    let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    archive.start_file(name, options)?;
    archive.write_all(bytes)?;
    Ok(archive.finish()?)
}
