//! Files of `torch.save`: a zip archive with a pickle and the bytes of each storage beside it, nothing compressed.
//!
//! Source: `torch/serialization.py`. Files are read entry by entry; checksums of the archive are checked.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek, Write};
use std::path::Path;

use tch::{Kind, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::atomic::write_atomically;
use super::budget::{Budget, ReadLimits};
use super::pickle::{self, Stored, Value};
use crate::config::open_file;
use crate::error::{CheckpointError, Error, Problem, Result};

/// Storages begin at multiples of this, as PyTorch writes them, so that it can map the file into memory.
const ALIGNMENT: u16 = 64;
/// Pickles are small: the elements of tensors are beside them.
const MAX_PICKLE: u64 = 1 << 30;
/// Tensors of so many bytes are always read at once.
const SMALL: usize = 1 << 10;

/// Reads a file of `torch.save` within the usual limits. No code of it is executed.
///
/// # Errors
/// As [`read_torch_within`].
pub fn read_torch(path: &Path) -> Result<Value> {
    read_torch_within(path, ReadLimits::default())
}

/// Reads a file of `torch.save`, of which no more is made than `limits` allow. No code of it is executed.
///
/// # Errors
/// [`CheckpointError::Unreadable`] with what is wrong: no such file, damaged, in the format before PyTorch 1.6, too much made of
/// too little, or with values that are not plain data, by the name of their class.
pub fn read_torch_within(path: &Path, limits: ReadLimits) -> Result<Value> {
    let file = open_file(path).map_err(|e| Error::io("read checkpoint", path, e))?;
    read_with(file, path, limits, |archive, bytes, budget| {
        let mut storages: HashMap<String, Tensor> = HashMap::new();
        pickle::read(bytes, budget, &mut |stored, budget| archive.tensor(&mut storages, stored, budget))
    })
}

/// The value of what `torch.save` has written to memory, without executing it.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read_torch_bytes(bytes: &[u8]) -> Result<Value, String> {
    let mut budget = Budget::new(bytes.len() as u64, ReadLimits::default());
    let mut archive = Archive::open(BufReader::new(Cursor::new(bytes)))?;
    let pickle = archive.entry("data.pkl", MAX_PICKLE, &mut budget)?;
    let mut storages: HashMap<String, Tensor> = HashMap::new();
    pickle::read(&pickle, &mut budget, &mut |stored, budget| archive.tensor(&mut storages, stored, budget))
}

/// The archive of a file, whose tensors are read when they are needed.
pub(super) struct TorchTensors {
    file: File,
    /// Where tensors of the value begin, by the address of what stands for them.
    places: HashMap<usize, u64>,
    /// Keeps these addresses taken.
    _stand_ins: Vec<Tensor>,
}

impl TorchTensors {
    /// Where a tensor of the value begins in the file, if it is not in memory.
    pub(super) fn place_of(&self, tensor: &Tensor) -> Option<u64> {
        self.places.get(&(tensor.data_ptr() as usize)).copied()
    }

    /// The file.
    pub(super) fn into_file(self) -> File {
        self.file
    }
}

/// The same with tensors of one element, in any shape, in the place of those that lie in the file as they are: large ones, whose
/// elements are side by side. All entries that are needed are checked, in pieces.
///
/// # Errors
/// As [`read_torch_within`].
pub(super) fn open_torch(path: &Path) -> Result<(Value, TorchTensors)> {
    let file = open_file(path).map_err(|e| Error::io("read checkpoint", path, e))?;
    // by where tensors begin; shared by those that are tied
    let mut stand_ins: HashMap<(String, i64), (Tensor, u64)> = HashMap::new();
    let same = file.try_clone().map_err(|e| Error::io("read checkpoint", path, e))?;
    let value = read_with(same, path, ReadLimits::default(), |archive, bytes, budget| {
        let (mut storages, mut starts) = (HashMap::new(), HashMap::new());
        pickle::read(bytes, budget, &mut |stored, budget| {
            if !is_plain(stored) {
                return archive.tensor(&mut storages, stored, budget);
            }
            let own = (stored.kind, stored.numel);
            let start = match starts.get(stored.key) {
                Some((start, known)) if *known == own => *start,
                Some(_) => return Err(format!("storage {} is used with two dtypes or sizes", stored.key)),
                None => {
                    let start = archive.check(stored)?;
                    starts.insert(stored.key.to_owned(), (start, own));
                    start
                }
            };
            let element = stored.kind.elt_size_in_bytes() as u64;
            let place = start + stored.offset as u64 * element;
            let (stand_in, _) = match stand_ins.entry((stored.key.to_owned(), stored.offset)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(vacant) => {
                    let one = Tensor::f_zeros([1_i64], (stored.kind, tch::Device::Cpu));
                    vacant.insert((one.map_err(|error| error.to_string())?, place))
                }
            };
            stand_in.f_expand(stored.size, false).map_err(|error| error.to_string())
        })
    })?;
    let places = stand_ins.values().map(|(stand_in, place)| (stand_in.data_ptr() as usize, *place)).collect();
    let stand_ins = stand_ins.into_values().map(|(stand_in, _)| stand_in).collect();
    Ok((value, TorchTensors { file, places, _stand_ins: stand_ins }))
}

