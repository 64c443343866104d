//! The headers for kernels, compiled for the CPU: lanes under a thread sanitizer and beside the ring in Rust, and what an
//! executor with handlers is put together to.
//!
//! It takes a C++ compiler: `c++`, or what `CXX` names. Without one the cases are skipped by name, and fail where
//! `CI=true`.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step fails the test")]

use std::{
    env,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use libtest_mimic::{Arguments, Trial};
use warpweft_k2k_router::{
    Header, Message, RingError, executor_source,
    ring::{Consumer, Producer, RingMemory, SharedProducer, lane, shared_lane},
};

fn main() -> ExitCode {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let is_there =
        Command::new(&compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    let ci = env::var("CI").is_ok_and(|ci| ci == "true");
    let case = |name: &str, body: fn(&Path)| {
        let (compiler, skips) = (compiler.clone(), !is_there && !ci);
        let name = if skips { format!("{name} (needs a C++ compiler)") } else { name.to_owned() };
        Trial::test(name.clone(), move || {
            let folder = tempfile::tempdir()?;
            let program = match name.contains("handlers") {
                true => build_executor(&compiler, folder.path()),
                false => build(&compiler, folder.path(), name.contains("sanitizer")),
            };
            body(&program);
            Ok(())
        })
        .with_ignored_flag(skips)
    };
    let cases = vec![
        case("one_producer_under_the_thread_sanitizer", |program| run_threads(program, 1, 200_000)),
        case("three_producers_under_the_thread_sanitizer", |program| run_threads(program, 3, 50_000)),
        case("both_rings_leave_the_same_bytes", both_rings_leave_the_same_bytes),
        case("an_executor_with_handlers_is_a_library", |library| assert!(library.exists())),
    ];
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}

fn build(compiler: &str, folder: &Path, sanitized: bool) -> PathBuf {
    let program = folder.join("lanes");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lanes.cpp");
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    if sanitized {
        command.args(["-g", "-fsanitize=thread"]);
    }
    let output = command.args([source, "-o"]).arg(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Two sources that declare the same names, of which one has two handlers.
fn build_executor(compiler: &str, folder: &Path) -> PathBuf {
    let counter = |step: u32| {
        format!(
            "struct Count {{ uint64_t messages; }};
             __device__ void count(warpweft_context &cx, Count *state, const warpweft_message &) {{
                 state->messages += {step};
                 cx.reply(&state->messages, sizeof state->messages);
             }}
             __device__ void clear(warpweft_context &, Count *state, const warpweft_message &) {{ *state = {{}}; }}"
        )
    };
    let (one, two) = (counter(1), counter(2));
    let handlers = [("one", &*one, "count"), ("two", &*two, "count"), ("clear", &*one, "clear")];
    let (source, library) = (folder.join("executor.cpp"), folder.join("executor.so"));
    std::fs::write(&source, executor_source(&handlers) + "WARPWEFT_LIBRARY\n").unwrap();
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]);
    let output = command.arg(source).arg("-o").arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

fn run_threads(program: &Path, producers: u32, each: u32) {
    let arguments = ["threads".to_owned(), producers.to_string(), each.to_string()];
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), (producers * each).to_string());
}

/// Pushes of a number and a length, and pops.
#[derive(Debug, Clone, Copy)]
enum Play {
    Push(u32, usize),
    Pop,
}

/// Plays in an order that comes from a seed (xorshift).
fn plays(seed: u64, count: usize, longest: usize) -> Vec<Play> {
    let mut state = seed;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % below
    };
    let mut sequence = 0;
    let mut play = |_| {
        if random(5) < 2 {
            return Play::Pop;
        }
        sequence += 1;
        Play::Push(sequence, random(longest))
    };
    (0..count).map(&mut play).collect()
}

enum AnyProducer {
    Single(Producer),
    Shared(SharedProducer),
}

fn make(lines: usize, shared: bool) -> (AnyProducer, Consumer, RingMemory) {
    if shared {
        let (producer, consumer) = shared_lane(lines).unwrap();
        let memory = consumer.memory();
        (AnyProducer::Shared(producer), consumer, memory)
    } else {
        let (producer, consumer) = lane(lines).unwrap();
        let memory = consumer.memory();
        (AnyProducer::Single(producer), consumer, memory)
    }
}

/// What the ring in Rust answers to the plays and what its memory holds then, in the words of `lanes.cpp`.
fn in_rust(shift: u32, shared: bool, plays: &[Play]) -> String {
    let (mut producer, mut consumer, memory) = make(1 << shift, shared);
    let (mut said, mut message) = (String::new(), Message::default());
    for play in plays {
        said += &match *play {
            Play::Push(sequence, length) => {
                let small = |modulus: u32| u8::try_from(sequence % modulus).unwrap();
                let header = Header {
                    destination: sequence ^ 5,
                    sequence,
                    kind: !sequence,
                    generation: u16::try_from(sequence & 0xffff).unwrap(),
                    priority: small(3),
                    hops: small(9),
                    flags: small(4),
                    ..Header::default()
                };
                let byte = |at: usize| (sequence as usize * 31 + at).to_le_bytes()[0];
                let payload: Vec<u8> = (0..length).map(byte).collect();
                let pushed = match &mut producer {
                    AnyProducer::Single(producer) => producer.try_push(&header, &payload),
                    AnyProducer::Shared(producer) => producer.try_push(&header, &payload),
                };
                match pushed {
                    Ok(()) => "p 0\n".to_owned(),
                    Err(RingError::Full) => "p 1\n".to_owned(),
                    Err(RingError::TooLong { .. }) => "p 2\n".to_owned(),
                    Err(error) => panic!("{error}"),
                }
            }
            Play::Pop => match consumer.try_pop(&mut message).unwrap() {
                true => format!("g 1 {} {}\n", message.header.sequence, message.payload.len()),
                false => "g 0 0 0\n".to_owned(),
            },
        };
    }
    said += &format!("c {}\n", memory.credit());
    for [low, high] in memory.lines() {
        said += &format!("{low:016x} {high:016x}\n");
    }
    said
}

fn in_cpp(program: &Path, shift: u32, shared: bool, plays: &[Play]) -> String {
    let mut child = Command::new(program)
        .args(["trace", &shift.to_string(), &u32::from(shared).to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let text: String = plays
        .iter()
        .map(|play| match play {
            Play::Push(sequence, length) => format!("p {sequence} {length}\n"),
            Play::Pop => "g 0 0\n".to_owned(),
        })
        .collect();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn both_rings_leave_the_same_bytes(program: &Path) {
    for (seed, shift, longest) in [(1, 2, 13), (2, 3, 70), (3, 5, 200), (4, 6, 700), (5, 11, 17_000)] {
        for shared in [false, true] {
            let plays = plays(seed, 3000, longest);
            let (rust, cpp) = (in_rust(shift, shared, &plays), in_cpp(program, shift, shared, &plays));
            let differs = rust.lines().zip(cpp.lines()).position(|(rust, cpp)| rust != cpp);
            assert_eq!(differs, None, "seed {seed}");
            assert_eq!(rust, cpp);
            assert!(rust.contains("p 0") && rust.contains("p 1") && rust.contains("g 0"), "all was met");
        }
    }
}
