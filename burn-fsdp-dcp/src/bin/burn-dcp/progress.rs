//! How far a command has come, on a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of bytes on stderr, if that is a terminal.
pub(crate) fn bar(bytes: u64, what: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        "{msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(style).expect("the template is right");
    let bar = ProgressBar::new(bytes);
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(what.to_string());
    bar
}