/// Whether the elements lie side by side, and are many.
fn is_plain(stored: &Stored<'_>) -> bool {
    let mut expected = 1;
    let mut dims = stored.size.iter().zip(stored.stride).rev();
    let is_dense = dims.all(|(size, stride)| {
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    });
    is_dense && expected as usize * stored.kind.elt_size_in_bytes() > SMALL
}

/// Opens the archive, and lets `body` make a value of the pickle.
fn read_with(
    file: File,
    path: &Path,
    limits: ReadLimits,
    body: impl FnOnce(&mut Archive<File>, &[u8], &mut Budget) -> Result<Value, String>,
) -> Result<Value> {
    let size = file.metadata().map_err(|e| Error::io("read checkpoint", path, e))?.len();
    let mut budget = Budget::new(size, limits);
    let mut reader = BufReader::new(file);
    let refuse = |what: String, remedy: &'static str| -> Error {
        CheckpointError::Unreadable { path: path.to_path_buf(), problem: Problem::new(what, remedy) }.into()
    };
    let mut head = [0; 16];
    let mut length = 0;
    while let Ok(more @ 1..) = reader.read(&mut head[length..]) {
        length += more;
    }
    if let Some((what, remedy)) = other_format(&head[..length]) {
        return Err(refuse(what.to_owned(), remedy));
    }
    let read = || -> Result<Value, String> {
        reader.rewind().map_err(|error| error.to_string())?;
        let mut archive = Archive::open(reader)?;
        let bytes = archive.entry("data.pkl", MAX_PICKLE, &mut budget)?;
        body(&mut archive, &bytes, &mut budget)
    };
    read().map_err(|what| {
        let remedy = if what.ends_with("max_growth") || what.contains("is max_growth") {
            "if you trust the file, raise max_growth (--max_growth of convert)"
        } else if what.contains("plain data") {
            "save plain data, such as model.state_dict(), or load the file in Python and save it again"
        } else {
            "use another checkpoint"
        };
        refuse(what, remedy)
    })
}

/// What a file is that is not an archive, and what to do about it.
fn other_format(head: &[u8]) -> Option<(&'static str, &'static str)> {
    let old = "load it with Python's torch.load and save it again with torch.save";
    match head {
        [b'P', b'K', 3, 4, ..] => None,
        [0x80, 2, 0x8a, ..] => Some(("it is in PyTorch's format from before version 1.6", old)),
        [0x80, 2..=5, ..] => Some(("it is a bare pickle, not a file of torch.save", old)),
        _ => Some(("it is not a file of PyTorch", "use a file of torch.save, Lightning or safetensors")),
    }
}

struct Archive<R> {
    zip: ZipArchive<BufReader<R>>,
    /// Name of the one folder, with a slash.
    folder: String,
}

