//! Communicators of real processes, which are killed, stopped and started again.
//!
//! The program is its own cast: with `rank` as its first word it is a rank that does what it reads.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed step fails the test")]

#[cfg(target_os = "linux")]
mod cases;
#[cfg(target_os = "linux")]
mod cast;
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
