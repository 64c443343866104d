//! Ranks that are processes, or threads of several, and are killed.
//!
//! The program is its own cast: with `rank` as its first word it is ranks that do what they read.
#![expect(clippy::panic, clippy::unwrap_used, clippy::cast_possible_truncation, reason = "these are tests")]

#[cfg(target_os = "linux")]
mod cases;
#[cfg(target_os = "linux")]
mod cast;
#[cfg(target_os = "linux")]
mod fork;
#[cfg(target_os = "linux")]
mod rank;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some("rank") {
        rank::run(&words.collect::<Vec<_>>());
        return std::process::ExitCode::SUCCESS;
    }
    let arguments = libtest_mimic::Arguments::from_args();
    libtest_mimic::run(&arguments, cases::all()).exit_code()
}

#[cfg(not(target_os = "linux"))]
fn main() {}
