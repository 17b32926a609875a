//! The ZIP archives that `torch.save` writes, whose entries are stored as they are: where an entry's
//! bytes lie, and the other way round.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;

use crc32fast::Hasher;

const LOCAL_HEADER: [u8; 4] = *b"PK\x03\x04";
const CENTRAL_HEADER: [u8; 4] = *b"PK\x01\x02";
const DESCRIPTOR: [u8; 4] = *b"PK\x07\x08";
const END: [u8; 4] = *b"PK\x05\x06";
const END64: [u8; 4] = *b"PK\x06\x06";
const END64_LOCATOR: [u8; 4] = *b"PK\x06\x07";

const LOCAL_LEN: u64 = 30;
const CENTRAL_LEN: u64 = 46;
const END_LEN: u64 = 22;
const END64_LEN: u64 = 56;
const LOCATOR_LEN: u64 = 20;

/// Stands in a field of 32 bits for a value that is elsewhere, in 64.
const ELSEWHERE: u32 = u32::MAX;
const ZIP64_EXTRA: u16 = 1;
/// The extra field that `torch.save` pads local headers with.
const PADDING_EXTRA: [u8; 2] = *b"FB";
const ALIGNMENT: u64 = 64;

/// Sizes follow the data, and names are UTF-8.
const FLAGS: u16 = 0x0808;
const ENCRYPTED: u16 = 1;
const STORED: u16 = 0;

/// How much is read at once from either end of an archive. The ends hold all but the data.
const END_PIECE: u64 = 2048;

/// What bytes can be read from, at any place.
pub(super) trait ReadAt {
    /// Fills the buffer from `offset` on.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    #[cfg(unix)]
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buf, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            let n = std::os::windows::fs::FileExt::seek_read(self, buf, offset)?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buf = &mut buf[n..];
            offset += n as u64;
        }
        Ok(())
    }
}

/// Why an archive is not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZipError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Malformed(String),
}

type Result<T> = std::result::Result<T, ZipError>;

fn bad<T>(detail: impl Into<String>) -> Result<T> {
    Err(ZipError::Malformed(detail.into()))
}

/// Where the bytes of an entry are in the archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) start: u64,
    pub(super) len: u64,
    /// The checksum of the bytes, unless none was computed.
    pub(super) crc: Option<u32>,
}

/// An archive in a range of a file.
pub(super) struct Archive<'a> {
    file: &'a dyn ReadAt,
    range: Range<u64>,
    head: Vec<u8>,
    tail: Vec<u8>,
    directory: Range<u64>,
    entries: Vec<Entry>,
}

/// What the central directory says of an entry.
#[derive(Clone, Debug)]
struct Entry {
    name: Vec<u8>,
    header: u64,
    len: u64,
    crc: u32,
}

impl<'a> Archive<'a> {
    /// Reads the central directory of the archive in a range, which the file is known to have.
    pub(super) fn open(file: &'a dyn ReadAt, range: Range<u64>) -> Result<Self> {
        let len = range.end - range.start;
        let piece = len.min(END_PIECE);
        let mut archive = Self {
            file,
            head: vec![0; piece as usize],
            tail: vec![0; piece as usize],
            range,
            directory: 0..0,
            entries: Vec::new(),
        };
        file.read_at(&mut archive.head, archive.range.start)?;
        file.read_at(&mut archive.tail, archive.range.end - piece)?;
        let (directory, count) = archive.find_directory()?;
        archive.entries = archive.read_directory(&directory, count)?;
        archive.directory = directory;
        Ok(archive)
    }

    /// The bytes of the entry of this name in the only folder of the archive.
    pub(super) fn find(&self, name: &str) -> Result<Option<Stored>> {
        let is_it = |entry: &&Entry| {
            let slash = entry.name.iter().position(|b| *b == b'/');
            slash.is_some_and(|at| &entry.name[at + 1..] == name.as_bytes())
        };
        let mut found = self.entries.iter().filter(is_it);
        match (found.next(), found.next()) {
            (None, _) => Ok(None),
            (Some(entry), None) => self.locate(entry).map(Some),
            _ => bad(format!("the archive has {name} twice")),
        }
    }