impl<R: Read + Seek> Archive<R> {
    fn open(reader: BufReader<R>) -> Result<Self, String> {
        let zip = ZipArchive::new(reader).map_err(|error| format!("its archive is damaged: {error}"))?;
        let names = zip.file_names().filter_map(Result::ok);
        let mut folders: Vec<String> =
            names.filter_map(|name| Some(name.strip_suffix("data.pkl")?.to_owned())).collect();
        let (Some(folder), true) = (folders.pop(), folders.is_empty()) else {
            return Err("its archive does not have one entry `data.pkl`".to_owned());
        };
        let mut archive = Self { folder, zip };
        let has_order = archive.zip.index_for_name(&format!("{}byteorder", archive.folder)).is_some();
        let mut few = Budget::new(0, ReadLimits::default());
        if has_order && archive.entry("byteorder", 16, &mut few)? != b"little" {
            return Err("it was written on a machine with another byte order".to_owned());
        }
        Ok(archive)
    }

    /// The bytes of an entry, at most so many.
    fn entry(&mut self, name: &str, most: u64, budget: &mut Budget) -> Result<Vec<u8>, String> {
        let full = format!("{}{name}", self.folder);
        let damaged = |what: String| format!("entry {name} of its archive is damaged: {what}");
        let entry = self.zip.by_name(&full).map_err(|error| damaged(error.to_string()))?;
        if entry.compression() != CompressionMethod::Stored {
            return Err(damaged("it is compressed".to_owned()));
        }
        if entry.size() > most {
            return Err(damaged(format!("it has {} bytes, at most {most} are expected", entry.size())));
        }
        // entries may lie on each other, so that a file is as large as all of them only if it is honest
        budget.take(usize::try_from(entry.size()).unwrap_or(usize::MAX))?;
        let mut bytes = Vec::new();
        entry.take(most + 1).read_to_end(&mut bytes).map_err(|error| damaged(error.to_string()))?;
        Ok(bytes)
    }

    /// A tensor, of a storage that is read once.
    fn tensor(
        &mut self,
        known: &mut HashMap<String, Tensor>,
        stored: &Stored<'_>,
        budget: &mut Budget,
    ) -> Result<Tensor, String> {
        let storage = self.storage(known, budget, (stored.key, stored.kind, stored.numel))?;
        stored.of(&storage, budget)
    }

    /// Where a storage begins in the file, all of which is there and has the right checksum.
    fn check(&mut self, stored: &Stored<'_>) -> Result<u64, String> {
        let name = format!("data/{}", stored.key);
        let damaged = |what: String| format!("entry {name} of its archive is damaged: {what}");
        let full = format!("{}{name}", self.folder);
        let mut entry = self.zip.by_name(&full).map_err(|error| damaged(error.to_string()))?;
        if entry.compression() != CompressionMethod::Stored {
            return Err(damaged("it is compressed".to_owned()));
        }
        let expected =
            stored.numel.checked_mul(stored.kind.elt_size_in_bytes()).ok_or("a storage is too large")?;
        if entry.size() != expected as u64 || entry.compressed_size() != entry.size() {
            let (key, found) = (stored.key, entry.size());
            return Err(format!("storage {key} has {found} bytes, its tensors need {expected}"));
        }
        let start = entry.data_start().ok_or_else(|| damaged("its place is not known".to_owned()))?;
        let read =
            std::io::copy(&mut entry, &mut std::io::sink()).map_err(|error| damaged(error.to_string()))?;
        if read != expected as u64 {
            return Err(damaged(format!("{read} of its {expected} bytes are there")));
        }
        Ok(start)
    }

    /// The elements of a storage, which several tensors may share.
    fn storage(
        &mut self,
        known: &mut HashMap<String, Tensor>,
        budget: &mut Budget,
        (key, kind, numel): (&str, Kind, usize),
    ) -> Result<Tensor, String> {
        if let Some(tensor) = known.get(key) {
            if tensor.kind() == kind && tensor.numel() == numel {
                return Ok(tensor.shallow_clone());
            }
            return Err(format!("storage {key} is used with two dtypes or sizes"));
        }
        let expected = numel.checked_mul(kind.elt_size_in_bytes()).ok_or("a storage is too large")?;
        let bytes = self.entry(&format!("data/{key}"), expected as u64, budget)?;
        if bytes.len() != expected {
            return Err(format!("storage {key} has {} bytes, its tensors need {expected}", bytes.len()));
        }
        let tensor =
            Tensor::f_from_data_size(&bytes, &[numel as i64], kind).map_err(|error| error.to_string())?;
        known.insert(key.to_owned(), tensor.shallow_clone());
        Ok(tensor)
    }
}

