//! `warpweft launch`, with shells, Python and ranks that meet.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use warpweft::bootstrap::{EnvironmentError, Group, JoinError};

use crate::text;

const SOON: Duration = Duration::from_secs(30);

fn launch(options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warpweft"));
    command.arg("launch").args(options).arg("--").args(program);
    // The test itself may run under a launcher.
    for name in ["RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"] {
        command.env_remove(name);
    }
    command
}

fn run(options: &[&str], script: &str) -> Output {
    launch(options, &["sh", "-c", script]).stdin(Stdio::null()).output().unwrap()
}

fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(String::from).collect();
    lines.sort();
    lines
}

fn summary(output: &Output) -> Value {
    serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap()
}

/// Starts a launch whose output is read while it runs.
fn start(options: &[&str], script: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    start_as(&mut launch(options, &["sh", "-c", script]))
}

fn start_as(command: &mut Command) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    (child, stdout)
}

fn kill(pid: u32, signal: &str) {
    let status = Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Waits until a process is gone, of which nobody tells us.
fn wait_gone(pid: u32) {
    let started = Instant::now();
    while is_alive(pid) {
        assert!(started.elapsed() < SOON, "process {pid} is still there");
        std::thread::yield_now();
    }
}

#[test]
fn each_rank_gets_the_environment_of_both_families() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $WARPWEFT_RANK/$WARPWEFT_WORLD_SIZE \
                  $WARPWEFT_LOCAL_RANK/$WARPWEFT_LOCAL_WORLD_SIZE $MASTER_ADDR ${#WARPWEFT_TOKEN} $SLURM_PROCID";
    let mut command = launch(&["-n", "3"], &["sh", "-c", script]);
    let output = command.env("SLURM_PROCID", "7").env("SLURM_JOB_ID", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let expected: Vec<String> =
        (0..3).map(|r| format!("[{r}] {r}/3 {r}/3 {r}/3 {r}/3 127.0.0.1 64")).collect();
    assert_eq!(sorted(&output.stdout), expected);
    assert!(text(&output.stderr).contains("all 3 ranks ended well"), "{}", text(&output.stderr));
    let ports = run(&["-n", "2", "--no-prefix"], "echo $MASTER_PORT $WARPWEFT_RUN");
    let ports: BTreeSet<String> = sorted(&ports.stdout).into_iter().collect();
    assert_eq!(ports.len(), 1, "the same for all: {ports:?}");
}

#[test]
fn streams_stay_apart_and_nothing_is_lost() {
    let script = "i=0; while [ $i -lt 500 ]; do echo out $RANK $i; echo err $RANK $i >&2; i=$((i+1)); done; \
                  printf 'no end'; printf 'no end' >&2";
    let output = run(&["-n", "4"], script);
    let mut expected: Vec<String> = (0..4)
        .flat_map(|rank| (0..500).map(move |i| format!("[{rank}] out {rank} {i}")))
        .chain((0..4).map(|rank| format!("[{rank}] no end")))
        .collect();
    expected.sort();
    assert_eq!(sorted(&output.stdout), expected);
    assert_eq!(text(&output.stderr).lines().filter(|line| line.contains(" err ")).count(), 2000);
}

#[test]
fn bytes_pass_as_they_are_without_prefixes() {
    let output = run(&["-n", "1", "--no-prefix"], r"printf '\377\000\001half'; head -c 300000 /dev/zero");
    assert!(output.stdout.starts_with(b"\xff\0\x01half"));
    assert_eq!(output.stdout.len(), 7 + 300_000);
    let output = run(&["-n", "1"], r"printf '\377\000\n'");
    assert_eq!(output.stdout, b"[0] \xff\0\n");
}

#[test]
fn a_question_is_shown_though_its_line_has_no_end() {
    let script = "printf 'Name? '; read name; echo hello $name";
    let mut command = launch(&["-n", "2"], &["sh", "-c", &format!("if [ $RANK = 0 ]; then {script}; fi")]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut question = [0; 10];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut question).unwrap();
    assert_eq!(&question, b"[0] Name? ");
    child.stdin.take().unwrap().write_all(b"weft\n").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "hello weft\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn one_that_fails_stops_the_others_and_gives_the_exit_code() {
    let output = run(&["-n", "3", "--json"], "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 600");
    assert_eq!(output.status.code(), Some(7));
    let summary = summary(&output);
    assert_eq!(
        (&summary["ok"], &summary["code"], &summary["first_failure"]),
        (&false.into(), &7.into(), &1.into())
    );
    for rank in [0, 2] {
        let end = &summary["ranks"][rank];
        assert_eq!((&end["signal_name"], &end["stopped"]), (&"SIGTERM".into(), &true.into()), "{end}");
    }
    let output = run(&["-n", "2"], "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 600");
    assert_eq!(output.status.code(), Some(128 + 9));
    let said = text(&output.stderr);
    assert!(said.contains("rank 0 was ended by SIGKILL") && said.contains("first to fail"), "{said}");
}

#[test]
fn one_that_does_not_stop_is_killed_after_the_grace() {
    let script = "if [ $RANK = 1 ]; then read line < $FIFO; exit 3; fi; \
                  trap 'echo asked' TERM; echo ready > $FIFO; while :; do sleep 600 & wait; done";
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut command = launch(&["-n", "2", "--grace", "0.3s", "--json"], &["sh", "-c", script]);
    let output = command.env("FIFO", &fifo).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let summary = summary(&output);
    assert_eq!(summary["ranks"][0]["signal_name"], "SIGKILL", "{summary}");
    assert!(text(&output.stdout).contains("[0] asked"), "{}", text(&output.stdout));
}

#[test]
fn signals_are_passed_on() {
    for (signal, name) in [("-INT", "INT"), ("-TERM", "TERM"), ("-HUP", "HUP")] {
        let script =
            format!("trap 'echo caught; exit 0' {name}; echo ready; while :; do sleep 600 & wait; done");
        // The tests may run under `nohup`.
        let mut command =
            Command::new(if cfg!(target_os = "linux") { "env" } else { env!("CARGO_BIN_EXE_warpweft") });
        if cfg!(target_os = "linux") {
            command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_warpweft")]);
        }
        let (mut child, mut stdout) =
            start_as(command.args(["launch", "-n", "2", "--", "sh", "-c", &script]));
        let mut line = String::new();
        for _ in 0..2 {
            line.clear();
            stdout.read_line(&mut line).unwrap();
            assert!(line.ends_with("ready\n"), "{line}");
        }
        kill(child.id(), signal);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(sorted(rest.as_bytes()), ["[0] caught", "[1] caught"], "{name}");
        assert_eq!(child.wait().unwrap().code(), Some(0), "{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_reaches_a_rank_that_is_stopped() {
    let (mut child, mut stdout) =
        start(&["-n", "1", "--no-prefix"], "echo $$; kill -STOP $$; exec sleep 600");
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let (started, stat) = (Instant::now(), format!("/proc/{}/stat", line.trim()));
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        assert!(started.elapsed() < SOON, "it has not stopped");
        std::thread::yield_now();
    }
    kill(child.id(), "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn a_second_signal_kills() {
    let script = "trap 'echo caught' INT; echo ready; while :; do sleep 600 & wait; done";
    let (mut child, mut stdout) = start(&["-n", "1"], script);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    kill(child.id(), "-INT");
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "[0] ready\n[0] caught\n");
    kill(child.id(), "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(128 + 9));
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_end_with_a_launcher_that_is_killed() {
    let (mut child, stdout) =
        start(&["-n", "3", "--no-prefix"], "trap '' TERM HUP INT; echo $$; exec sleep 600");
    let pids: Vec<u32> = stdout.lines().take(3).map(|line| line.unwrap().parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    child.kill().unwrap();
    child.wait().unwrap();
    pids.into_iter().for_each(wait_gone);
}

#[test]
fn a_child_that_stays_behind_does_not_hold_the_launch_up() {
    let started = Instant::now();
    let output = run(&["-n", "2", "--no-prefix"], "sleep 600 & echo $!");
    assert!(started.elapsed() < SOON);
    let pids = sorted(&output.stdout);
    assert_eq!(pids.len(), 2, "{pids:?}");
    pids.iter().for_each(|pid| kill(pid.parse().unwrap(), "-KILL"));
}

#[test]
fn a_child_that_stays_behind_and_writes_does_not_either() {
    let started = Instant::now();
    let output = run(&["-n", "2", "--no-prefix"], "echo $$; sh -c 'while echo line; do :; done' & exit 0");
    assert!(started.elapsed() < SOON);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_failed_rank_has_started_is_stopped_too() {
    let output = run(&["-n", "1", "--no-prefix"], "sleep 600 & echo $!; exit 3");
    assert_eq!(output.status.code(), Some(3));
    wait_gone(text(&output.stdout).trim().parse().unwrap());
}

#[cfg(target_os = "linux")]
#[test]
fn many_ranks_start_where_few_files_are_allowed() {
    let launcher = env!("CARGO_BIN_EXE_warpweft");
    let script = format!("ulimit -Sn 48; exec {launcher} launch -n 40 -- sh -c 'ulimit -Sn'");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = sorted(&output.stdout);
    assert!(lines.len() == 40 && lines.iter().all(|line| line.ends_with("] 48")), "{lines:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn nohup_holds_for_the_ranks_too() {
    let launcher = env!("CARGO_BIN_EXE_warpweft");
    let script = "echo ready; read line < $FIFO; echo well";
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let nohup = format!("trap '' HUP; exec {launcher} launch -n 1 -- sh -c '{script}'");
    let (mut child, mut stdout) = start_as(Command::new("sh").args(["-c", &nohup]).env("FIFO", &fifo));
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    kill(child.id(), "-HUP");
    std::fs::write(&fifo, "go\n").unwrap();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "[0] ready\n[0] well\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_a_launch_whose_output_nobody_reads() {
    // More than a pipe holds, written to the end while the reader waits.
    let script = "head -c 70000 /dev/zero; echo over > $FIFO";
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut command = launch(&["-n", "1", "--no-prefix"], &["sh", "-c", script]);
    let (mut child, stdout) = start_as(command.env("FIFO", &fifo));
    assert_eq!(std::fs::read_to_string(&fifo).unwrap(), "over\n");
    // One signal may still find the rank.
    kill(child.id(), "-TERM");
    while child.try_wait().unwrap().is_none() {
        kill(child.id(), "-TERM");
        std::thread::yield_now();
    }
    drop(stdout);
}

#[test]
fn the_summary_has_a_line_of_its_own() {
    for options in [&["-n", "2", "--json"][..], &["-n", "2", "--json", "--no-prefix"]] {
        let output = run(options, "printf 'no end'");
        assert_eq!(summary(&output)["ok"], true, "{}", text(&output.stdout));
    }
    let output = run(&["-n", "1"], "printf 'no end' >&2");
    assert!(text(&output.stderr).starts_with("[0] no end\nlaunch: "), "{}", text(&output.stderr));
}

#[test]
fn a_reader_that_has_seen_enough_ends_it() {
    let (mut child, mut stdout) = start(&["-n", "2"], "while echo line; do :; done 2> /dev/null");
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    drop(stdout);
    assert!(child.wait().unwrap().code().is_some());
}

#[test]
fn a_program_that_is_not_there_is_said_once() {
    let output = launch(&["-n", "4"], &["no-such-program-at-all"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    assert_eq!(launch(&["-n", "2"], &["/"]).output().unwrap().status.code(), Some(126));
    for wrong in [&["-n", "0"][..], &["-n", "2000"], &["-n", "2", "--grace", "soon"], &[]] {
        assert_eq!(launch(wrong, &["true"]).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
}

/// Runs by itself, as a group of one, and as a rank of the test below.
#[test]
fn a_rank_meets_the_others() {
    let group = match Group::from_environment(SOON) {
        Err(JoinError::Environment(EnvironmentError::NoLauncher)) => Group::alone(),
        joined => joined,
    };
    let group = group.unwrap();
    let gathered = group.all_gather("ranks", group.rank().to_string().as_bytes(), SOON).unwrap();
    let expected: Vec<Vec<u8>> = (0..group.size()).map(|rank| rank.to_string().into_bytes()).collect();
    assert_eq!(gathered, expected);
    println!("met {} of {}", group.rank(), group.size());
}

#[test]
fn ranks_in_rust_meet_by_the_environment() {
    let program = std::env::current_exe().unwrap();
    let rank = [program.to_str().unwrap(), "--exact", "launch::a_rank_meets_the_others", "--nocapture"];
    let output = launch(&["-n", "4"], &rank).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{} {}", text(&output.stdout), text(&output.stderr));
    for rank in 0..4 {
        assert!(text(&output.stdout).contains(&format!("met {rank} of 4")), "{}", text(&output.stdout));
    }
}

/// As PyTorch does: rank 0 listens at MASTER_ADDR and MASTER_PORT, the others come there.
const PYTHON: &str = r#"
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        total = 0
        for _ in range(size - 1):
            with server.accept()[0] as peer:
                total += int(peer.makefile().readline())
    print("sum", total)
else:
    for attempt in range(1000):
        try:
            with socket.create_connection(address) as peer:
                peer.sendall(f"{rank}\n".encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"#;

#[test]
fn ranks_in_python_meet_at_the_master_port() {
    let output = launch(&["-n", "4"], &["python3", "-c", PYTHON]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "needs python3: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "[0] sum 6\n");
}
