//! How many ranks a node gets.

use std::env;
use std::fs;
use std::str::FromStr;

use crate::failure::Failure;

/// More ranks or nodes are a mistake.
const MOST: usize = 65_536;

/// A number of ranks or nodes.
pub(crate) fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=MOST) => Ok(count),
        _ => Err(format!("give a number from 1 to {MOST}")),
    }
}

/// Ranks of a node, as asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nproc {
    Count(usize),
    /// One for each CUDA device.
    Auto,
}

impl FromStr for Nproc {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            count => parse_count(count)
                .map(Self::Count)
                .map_err(|why| format!("{why}, or auto")),
        }
    }
}

impl Nproc {
    pub(crate) fn resolve(self) -> Result<usize, Failure> {
        match self {
            Self::Count(count) => Ok(count),
            Self::Auto => match env::var("CUDA_VISIBLE_DEVICES") {
                Ok(visible) => at_least_one(
                    listed(&visible),
                    &format!("CUDA_VISIBLE_DEVICES is \"{visible}\""),
                ),
                Err(_) => at_least_one(device_files(), "there is no /dev/nvidia0"),
            },
        }
    }
}

fn at_least_one(devices: usize, why_none: &str) -> Result<usize, Failure> {
    if devices > 0 {
        return Ok(devices);
    }
    Err(Failure::usage(format!(
        "--nproc auto counts the CUDA devices, and {why_none}; give a number of ranks"
    )))
}

/// Devices up to the first that is none, as CUDA reads the list.
fn listed(visible: &str) -> usize {
    let is_device = |name: &&str| !name.is_empty() && !name.starts_with('-');
    visible
        .split(',')
        .map(str::trim)
        .take_while(is_device)
        .count()
}

fn device_files() -> usize {
    let Ok(files) = fs::read_dir("/dev") else {
        return 0;
    };
    let names = files.flatten().map(|file| file.file_name());
    names
        .filter(|name| name.to_str().is_some_and(is_device_file))
        .count()
}

fn is_device_file(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_a_number_of_at_least_one() {
        assert_eq!("3".parse(), Ok(Nproc::Count(3)));
        assert_eq!("auto".parse(), Ok(Nproc::Auto));
        for text in ["0", "-1", "", "four", "1.5", "65537", "Auto"] {
            let why = text.parse::<Nproc>().unwrap_err();
            assert!(why.contains("from 1 to 65536, or auto"), "{why}");
        }
    }

    #[test]
    fn visible_devices_are_counted_as_cuda_does() {
        for (visible, count) in [
            ("0", 1),
            ("0,1,2", 3),
            ("3, 1", 2),
            ("GPU-8932f937,GPU-1a2b", 2),
            ("0,-1,1", 1),
            ("-1", 0),
            ("", 0),
            ("0,,1", 1),
        ] {
            assert_eq!(listed(visible), count, "{visible}");
        }
    }

    #[test]
    fn device_files_are_those_with_a_number() {
        assert!(is_device_file("nvidia0") && is_device_file("nvidia15"));
        for other in ["nvidia", "nvidiactl", "nvidia-uvm", "nvidia0a", "tty0"] {
            assert!(!is_device_file(other), "{other}");
        }
    }
}