    /// Reads an entry whole, and checks it.
    pub(super) fn read(&self, entry: Stored) -> Result<Cow<'_, [u8]>> {
        let bytes = self.bytes(entry.start, entry.len)?;
        if entry.crc.is_some_and(|crc| crc != crc32fast::hash(&bytes)) {
            return bad("an entry of the archive fails its checksum");
        }
        Ok(bytes)
    }

    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Where the central directory is, and the number of its entries.
    fn find_directory(&self) -> Result<(Range<u64>, u64)> {
        let Some(end_at) = self.len().checked_sub(END_LEN) else {
            return bad("it is too short for an archive");
        };
        let end = self.bytes(end_at, END_LEN)?;
        if end[..4] != END || u16_at(&end, 20) != 0 {
            return bad("it does not end as an archive does");
        }
        let mut count = u64::from(u16_at(&end, 10));
        let mut len = u64::from(u32_at(&end, 12));
        let mut start = u64::from(u32_at(&end, 16));
        let mut limit = end_at;
        if let Some(locator_at) = end_at.checked_sub(LOCATOR_LEN) {
            let locator = self.bytes(locator_at, LOCATOR_LEN)?;
            if locator[..4] == END64_LOCATOR {
                limit = u64_at(&locator, 8);
                let end64 = self.bytes(limit, END64_LEN)?;
                if end64[..4] != END64 {
                    return bad("its ZIP64 end is not where the locator says");
                }
                count = u64_at(&end64, 32);
                len = u64_at(&end64, 40);
                start = u64_at(&end64, 48);
            }
        }
        match start.checked_add(len) {
            Some(end) if end == limit && count <= len / CENTRAL_LEN => Ok((start..end, count)),
            _ => bad("its central directory is not where its end says"),
        }
    }

    fn read_directory(&self, directory: &Range<u64>, count: u64) -> Result<Vec<Entry>> {
        let bytes = self.bytes(directory.start, directory.end - directory.start)?;
        let mut rest = &bytes[..];
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(read_central(&mut rest)?);
        }
        if !rest.is_empty() {
            return bad("its central directory has bytes left over");
        }
        Ok(entries)
    }

    /// The local header has a name and padding of its own, so where the data begins only it says.
    fn locate(&self, entry: &Entry) -> Result<Stored> {
        let name = String::from_utf8_lossy(&entry.name);
        let misplaced = || bad(format!("the entry {name} is not where the directory says"));
        if entry.header.saturating_add(LOCAL_LEN) > self.directory.start {
            return misplaced();
        }
        let header = self.bytes(entry.header, LOCAL_LEN)?;
        let name_len = u64::from(u16_at(&header, 26));
        let extra_len = u64::from(u16_at(&header, 28));
        if header[..4] != LOCAL_HEADER || name_len != entry.name.len() as u64 {
            return misplaced();
        }
        if *self.bytes(entry.header + LOCAL_LEN, name_len)? != entry.name {
            return misplaced();
        }
        let start = entry.header + LOCAL_LEN + name_len + extra_len;
        match start.checked_add(entry.len) {
            // Another part of the archive follows; if none does, a length is wrong.
            Some(end) if end <= self.directory.start && *self.bytes(end, 2)? == *b"PK" => {}
            _ => return misplaced(),
        }
        Ok(Stored {
            start,
            len: entry.len,
            // `torch.save` can be told not to compute any, and then writes zeros.
            crc: Some(entry.crc).filter(|crc| *crc != 0),
        })
    }

    fn bytes(&self, at: u64, len: u64) -> Result<Cow<'_, [u8]>> {
        let Some(end) = at.checked_add(len).filter(|end| *end <= self.len()) else {
            return bad("it is cut short");
        };
        let tail_at = self.len() - self.tail.len() as u64;
        if end <= self.head.len() as u64 {
            return Ok(Cow::Borrowed(&self.head[at as usize..end as usize]));
        }
        if at >= tail_at {
            let tail = &self.tail[(at - tail_at) as usize..];
            return Ok(Cow::Borrowed(&tail[..len as usize]));
        }
        let mut bytes = vec![0; len as usize];
        self.file.read_at(&mut bytes, self.range.start + at)?;
        Ok(Cow::Owned(bytes))
    }
}

/// Takes one entry from the front of a central directory.
fn read_central(rest: &mut &[u8]) -> Result<Entry> {
    let cut_short = || ZipError::Malformed("its central directory is cut short".into());
    let header = take(rest, CENTRAL_LEN as usize).ok_or_else(cut_short)?;
    if header[..4] != CENTRAL_HEADER {
        return bad("its central directory has no entry where one is due");
    }
    let name = take(rest, u16_at(header, 28).into()).ok_or_else(cut_short)?;
    let extra = take(rest, u16_at(header, 30).into()).ok_or_else(cut_short)?;
    take(rest, u16_at(header, 32).into()).ok_or_else(cut_short)?;
    let flags = u16_at(header, 8);
    let method = u16_at(header, 10);
    if flags & ENCRYPTED != 0 || method != STORED {
        return bad("its entries are compressed or encrypted");
    }
    let mut wide = wide_fields(extra);
    let mut field = |at: usize| match u32_at(header, at) {
        ELSEWHERE => wide.next().ok_or_else(cut_short),
        n => Ok(u64::from(n)),
    };
    // In the order in which the extra field holds them.
    let len = field(24)?;
    let stored_len = field(20)?;
    let header_at = field(42)?;
    if stored_len != len {
        return bad("an entry has two lengths");
    }
    Ok(Entry {
        name: name.to_vec(),
        header: header_at,
        len,
        crc: u32_at(header, 16),
    })
}

