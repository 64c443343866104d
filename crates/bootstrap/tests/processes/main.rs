//! Groups of real processes, which are killed, stopped, forked and started again.
//!
//! The program is its own cast: with `member` as its first word it is a member that does what it reads.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed step fails the test")]

#[cfg(unix)]
mod cases;
#[cfg(unix)]
mod cast;
#[cfg(unix)]
mod fork;
#[cfg(unix)]
mod member;

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some("member") {
        member::run(&words.collect::<Vec<_>>());
        return std::process::ExitCode::SUCCESS;
    }
    let arguments = libtest_mimic::Arguments::from_args();
    libtest_mimic::run(&arguments, cases::all()).exit_code()
}

#[cfg(not(unix))]
fn main() {}
