//! The idx format of MNIST's files: a big-endian header, then unsigned bytes.
//!
//! Bytes 0-1 are 0, byte 2 is the element type (8 = unsigned byte), byte 3 the number of dimensions; then one 32-bit
//! size per dimension. Files may be compressed by gzip.

use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use md5::{Digest, Md5};

use crate::config::open_file;
use crate::error::{DataError, Problem};
use crate::{Error, Result};

const REMEDY: &str =
    "get the file again (`scripts/data.sh mnist` brings the full set, data/digits holds a part of it)";

/// A compressed file unpacks to at most so many bytes, and so many times its size: a few megabytes of gzip can be gigabytes.
const FLOOR: u64 = 64 << 20;
const MAX_RATIO: u64 = 64;

/// An array of unsigned bytes and its shape.
pub(super) struct Idx {
    pub sizes: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// `folder/name` or `folder/name.gz`, whichever is there, plain first.
pub(super) fn file_in(folder: &Path, name: &str) -> Option<PathBuf> {
    [folder.join(name), folder.join(format!("{name}.gz"))].into_iter().find(|path| path.is_file())
}

/// A file's unpacked content and how much of it has been read.
struct Content {
    path: PathBuf,
    reader: Box<dyn Read>,
    offset: u64,
    /// It unpacks to no more bytes.
    most: u64,
}

impl Content {
    fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::io("open", path, error);
        let file = open_file(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let (reader, most): (Box<dyn Read>, u64) =
            if path.extension().is_some_and(|extension| extension == "gz") {
                let most = size.saturating_mul(MAX_RATIO).saturating_add(FLOOR);
                (Box::new(MultiGzDecoder::new(BufReader::new(file))), most)
            } else {
                (Box::new(file), u64::MAX - 1)
            };
        Ok(Self { path: path.to_owned(), reader, offset: 0, most })
    }

    fn corrupt(&self, offset: u64, what: impl Into<String>) -> Error {
        let (what, remedy) = (what.into(), REMEDY.to_owned());
        DataError::Corrupt { path: self.path.clone(), offset, problem: Problem::new(what, remedy) }.into()
    }

    /// Up to `limit` bytes: fewer only at the end.
    fn read(&mut self, limit: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let left = self.most.saturating_sub(self.offset);
        let read = self.reader.by_ref().take(limit.min(left + 1)).read_to_end(&mut bytes);
        self.offset += bytes.len() as u64;
        read.map_err(|error| self.read_error(error))?;
        if bytes.len() as u64 > left {
            let what =
                format!("it unpacks to more than {} bytes, 64 MiB and {MAX_RATIO} times its size", self.most);
            let problem = Problem::new(what, "if the file is right, unpack it with gunzip");
            let (path, offset) = (self.path.clone(), self.offset);
            return Err(DataError::Corrupt { path, offset, problem }.into());
        }
        Ok(bytes)
    }

    fn read_error(&self, error: io::Error) -> Error {
        match error.kind() {
            ErrorKind::UnexpectedEof => {
                self.corrupt(self.offset, "the compressed stream ends here, before its end mark")
            }
            ErrorKind::InvalidInput | ErrorKind::InvalidData => {
                self.corrupt(self.offset, format!("the compressed stream is damaged ({error})"))
            }
            _ => Error::io("read", &self.path, error),
        }
    }

