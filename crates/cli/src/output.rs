//! What the command prints: results on standard output, everything else on standard error.

use std::{
    borrow::Cow,
    fmt,
    io::{ErrorKind, IsTerminal as _, Write as _},
    process::ExitCode,
    time::Duration,
};

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default().bold();
const QUIET: Style = Style::new().dimmed();
const TITLE: Style = Style::new().bold();

/// Writes a line to standard output, with colours only where it is a terminal.
///
/// A reader that has seen enough (`| head`) ends the command without an error, as it does others.
fn emit(text: impl fmt::Display) {
    if let Err(error) = writeln!(anstream::stdout(), "{text}") {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        // Where standard error is closed too, the exit code has to do.
        let _closed =
            writeln!(anstream::stderr(), "{BAD}error{BAD:#}: standard output takes no more: {error}");
        std::process::exit(1);
    }
}

/// A line of the result.
pub(crate) fn line(text: impl AsRef<str>) {
    emit(text.as_ref());
}

/// A heading of the result.
pub(crate) fn title(text: &str) {
    emit(format_args!("{TITLE}{text}{TITLE:#}"));
}

/// A line that says that something is as it should be.
pub(crate) fn good(text: &str) {
    emit(format_args!("{GOOD}ok{GOOD:#}       {text}"));
}

/// A line that says what is wrong.
pub(crate) fn bad(text: &str) {
    emit(format_args!("{BAD}missing{BAD:#}  {text}"));
}

/// A line that says what is not there and need not be.
pub(crate) fn lacking(text: &str) {
    emit(format_args!("{QUIET}without{QUIET:#}  {text}"));
}

/// A line that says that a check failed.
pub(crate) fn wrong(text: &str) {
    emit(format_args!("{BAD}failed{BAD:#}   {text}"));
}

/// A line of lesser weight.
pub(crate) fn note(text: &str) {
    emit(format_args!("{QUIET}{text}{QUIET:#}"));
}

/// One JSON value on one line.
pub(crate) fn json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    emit(serde_json::to_string(value)?);
    Ok(())
}

/// Reports why the command failed.
pub(crate) fn fail(error: &anyhow::Error) -> ExitCode {
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    // Where standard error is closed, the exit code has to do.
    let _closed = writeln!(anstream::stderr(), "{BAD}error{BAD:#}: {}", causes.join(": "));
    ExitCode::from(if error.is::<WrongCall>() { 2 } else { 1 })
}

/// The command was called in a way that cannot work.
#[derive(Debug)]
pub(crate) struct WrongCall(pub(crate) String);

impl std::fmt::Display for WrongCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongCall {}

/// A bar on standard error while it is a terminal, nothing otherwise.
pub(crate) fn progress(steps: u64, what: impl Into<Cow<'static, str>>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg:24} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar.with_message(what)
}
