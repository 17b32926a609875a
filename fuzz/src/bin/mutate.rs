//! Random changes to files of the tests, for where libFuzzer is not to be had.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::catch_unwind;
use std::time::{Duration, Instant};

use burn_fsdp_fuzz::{manifest, regions, safetensors, torch};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, target, seconds, seed @ ..] = &arguments[..] else {
        panic!("mutate TARGET SECONDS [SEED]");
    };
    let run: fn(&[u8]) = match target.as_str() {
        "manifest" => manifest,
        "safetensors" => safetensors,
        "torch" => torch,
        "regions" => regions,
        other => panic!("there is no target {other}"),
    };
    let limit = Duration::from_secs(seconds.parse().expect("a number of seconds"));
    let seed = seed.first().map_or_else(
        || RandomState::new().build_hasher().finish(),
        |seed| seed.parse().expect("a seed"),
    );
    println!("{target}: seed {seed}");
    let seeds = seeds(target);
    let mut random = Random(seed | 1);
    let (mut runs, mut failures, mut slowest) = (0u64, 0, Duration::ZERO);
    let start = Instant::now();
    while start.elapsed() < limit {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        // Most are changed little, so that they get far.
        for _ in 0..1 + random.below(8) * random.below(2) {
            mutate(&mut bytes, &seeds, &mut random);
        }
        let before = Instant::now();
        if catch_unwind(|| run(&bytes)).is_err() {
            failures += 1;
            keep(target, failures, &bytes);
        }
        slowest = slowest.max(before.elapsed());
        runs += 1;
    }
    println!("{target}: {runs} runs, {failures} failures, the slowest {slowest:?}");
    assert_eq!(failures, 0);
}

fn keep(target: &str, number: u32, bytes: &[u8]) {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/artifacts");
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(format!("{dir}/{target}-{number}"), bytes).expect("it is written");
}

/// What a target takes, and each of its kinds.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../burn-fsdp-dcp/tests/data");
    let read = |name: &str| std::fs::read(format!("{data}/{name}")).expect("data of the tests");
    let with_kind = |kind: u8, bytes: &[u8]| [&[kind], bytes].concat();
    match target {
        "manifest" => {
            let body = burn_fsdp_fuzz::small_manifest();
            vec![with_kind(1, &body), with_kind(1, &[0; 24])]
        }
        "safetensors" => {
            let header = br#"{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"I64","shape":[],"data_offsets":[32,40]}}"#;
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header);
            file.extend([0; 40]);
            vec![with_kind(0, &file), with_kind(5, header)]
        }
        "torch" => vec![
            with_kind(0, &read("dcp_torch_odd/.metadata")),
            with_kind(0, &read("dcp_torch_no_crc/.metadata")),
            with_kind(1, &read("dcp_torch_odd/__0_0.distcp")),
        ],
        _ => vec![vec![4; 17], (0..17).collect()],
    }
}

fn mutate(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
    }
    let at = random.below(bytes.len());
    let end = at + random.below((bytes.len() - at).min(16) + 1);
    match random.below(8) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => bytes[at] = [0, 1, 127, 128, 250, 251, 252, 253, 254, 255][random.below(10)],
        3 => bytes.truncate(at + 1),
        4 => drop(bytes.drain(at..end)),
        5 => {
            let again = bytes[at..end].to_vec();
            bytes.splice(at..at, again);
        }
        6 => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len());
            let piece = &other[from..(from + random.below(16)).min(other.len())];
            bytes.splice(at..end, piece.iter().copied());
        }
        _ => {
            let number = random.next() >> random.below(64);
            let len = (bytes.len() - at).min(1 << random.below(4));
            bytes[at..at + len].copy_from_slice(&number.to_le_bytes()[..len]);
        }
    }
}

/// Marsaglia's xorshift, as it need not be better.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 11) as usize % end
    }
}