/// The 64-bit values among the extra fields.
fn wide_fields(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut values: &[u8] = &[];
    while let Some(head) = take(&mut extra, 4) {
        let Some(field) = take(&mut extra, u16_at(head, 2).into()) else {
            break;
        };
        if u16_at(head, 0) == ZIP64_EXTRA {
            values = field;
        }
    }
    values.chunks_exact(8).map(|value| u64_at(value, 0))
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len)?;
    *rest = left;
    Some(taken)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// Writes an archive as a stream: the checksum of an entry follows its data.
pub(super) struct ArchiveWriter<W> {
    out: W,
    at: u64,
    entries: Vec<Entry>,
    crc: Hasher,
    /// The lowest number that is written in 64 bits.
    wide_from: u64,
}

impl<W: Write> ArchiveWriter<W> {
    pub(super) fn new(out: W) -> Self {
        Self::with_wide_from(out, ELSEWHERE.into())
    }

    fn with_wide_from(out: W, wide_from: u64) -> Self {
        Self {
            out,
            at: 0,
            entries: Vec::new(),
            crc: Hasher::new(),
            wide_from,
        }
    }

    /// Writes an entry.
    pub(super) fn entry(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.begin(name, bytes.len() as u64)?;
        self.write(bytes)?;
        self.end()
    }

    /// Begins an entry of `len` bytes.
    pub(super) fn begin(&mut self, name: &str, len: u64) -> io::Result<()> {
        let header = self.at;
        // The padding lets a program that maps the file use the data in place.
        let unpadded = header + LOCAL_LEN + name.len() as u64 + 4;
        let padding = unpadded.next_multiple_of(ALIGNMENT) - unpadded;
        let mut fields = Fields::default();
        fields.bytes(&LOCAL_HEADER);
        fields.u16s(&[0, FLAGS, STORED, 0, 0]);
        fields.u32s(&[0, 0, 0]);
        fields.u16s(&[name.len() as u16, padding as u16 + 4]);
        fields.bytes(name.as_bytes());
        fields.bytes(&PADDING_EXTRA);
        fields.u16s(&[padding as u16]);
        fields.0.extend((0..padding).map(|_| b'Z'));
        self.put(&fields.0)?;
        self.crc = Hasher::new();
        self.entries.push(Entry {
            name: name.as_bytes().to_vec(),
            header,
            len,
            crc: 0,
        });
        Ok(())
    }

    /// Writes the next bytes of the entry begun last.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.put(bytes)
    }

    /// Ends an entry all of whose bytes are written.
    pub(super) fn end(&mut self) -> io::Result<()> {
        let crc = self.crc.clone().finalize();
        let mut fields = Fields::default();
        fields.bytes(&DESCRIPTOR);
        fields.u32s(&[crc]);
        if let Some(entry) = self.entries.last_mut() {
            entry.crc = crc;
            if entry.len < self.wide_from {
                fields.u32s(&[entry.len as u32; 2]);
            } else {
                fields.u64s(&[entry.len; 2]);
            }
        }
        self.put(&fields.0)
    }

    /// Writes the central directory, and says how long the archive is.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        let start = self.at;
        let entries = std::mem::take(&mut self.entries);
        for entry in &entries {
            let fields = self.central(entry);
            self.put(&fields.0)?;
        }
        let end64_at = self.at;
        let len = end64_at - start;
        let count = entries.len() as u64;
        let mut fields = Fields::default();
        fields.bytes(&END64);
        fields.u64s(&[END64_LEN - 12]);
        fields.u16s(&[45, 45]);
        fields.u32s(&[0, 0]);
        fields.u64s(&[count, count, len, start]);
        fields.bytes(&END64_LOCATOR);
        fields.u32s(&[0]);
        fields.u64s(&[end64_at]);
        fields.u32s(&[1]);
        fields.bytes(&END);
        fields.u16s(&[0, 0, count as u16, count as u16]);
        fields.u32s(&[self.narrow(len), self.narrow(start)]);
        fields.u16s(&[0]);
        self.put(&fields.0)?;
        Ok(self.at)
    }

    fn central(&self, entry: &Entry) -> Fields {
        let (len, header) = (self.narrow(entry.len), self.narrow(entry.header));
        let mut wide = Fields::default();
        if len == ELSEWHERE {
            wide.u64s(&[entry.len; 2]);
        }
        if header == ELSEWHERE {
            wide.u64s(&[entry.header]);
        }
        let extra_len = if wide.0.is_empty() {
            0
        } else {
            wide.0.len() + 4
        };
        let mut fields = Fields::default();
        fields.bytes(&CENTRAL_HEADER);
        fields.u16s(&[0, 0, FLAGS, STORED, 0, 0]);
        fields.u32s(&[entry.crc, len, len]);
        fields.u16s(&[entry.name.len() as u16, extra_len as u16, 0, 0, 0]);
        fields.u32s(&[0, header]);
        fields.bytes(&entry.name);
        if extra_len > 0 {
            fields.u16s(&[ZIP64_EXTRA, wide.0.len() as u16]);
            fields.bytes(&wide.0);
        }
        fields
    }

    fn narrow(&self, n: u64) -> u32 {
        if n < self.wide_from {
            n as u32
        } else {
            ELSEWHERE
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.at += bytes.len() as u64;
        self.out.write_all(bytes)
    }
}

