//! How numbers and names are written.

use burn::tensor::DType;
use burn_fsdp_dcp::{DcpError, TorchValue, dtype_name};

/// Line breaks and runs of spaces become single spaces.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Bytes in the unit that suits them.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // 1023.96 would be written as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A count with its noun.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// Seconds since 1970 as date and time.
pub(crate) fn utc(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have their odd day at the end; 400 of them have 146,097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, turn) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = era * 400 + year + turn;
    let (hour, minute, second) = (time / 3_600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// An element type by its usual name, or by that in Burn.
pub(crate) fn dtype(dtype: DType) -> String {
    dtype_name(dtype).map_or_else(|_: DcpError| format!("{dtype:?}"), str::to_string)
}

/// A value of PyTorch, as Python would write it.
pub(crate) fn torch_value(value: &TorchValue) -> String {
    let list = |items: &[TorchValue]| {
        let items: Vec<String> = items.iter().map(torch_value).collect();
        items.join(", ")
    };
    match value {
        TorchValue::None => "None".to_string(),
        TorchValue::Bool(true) => "True".to_string(),
        TorchValue::Bool(false) => "False".to_string(),
        TorchValue::Int(value) => value.to_string(),
        TorchValue::Float(value) => format!("{value:?}"),
        TorchValue::Str(value) => format!("{value:?}"),
        TorchValue::List(items) => format!("[{}]", list(items)),
        TorchValue::Tuple(items) => match items.as_slice() {
            [item] => format!("({},)", torch_value(item)),
            items => format!("({})", list(items)),
        },
        TorchValue::Unsupported(why) => format!("(not read: {why})"),
        other => format!("{other:?}"),
    }
}

/// The names most like one that isn't there.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let mut ranked: Vec<(usize, &str)> = names
        .map(|other| {
            let is_part = other.contains(name) || name.contains(other.as_str());
            (
                if is_part { 1 } else { distance(name, other) },
                other.as_str(),
            )
        })
        .collect();
    ranked.sort_unstable();
    let limit = name.chars().count() / 2 + 1;
    ranked.retain(|(distance, _)| *distance <= limit);
    ranked.into_iter().take(3).map(|(_, name)| name).collect()
}

/// How many characters must be inserted, removed or replaced.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_the_unit_that_suits_them() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn dates_know_leap_years() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_709_251_199), "2024-02-29 23:59:59 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00:00 UTC");
    }

    #[test]
    fn a_slip_finds_the_name_that_was_meant() {
        let names = ["model.emb.weight", "model.head.weight", "optimizer.x"].map(String::from);
        assert_eq!(
            nearest("model.emd.weight", names.iter()),
            ["model.emb.weight", "model.head.weight"]
        );
        assert_eq!(nearest("head.weight", names.iter())[0], "model.head.weight");
        assert!(nearest("zzz", names.iter()).is_empty());
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