/// Writes a file that `torch.load` reads, also with `weights_only=True`; see [`write_atomically`].
///
/// # Errors
/// If the file cannot be written, or a tensor has a dtype that such files do not hold.
pub fn write_torch(value: &Value, path: &Path) -> Result<()> {
    let written = pickle::write(value).map_err(|what| CheckpointError::Mismatch {
        module: path.display().to_string(),
        problem: Problem::new(what, "cast the tensor"),
    })?;
    write_atomically(path, |file| {
        let mut zip = ZipWriter::new(file);
        let mut entry = |name: &str, bytes: &[u8]| -> std::io::Result<()> {
            let options = SimpleFileOptions::default()
                .compression_method(CompressionMethod::Stored)
                .large_file(bytes.len() >= u32::MAX as usize)
                .with_alignment(ALIGNMENT);
            zip.start_file(format!("archive/{name}"), options)?;
            zip.write_all(bytes)
        };
        entry("data.pkl", &written.pickle)?;
        entry("byteorder", b"little")?;
        for (key, tensor) in written.storages.iter().enumerate() {
            let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
            if !bytes.is_empty() {
                tensor.copy_data_u8(&mut bytes, tensor.numel());
            }
            entry(&format!("data/{key}"), &bytes)?;
        }
        entry("version", b"3\n")?;
        zip.finish()?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_tied_tensors_stay_tied() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        let weight = Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).reshape([2, 3]);
        let kinds = [Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Bool, Kind::Float8e4m3fn];
        let mut entries = vec![
            ("a".to_owned(), Value::Tensor(weight.shallow_clone())),
            ("b".to_owned(), Value::Tensor(weight.shallow_clone())),
            ("t".to_owned(), Value::Tensor(weight.tr())),
            ("empty".to_owned(), Value::Tensor(Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu)))),
            ("big".to_owned(), Value::Int(-(1 << 40))),
            ("x".to_owned(), Value::Tuple(vec![Value::Float(0.1), Value::None, Value::Bool(true)])),
            ("bytes".to_owned(), Value::Bytes(vec![0, 200, 255])),
            ("text".to_owned(), Value::List(vec![Value::Text("\u{e4}\u{4e2d}".to_owned())])),
        ];
        entries.extend(kinds.map(|kind| (format!("{kind:?}"), Value::Tensor(weight.to_kind(kind)))));
        write_torch(&Value::dict(entries), &path).expect("writes");
        let read = read_torch(&path).expect("reads");
        let tensor = |key: &str| read.get(key).and_then(Value::as_tensor).expect(key);
        assert_eq!(tensor("a").data_ptr(), tensor("b").data_ptr());
        assert_eq!(tensor("t"), &weight.tr());
        assert_eq!(tensor("empty").size(), [0, 3]);
        for kind in kinds {
            let found = tensor(&format!("{kind:?}"));
            assert_eq!(found.kind(), kind);
            assert_eq!(found.to_kind(Kind::Float), weight.to_kind(kind).to_kind(Kind::Float));
        }
        let rest = ["big", "x", "bytes", "text"].map(|key| format!("{:?}", read.get(key).expect(key)));
        let expected = [
            "Int(-1099511627776)",
            "Tuple([Float(0.1), None, Bool(true)])",
            "Bytes([0, 200, 255])",
            "List([Text(\"\u{e4}\u{4e2d}\")])",
        ];
        assert_eq!(rest, expected);
    }

    #[test]
    fn tensors_whose_elements_lie_side_by_side_may_stay_in_the_file() {
        let is_plain = |size: &[i64], stride: &[i64]| {
            let (key, kind, numel, offset) = ("0", Kind::Float, 1 << 20, 3);
            super::is_plain(&Stored { key, kind, numel, offset, size, stride })
        };
        assert!(is_plain(&[64, 48], &[48, 1]));
        assert!(is_plain(&[64, 1, 48], &[48, 7, 1]), "the stride of one element says nothing");
        assert!(!is_plain(&[64, 48], &[1, 64]), "across");
        assert!(!is_plain(&[64, 40], &[48, 1]), "with gaps");
        assert!(!is_plain(&[8, 16, 3, 3], &[144, 1, 48, 16]), "channels last");
        assert!(!is_plain(&[16, 16], &[16, 1]) && !is_plain(&[0, 48], &[48, 1]), "small");
    }

    /// Reads a pickle without tensors.
    fn read_pickle(pickle: &[u8]) -> Result<Value, String> {
        let mut budget = Budget::new(pickle.len() as u64, ReadLimits::default());
        pickle::read(pickle, &mut budget, &mut |_, _| Err("there are no storages".to_owned()))
    }

    #[test]
    fn what_is_no_plain_data_is_refused_by_name() {
        for (pickle, expected) in [
            (&b"cos\nsystem\n(X\x02\0\0\0lstR."[..], "`os.system` is refused"),
            (b"c__builtin__\neval\n.", "`__builtin__.eval` is refused"),
            (b"X\x03\0\0\0abcX\x03\0\0\0def\x93.", "`abc.def` is refused"),
            (b"ctorch\nFloatStorage\n)R.", "plain data"),
            (b"i", "instruction 0x69 is unknown"),
            (b"]q\0h\0a.", "nest deeper"),
            (b"h\x05.", "memo 5 is used before"),
            (b"a.", "where there is none"),
            (b"X\xff\xff\xff\xffab", "ends in the middle"),
        ] {
            let error = read_pickle(pickle).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
        // each list holds the one before twice: 2^60 values in a few bytes
        let bomb: Vec<u8> =
            b"]".iter().chain(b"q\0](h\0h\0e".repeat(60).iter()).chain(b".").copied().collect();
        let error = read_pickle(&bomb).expect_err("too large");
        assert!(error.contains("more than") || error.contains("deeper"), "{error}");
    }

    /// A namespace to which it gives itself doubles; copies, paths and arguments grow by a few bytes each. Each pickle makes a few
    /// times what it may, so that a reader that counts too little would read it.
    #[test]
    fn a_few_bytes_do_not_make_gigabytes() {
        let text = [&b"X\0\0\x01\0"[..], &vec![b'a'; 1 << 16], b"q\x01"].concat();
        let many = |start: &[u8], part: &[u8], count: usize| [start, &part.repeat(count), b"."].concat();
        let list = [&b"]q\x01("[..], &b"N".repeat(1 << 17), b"e0"].concat();
        let tuple = [&b"("[..], &b"N".repeat(1 << 17), b"tq\x01cbuiltins\nlist\nq\x02"].concat();
        for (name, bomb) in [
            (
                "a namespace given itself",
                many(b"cargparse\nNamespace\n)Rq\x01}(NNuq\x02b0h\x01h\x01b", b"h\x01b", 24),
            ),
            (
                "lists copied",
                many(&[&list[..], b"cbuiltins\nlist\nq\x02"].concat(), b"h\x02h\x01\x85R0", 1_000),
            ),
            ("long arguments", many(&tuple, b"h\x02h\x01R0", 1_000)),
            ("a path of long parts", many(&[&text[..], b"cpathlib\nPath\n("].concat(), b"h\x01", 5_000)),
            (
                "texts encoded",
                many(&[&text[..], b"c_codecs\nencode\nq\x02"].concat(), b"h\x02h\x01\x85R0", 5_000),
            ),
        ] {
            let bomb =
                if name.starts_with("a path") { [&bomb[..bomb.len() - 1], b"tR."].concat() } else { bomb };
            let error = read_pickle(&bomb).expect_err(name);
            assert!(error.contains("max_growth"), "{name}: {error}");
        }
    }

    /// An archive with one storage of 512 x 512 floats that lies in the file once, and tensors of it: each with the key of its
    /// storage and its strides. All keys lead to the same bytes.
    fn overlapping(tensors: &[(usize, [u32; 2])]) -> Vec<u8> {
        const NUMEL: u32 = 512 * 512;
        let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let int = |int: u32| [&b"J"[..], &int.to_le_bytes()].concat();
        let pair = |a: u32, b: u32| [int(a), int(b), b"\x86".to_vec()].concat();
        let mut pickle = b"\x80\x02}(".to_vec();
        for (index, (key, stride)) in tensors.iter().enumerate() {
            let storage =
                [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text(&key.to_string()), text("cpu")]
                    .concat();
            pickle.extend(
                [text(&index.to_string()), b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(), storage]
                    .concat(),
            );
            pickle
                .extend([int(NUMEL), b"tQK\0".to_vec(), pair(512, 512), pair(stride[0], stride[1])].concat());
            pickle.extend(b"\x89}tR");
        }
        pickle.extend(b"u.");
        let (mut file, mut directory) = (Vec::new(), Vec::new());
        let keys: std::collections::BTreeSet<usize> = tensors.iter().map(|(key, _)| *key).collect();
        let contents = [(vec!["a/data.pkl".to_owned()], pickle), {
            (keys.iter().map(|key| format!("a/data/{key}")).collect(), vec![0; 4 * NUMEL as usize])
        }];
        let mut num_entries = 0_u16;
        for (names, bytes) in contents {
            let offset = file.len() as u32;
            let size = (bytes.len() as u32).to_le_bytes();
            let crc = crc32fast::hash(&bytes).to_le_bytes();
            // flags, method, time and date; checksum and sizes
            let common = [&[0_u8, 0, 0, 0, 0, 0, 0x21, 0][..], &crc, &size, &size].concat();
            let length = |name: &str| (name.len() as u16).to_le_bytes();
            file.extend(
                [&b"PK\x03\x04\x14\0"[..], &common, &length(&names[0]), &[0, 0], names[0].as_bytes(), &bytes]
                    .concat(),
            );
            for name in &names {
                let end = [&[0; 12][..], &offset.to_le_bytes(), name.as_bytes()].concat();
                directory.extend([&b"PK\x01\x02\x14\0\x14\0"[..], &common, &length(name), &end].concat());
                num_entries += 1;
            }
        }
        let (at, size) = ((file.len() as u32).to_le_bytes(), (directory.len() as u32).to_le_bytes());
        let count = num_entries.to_le_bytes();
        [&file[..], &directory, b"PK\x05\x06\0\0\0\0", &count, &count, &size, &at, &[0, 0]].concat()
    }

    #[test]
    fn entries_that_overlap_and_transposed_copies_count_each_time() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        let read = |tensors: &[(usize, [u32; 2])], max_growth| {
            std::fs::write(&path, overlapping(tensors)).expect("writable");
            read_torch_within(&path, ReadLimits { max_growth })
        };
        read(&[(0, [512, 1]), (1, [1, 512])], 16).expect("a few are no harm");
        let (overlapping, transposed) = ((0..100).map(|key| (key, [512, 1])), (0..45).map(|_| (0, [1, 512])));
        for tensors in [overlapping.collect::<Vec<_>>(), transposed.collect()] {
            let error = read(&tensors, 16).expect_err("too much").to_string();
            assert!(error.contains("16 times its size"), "{error}");
            read(&tensors, 300).expect("is allowed");
        }
    }

    #[test]
    fn tensors_that_share_bytes_of_the_file_count_each_time() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        let weight = Tensor::zeros([512, 512], (Kind::Float, tch::Device::Cpu)); // 1 MiB
        let copies = (0..90).map(|i| (i.to_string(), Value::Tensor(weight.shallow_clone())));
        write_torch(&Value::dict(copies), &path).expect("writes");
        let error = read_torch(&path).expect_err("too much").to_string();
        assert!(error.contains("16 times its size") && error.contains("--max_growth"), "{error}");
        read_torch_within(&path, ReadLimits { max_growth: 100 }).expect("is allowed");
    }

    #[test]
    fn other_formats_are_named() {
        let folder = tempfile::tempdir().expect("temp folder");
        let path = folder.path().join("a.pt");
        for (bytes, expected) in [
            (
                &b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."[..],
                "before version 1.6; load it with Python",
            ),
            (b"\x80\x04\x95.", "a bare pickle"),
            (b"hello", "not a file of PyTorch"),
            (b"", "not a file of PyTorch"),
            (b"PK\x03\x04", "archive is damaged"),
        ] {
            std::fs::write(&path, bytes).expect("writable");
            let error = read_torch(&path).expect_err(expected).to_string();
            assert!(error.contains(expected) && error.contains("a.pt"), "{error}");
        }
    }
}
