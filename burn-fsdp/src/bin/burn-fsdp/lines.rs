//! What a rank writes, as lines.

use std::time::{Duration, Instant};

/// Longer lines are broken, so that they need not be kept.
const LONGEST: usize = 1 << 20;

/// How often a line that is written over and over is shown.
const REDRAW: Duration = Duration::from_secs(1);

/// Cuts a stream of bytes into lines.
///
/// A progress bar goes back to the start of its line by a carriage return and writes over it. Its
/// last state is the line; of those before, at most one a second is shown, as a line of its own.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
    /// A carriage return came last: a line feed ends the line, anything else overwrites it.
    returned: bool,
    overwritten_shown: Option<Instant>,
}

impl Lines {
    /// Takes the next bytes and gives out the lines that end in them.
    pub(crate) fn push(&mut self, bytes: &[u8], now: Instant, mut show: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let (text, end) = match piece.split_last() {
                Some((end @ (b'\n' | b'\r'), text)) => (text, Some(*end)),
                _ => (piece, None),
            };
            if !text.is_empty() && self.returned {
                self.overwrite(now, &mut show);
            }
            self.line.extend_from_slice(text);
            match end {
                Some(b'\r') => self.returned = true,
                Some(_) => self.end(&mut show),
                None if self.line.len() >= LONGEST => self.end(&mut show),
                None => {}
            }
        }
    }

    /// Gives out what has no line feed at the end.
    pub(crate) fn finish(mut self, mut show: impl FnMut(&[u8])) {
        if !self.line.is_empty() {
            self.end(&mut show);
        }
    }

    fn end(&mut self, show: &mut impl FnMut(&[u8])) {
        show(&self.line);
        self.line.clear();
        self.returned = false;
    }

    fn overwrite(&mut self, now: Instant, show: &mut impl FnMut(&[u8])) {
        let is_due = { self.overwritten_shown }.is_none_or(|shown| now - shown >= REDRAW);
        if is_due && !self.line.is_empty() {
            self.overwritten_shown = Some(now);
            show(&self.line);
        }
        self.line.clear();
        self.returned = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of these pieces, written at these seconds.
    fn lines_at(pieces: &[(u64, &str)]) -> Vec<String> {
        let start = Instant::now();
        let mut shown = Vec::new();
        let mut show = |line: &[u8]| shown.push(String::from_utf8_lossy(line).into_owned());
        let mut lines = Lines::default();
        for (second, piece) in pieces {
            let now = start + Duration::from_secs(*second);
            lines.push(piece.as_bytes(), now, &mut show);
        }
        lines.finish(&mut show);
        shown
    }

    fn lines(pieces: &[&str]) -> Vec<String> {
        lines_at(&pieces.iter().map(|piece| (0, *piece)).collect::<Vec<_>>())
    }

    #[test]
    fn lines_are_whole_however_they_come() {
        assert_eq!(lines(&["a\nb\n"]), ["a", "b"]);
        assert_eq!(lines(&["a", "b\nc", "", "d", "\n"]), ["ab", "cd"]);
        assert_eq!(lines(&["\n\na\n"]), ["", "", "a"]);
        assert!(lines(&[]).is_empty());
    }

    #[test]
    fn the_last_line_needs_no_line_feed() {
        assert_eq!(lines(&["a\nb"]), ["a", "b"]);
        assert_eq!(lines(&["a\r"]), ["a"]);
    }

    #[test]
    fn a_carriage_return_before_a_line_feed_is_part_of_it() {
        assert_eq!(lines(&["a\r\nb\r\r\n"]), ["a", "b"]);
        assert_eq!(lines(&["a\r", "\nb\n"]), ["a", "b"]);
    }

    #[test]
    fn a_bar_is_shown_once_a_second_and_at_its_end() {
        let bar = [
            (0, "\r 1%"),
            (0, "\r 2%"),
            (0, "\r 3%\r"),
            (1, " 4%"),
            (1, "\r 5%"),
            (1, "\r100%\nnext\n"),
        ];
        assert_eq!(lines_at(&bar), [" 1%", " 3%", "100%", "next"]);
    }

    #[test]
    fn the_last_state_of_a_bar_that_is_cut_short_is_shown() {
        assert_eq!(lines(&["1%\r2%\r3%"]), ["1%", "3%"]);
    }

    #[test]
    fn a_line_without_end_is_broken() {
        let piece = "x".repeat(LONGEST / 2);
        let shown = lines(&[&piece, &piece, "y\n"]);
        assert_eq!(shown.len(), 2);
        assert_eq!((shown[0].len(), shown[1].as_str()), (LONGEST, "y"));
    }

    #[test]
    fn bytes_that_are_no_text_pass_unchanged() {
        let mut shown = Vec::new();
        let mut lines = Lines::default();
        lines.push(b"\xff\x00\xfe\n", Instant::now(), |line| {
            shown.extend_from_slice(line);
        });
        assert_eq!(shown, b"\xff\x00\xfe");
    }
}
