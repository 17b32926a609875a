//! What may be done with bytes of unknown origin: anything but panic, hang, or take memory without end.

use std::path::Path;

use burn_fsdp_dcp::{Checkpoint, HfCheckpoint, Region, TensorSource, TorchCheckpoint};

/// Larger tensors are not read, as their bytes are not there.
const READ_AT_MOST: u64 = 1 << 24;

/// A manifest. The first byte says whether the rest is the whole file, or a body whose frame is right.
pub fn manifest(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let file = match kind % 2 {
        0 => bytes.to_vec(),
        _ => framed(bytes),
    };
    let dir = tempfile::tempdir().expect("a directory");
    write(dir.path(), "manifest", &file);
    if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
        let _ = checkpoint.verify(|_| ());
        read_all(&checkpoint);
    }
}

/// The frame of a table, which random changes would not get past.
fn framed(body: &[u8]) -> Vec<u8> {
    let mut file = b"BFSDPDCP\x01\0\0\0".to_vec();
    file.extend((body.len() as u64).to_le_bytes());
    file.extend(body);
    let checksum = crc32fast::hash(&file);
    file.extend(checksum.to_le_bytes());
    file
}

/// The body of a manifest that is right: two chunks of a tensor, and a state, in a file that is not there.
pub fn small_manifest() -> Vec<u8> {
    // Its id, step, time and world size.
    let mut body = vec![7, 1, 2, 2];
    body.extend(b"\x01\x04loss");
    body.extend(0.5f64.to_le_bytes());
    body.extend(b"\x01\x01f\x40\0\0");
    body.extend(b"\x01\x01t\x03F32\x02\x02\x03\x02");
    for row in [0, 1] {
        body.extend([2, row, 0, 2, 1, 3, 0, 8 + 12 * row, 12, 1, 0]);
    }
    body.extend(b"\x01\x01s\x01\x01\0\0\x20\x04\x01\0");
    body
}

/// A safetensors file. The first byte says whether the rest is all of it, or a header that is followed by
/// zeros.
pub fn safetensors(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let file = match kind % 2 {
        0 => bytes.to_vec(),
        _ => {
            let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
            file.extend(bytes);
            file.resize(file.len() + 16 * usize::from(*kind), 0);
            file
        }
    };
    let dir = tempfile::tempdir().expect("a directory");
    write(dir.path(), "model.safetensors", &file);
    if let Ok(source) = HfCheckpoint::open(dir.path()) {
        read_all(&source);
    }
}

/// A checkpoint of PyTorch, of which the first byte says which file the rest is.
pub fn torch(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let metadata = include_bytes!("../../burn-fsdp-dcp/tests/data/dcp_torch_odd/.metadata");
    let data = include_bytes!("../../burn-fsdp-dcp/tests/data/dcp_torch_odd/__0_0.distcp");
    let (metadata, data): (&[u8], &[u8]) = match kind % 2 {
        0 => (bytes, data),
        _ => (metadata, bytes),
    };
    let dir = tempfile::tempdir().expect("a directory");
    write(dir.path(), ".metadata", metadata);
    write(dir.path(), "__0_0.distcp", data);
    if let Ok(source) = TorchCheckpoint::open(dir.path()) {
        read_all(&source);
    }
}

fn write(dir: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(dir.join(name), bytes).expect("it is written");
}

fn read_all(source: &dyn TensorSource) {
    for (name, info) in source.tensors() {
        if info.bytes() <= READ_AT_MOST {
            let _ = source.read(name, &Region::whole(&info.shape));
        }
    }
}

/// Two regions of a small tensor: what one run after another copies is what copying each element does.
///
/// # Panics
///
/// If not.
pub fn regions(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut next = |below: u64| u64::from(bytes.next().unwrap_or(0)) % below;
    let rank = next(5) as usize;
    let mut region = || {
        let offsets = (0..rank).map(|_| next(6)).collect();
        let sizes = (0..rank).map(|_| next(6)).collect();
        Region { offsets, sizes }
    };
    let (from, to) = (region(), region());
    let volume = |region: &Region| region.volume().expect("it is small") as usize;
    let mut copied = vec![None; volume(&to)];
    for run in from.runs(&to) {
        for i in 0..run.len {
            let place = &mut copied[(run.to + i) as usize];
            assert_eq!(*place, None, "{from:?} to {to:?} copies twice");
            *place = Some(run.from + i);
        }
    }
    for (n, copied) in copied.into_iter().enumerate() {
        let at = coordinates(&to, n as u64);
        assert_eq!(copied, place(&from, &at), "{from:?} to {to:?} at {at:?}");
    }
    assert!(
        from.runs(&to)
            .all(|run| run.from + run.len <= volume(&from) as u64)
    );
}

/// Where the n-th element of a region is.
fn coordinates(region: &Region, mut n: u64) -> Vec<u64> {
    let mut at = region.offsets.clone();
    for d in (0..at.len()).rev() {
        at[d] += n % region.sizes[d];
        n /= region.sizes[d];
    }
    at
}

/// The number of an element in a region, if it is in there.
fn place(region: &Region, at: &[u64]) -> Option<u64> {
    let mut place = 0;
    for (d, at) in at.iter().enumerate() {
        let within = at.checked_sub(region.offsets[d])?;
        if within >= region.sizes[d] {
            return None;
        }
        place = place * region.sizes[d] + within;
    }
    Some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_manifest_is_one() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "manifest", &framed(&small_manifest()));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.manifest().payload_bytes(), 28);
    }
}