/// Fields of a header, one after another.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn u16s(&mut self, values: &[u16]) {
        self.0.extend(values.iter().flat_map(|n| n.to_le_bytes()));
    }

    fn u32s(&mut self, values: &[u32]) {
        self.0.extend(values.iter().flat_map(|n| n.to_le_bytes()));
    }

    fn u64s(&mut self, values: &[u64]) {
        self.0.extend(values.iter().flat_map(|n| n.to_le_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ReadAt for Vec<u8> {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            let source = self.get(offset as usize..offset as usize + buf.len());
            buf.copy_from_slice(source.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    /// An archive with `before` bytes in front of it.
    fn archive(before: usize, wide_from: u64, data: &[u8]) -> Vec<u8> {
        let mut file = vec![7; before];
        let mut writer = ArchiveWriter::with_wide_from(&mut file, wide_from);
        writer.entry("archive/data.pkl", b"pickle").unwrap();
        writer.begin("archive/data/0", data.len() as u64).unwrap();
        data.chunks(1000)
            .for_each(|piece| writer.write(piece).unwrap());
        writer.end().unwrap();
        let len = writer.finish().unwrap();
        assert_eq!(len as usize, file.len() - before);
        file
    }

    fn read(file: &Vec<u8>, before: u64, name: &str) -> Result<Vec<u8>> {
        let archive = Archive::open(file, before..file.len() as u64)?;
        match archive.find(name)? {
            Some(entry) => Ok(archive.read(entry)?.into_owned()),
            None => bad("not found"),
        }
    }

    #[test]
    fn entries_are_read_from_an_archive_anywhere_in_a_file() {
        for len in [0, 1, 100, 10_000] {
            let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            for before in [0, 13] {
                let file = archive(before, ELSEWHERE.into(), &data);
                assert_eq!(read(&file, before as u64, "data/0").unwrap(), data);
                assert_eq!(read(&file, before as u64, "data.pkl").unwrap(), b"pickle");
                read(&file, before as u64, "data/1").unwrap_err();
            }
        }
    }

    #[test]
    fn data_begins_at_a_multiple_of_64_of_its_archive() {
        let file = archive(5, ELSEWHERE.into(), &[1; 3000]);
        let archive = Archive::open(&file, 5..file.len() as u64).unwrap();
        let entry = archive.find("data/0").unwrap().unwrap();
        assert_eq!((entry.start % 64, entry.len), (0, 3000));
        assert_eq!(file[5 + entry.start as usize], 1);
    }

    #[test]
    fn sizes_and_places_in_64_bits_are_read() {
        for wide_from in [0, 100, 1000] {
            let file = archive(3, wide_from, &[5; 5000]);
            assert_eq!(read(&file, 3, "data/0").unwrap(), [5; 5000]);
            assert_eq!(read(&file, 3, "data.pkl").unwrap(), b"pickle");
        }
    }

    #[test]
    fn an_archive_cut_at_either_end_is_refused() {
        let file = archive(0, 100, &[5; 200]);
        for len in 0..file.len() {
            assert!(Archive::open(&file[..len].to_vec(), 0..len as u64).is_err());
        }
        for from in 1..file.len() {
            assert!(read(&file, from as u64, "data/0").is_err());
        }
    }

    #[test]
    fn a_changed_byte_gives_no_other_data() {
        let mut file = archive(0, 100, &[5; 200]);
        for at in 0..file.len() {
            for mask in 1..=255 {
                file[at] ^= mask;
                if let Ok(data) = read(&file, 0, "data/0") {
                    // The place of the checksum itself, when it says that there is none.
                    assert_eq!(data, [5; 200], "byte {at}");
                }
                file[at] ^= mask;
            }
        }
    }

    #[test]
    fn a_compressed_entry_is_refused() {
        let file = archive(0, ELSEWHERE.into(), b"");
        let at = file.windows(4).position(|w| w == CENTRAL_HEADER).unwrap();
        let mut compressed = file.clone();
        compressed[at + 10] = 8;
        let error = read(&compressed, 0, "data/0").unwrap_err();
        assert!(error.to_string().contains("compressed"), "{error}");
    }
}