    /// The header's sizes.
    fn header(&mut self, num_dims: usize) -> Result<Vec<usize>> {
        let header = self.read(4 + 4 * num_dims as u64)?;
        let word = |at: usize| {
            let bytes = header.get(at..at + 4)?;
            Some(bytes.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte)))
        };
        let expected = 0x0800 | num_dims as u32;
        match word(0) {
            Some(magic) if magic == expected => {}
            Some(magic) if magic >> 16 == 0x1f8b => {
                return Err(self.corrupt(0, "this is gzip data in a file whose name does not end in .gz"));
            }
            Some(magic) => {
                let what = format!("the magic number is {magic:#010x}, not {expected:#010x}");
                return Err(self.corrupt(0, what));
            }
            None => {}
        }
        let sizes: Option<Vec<usize>> =
            (0..num_dims).map(|dim| word(4 + 4 * dim).map(|size| size as usize)).collect();
        let Some(sizes) = sizes else {
            let (found, needed) = (header.len(), 4 + 4 * num_dims);
            return Err(
                self.corrupt(found as u64, format!("the file ends within its header of {needed} bytes"))
            );
        };
        if let Some(dim) = sizes.iter().position(|&size| size == 0) {
            return Err(self.corrupt(4 + 4 * dim as u64, format!("dimension {dim} has size 0")));
        }
        Ok(sizes)
    }
}

/// The sizes that the header of a file promises; nothing else is read.
pub(super) fn read_sizes(path: &Path, num_dims: usize) -> Result<Vec<usize>> {
    Content::open(path)?.header(num_dims)
}

/// Reads a whole file.
///
/// # Errors
/// [`DataError::Corrupt`] if the content is not exactly what its header promises.
pub(super) fn read(path: &Path, num_dims: usize) -> Result<Idx> {
    let mut content = Content::open(path)?;
    let sizes = content.header(num_dims)?;
    let start = content.offset;
    // One byte more than promised shows whether there is too much; the buffer grows with what is really there.
    let promised = sizes.iter().try_fold(1_u64, |total, &size| total.checked_mul(size as u64));
    let Some(promised) = promised.filter(|&total| total < 1 << 40) else {
        return Err(content.corrupt(4, format!("sizes {sizes:?} promise more than any such file holds")));
    };
    let bytes = content.read(promised + 1)?;
    let found = bytes.len() as u64;
    if found < promised {
        let what =
            format!("the file ends after {found} of the {promised} bytes that sizes {sizes:?} promise");
        return Err(content.corrupt(start + found, what));
    }
    if found > promised {
        let what = format!("the file continues after the {promised} bytes that sizes {sizes:?} promise");
        return Err(content.corrupt(start + promised, what));
    }
    Ok(Idx { sizes, bytes })
}

/// md5 of a file's unpacked content, in hexadecimal.
pub(super) fn md5_of_content(path: &Path) -> Result<String> {
    const PIECE: u64 = 1 << 20;
    let mut content = Content::open(path)?;
    let mut sum = Md5::new();
    loop {
        let piece = content.read(PIECE)?;
        if piece.is_empty() {
            return Ok(sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        }
        sum.update(&piece);
    }
}

/// A [`DataError::Corrupt`] found by who reads the values.
pub(super) fn corrupt(path: &Path, offset: u64, what: String) -> Error {
    DataError::Corrupt { path: path.to_owned(), offset, problem: Problem::new(what, REMEDY) }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn a_small_file_does_not_unpack_to_gigabytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gz");
        let mut encoder =
            flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        let size = 100 << 20;
        encoder.write_all(&[&[0, 0, 8, 1][..], &(size as u32).to_be_bytes()].concat()).unwrap();
        (0..100).for_each(|_| encoder.write_all(&vec![0; 1 << 20]).unwrap());
        encoder.finish().unwrap();
        for error in [read(&path, 1).err().unwrap(), md5_of_content(&path).unwrap_err()] {
            assert!(error.to_string().contains("unpacks to more than"), "{error}");
            assert!(error.to_string().contains("gunzip"), "{error}");
        }
    }

    #[test]
    fn the_sum_is_that_of_the_unpacked_content() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, packed) = (folder.path().join("a"), folder.path().join("b.gz"));
        let text = "abc".repeat(700_000); // more than one piece
        std::fs::write(&plain, &text).unwrap();
        let mut encoder =
            flate2::write::GzEncoder::new(File::create(&packed).unwrap(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap();
        let expected = "063b501377cdf46ee5c5cb9f58881874";
        assert_eq!(md5_of_content(&plain).unwrap(), expected);
        assert_eq!(md5_of_content(&packed).unwrap(), expected);
    }
}
