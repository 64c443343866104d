//! Calls of `perf` with collectives, and of `flight`.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use warpweft::{
    Backend as _, BufferDesc, BufferView, DType, Features, ReduceOp,
    bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous},
    comm::{CommConfig, Communicator, FlightConfig},
    host::HostBackend,
};

use crate::{lines, text, warpweft};

const KINDS: [&str; 9] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
];

/// One small size, measured briefly.
const BRIEF: &str = "-b 4K -e 4K -n 2 -m 2 -w 1";

fn perf(kind: &str, rest: &str) -> Output {
    let args: Vec<&str> = ["perf", kind].into_iter().chain(rest.split_whitespace()).collect();
    warpweft(&args)
}

/// Rows of JSON, every one of them right.
fn rows(kind: &str, rest: &str) -> Vec<Value> {
    let output = perf(kind, &format!("{rest} --json"));
    assert_eq!(output.status.code(), Some(0), "{kind} {rest}: {}", text(&output.stderr));
    let rows = lines(&output);
    for row in &rows {
        assert_eq!((&row["collective"], &row["wrong"]), (&kind.into(), &0.into()), "{row}");
        for figure in [&row["time"]["p50_ns"], &row["time"]["p99_ns"], &row["algbw"], &row["busbw"]] {
            assert!(figure.as_f64().unwrap() > 0.0, "{row}");
        }
    }
    rows
}

fn engines(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["engine"].as_str().unwrap()).collect()
}

/// How a call is refused: with code 2 and one message that has these words.
fn refused(kind: &str, rest: &str, words: &[&str]) {
    let output = perf(kind, rest);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{kind} {rest}: {message}");
    assert!(words.iter().all(|word| message.contains(word)), "{kind} {rest}: {message}");
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn every_collective_has_a_row_for_each_engine() {
    for kind in KINDS {
        let rows = rows(kind, BRIEF);
        assert_eq!(engines(&rows), ["host", "planned"], "{kind}");
        for row in &rows {
            let shape = ["ranks", "size", "count", "dtype"].map(|key| row[key].to_string());
            assert_eq!(shape, ["4", "4096", "1024", "\"f32\""], "{row}");
            let has_op = ["all_reduce", "reduce_scatter", "reduce"].contains(&kind);
            let has_root = ["broadcast", "reduce", "gather", "scatter"].contains(&kind);
            assert_eq!((row["op"].is_null(), row["root"].is_null()), (!has_op, !has_root), "{row}");
        }
    }
}

#[test]
fn bandwidth_on_the_bus_is_what_links_carry() {
    for (kind, factor) in [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)] {
        for row in rows(kind, BRIEF) {
            let (algbw, busbw) = (row["algbw"].as_f64().unwrap(), row["busbw"].as_f64().unwrap());
            assert!((busbw / algbw - factor).abs() < 1e-9, "{row}");
            // Bytes in a nanosecond are 10^9 bytes in a second.
            let expected = 4096.0 / row["time"]["p50_ns"].as_f64().unwrap();
            assert!((algbw - expected).abs() < 1e-9, "{row}");
        }
    }
}

#[test]
fn sizes_types_and_reductions_are_swept_as_asked() {
    let rows = rows("reduce_scatter", "-b 1K -e 64K -f 8 -n 2 -m 2 -w 1 -d i32 -o max --engine host");
    let sizes: Vec<u64> = rows.iter().map(|row| row["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1 << 10, 8 << 10, 64 << 10]);
    assert!(rows.iter().all(|row| row["dtype"] == "i32" && row["op"] == "max"), "{rows:?}");
    // What no part of four ranks can be smaller than.
    let least = perf("all_gather", "-b 1 -e 1 -n 1 -m 1 -d f64 --json");
    assert!(lines(&least).iter().all(|row| row["size"] == 32), "{}", text(&least.stdout));
}

#[test]
fn ways_to_call_are_told_apart() {
    for row in rows("all_reduce", &format!("{BRIEF} --blocking --in-place --memory host-visible")) {
        assert_eq!((&row["blocking"], &row["in_place"]), (&true.into(), &true.into()), "{row}");
    }
    for kind in ["all_gather", "reduce_scatter", "broadcast", "reduce"] {
        assert!(rows(kind, &format!("{BRIEF} --in-place")).iter().all(|row| row["in_place"] == true));
    }
    let folder = tempfile::tempdir().unwrap();
    let explain = format!("{BRIEF} --explain --tuning-cache {}", folder.path().display());
    let explained = rows("all_reduce", &explain);
    assert!(explained.iter().all(|row| row["chosen"]["engine"] == "host"), "{explained:?}");
    // Calls of host devices go one way only: nothing is measured, which is told, and not kept.
    let told = text(&perf("all_reduce", &explain).stdout);
    assert!(told.contains("nothing to choose") && !told.contains("usual sum"), "{told}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let unchecked = lines(&perf("all_reduce", &format!("{BRIEF} -c 0 --json")));
    assert!(unchecked.iter().all(|row| row["wrong"].is_null()), "{unchecked:?}");
}

#[test]
fn graphs_are_replayed_by_the_engines_that_have_them() {
    let rows = rows("all_reduce", &format!("{BRIEF} -G 2"));
    assert_eq!(engines(&rows), ["host"]);
    assert!(rows.iter().all(|row| row["graph"] == 2), "{rows:?}");
    let named = perf("all_reduce", &format!("{BRIEF} -G 2 --engine planned"));
    assert_eq!(named.status.code(), Some(1));
    assert!(text(&named.stderr).contains("graph"), "{}", text(&named.stderr));
}

#[test]
fn a_table_has_a_head_and_a_verdict() {
    let table = text(&perf("broadcast", &format!("{BRIEF} -r 2")).stdout);
    for words in ["size", "algbw", "busbw", "wrong", "host", "planned", "# Wrong elements: 0 OK"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let row = table.lines().find(|line| !line.starts_with('#') && line.contains(" planned ")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!((cells.len(), &cells[..6]), (11, &["4096", "1024", "f32", "-", "2", "planned"][..]), "{row}");
    assert_eq!(cells[10], "0", "{row}");
    let unchecked = text(&perf("broadcast", &format!("{BRIEF} -c 0")).stdout);
    assert!(unchecked.contains("# Wrong elements: not looked at"), "{unchecked}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    refused("all_reduce", "-b 8K -e 4K", &["-b", "-e"]);
    refused("all_reduce", "-d f99", &["f99", "bf16"]);
    refused("all_reduce", "-o nand", &["nand", "xor"]);
    refused("all_reduce", "-o xor", &["xor", "f32"]);
    refused("all_reduce", "-f 1", &["1"]);
    refused("all_reduce", "-n 0", &["0"]);
    refused("all_reduce", "-G 2 --blocking", &["--blocking", "--graph"]);
    refused("all_reduce", "--engine abacus", &["abacus", "planned"]);
    refused("all_reduce", "--backend abacus", &["abacus", "host"]);
    refused("broadcast", "-r 4", &["-r 4", "4 ranks"]);
    refused("all_to_all", "--in-place", &["all_to_all", "in place"]);
    refused("send_recv", "--in-place", &["send_recv", "in place"]);
}

#[test]
fn a_picture_has_a_line_for_each_engine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sums.svg");
    let rest = format!("-b 1K -e 16K -n 2 -m 2 -w 1 --plot {}", path.display());
    let output = perf("all_reduce", &rest);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let svg = fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("all_reduce of f32, 4 ranks"), "{svg}");
    // Each in the picture of bandwidth and in that of time, with a short one in its legend.
    let lines = |name: &str| {
        assert!(svg.contains(name), "{name}: {svg}");
    };
    ["host", "planned", "bus bandwidth, GB/s", "time, us", "KiB"].into_iter().for_each(lines);
    let polylines: Vec<&str> = svg.lines().filter(|line| line.contains("<polyline")).collect();
    for colour in ["#1F77B4", "#D6610A"] {
        let of_engine = polylines.iter().filter(|line| line.contains(colour)).count();
        assert_eq!(of_engine, 4, "{colour}: {polylines:?}");
    }
    let nowhere = perf("all_reduce", &format!("{BRIEF} --plot /no/such/folder/a.svg"));
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/no/such/folder/a.svg"), "{}", text(&nowhere.stderr));
}

#[cfg(unix)]
#[test]
fn ranks_of_a_launcher_are_processes() {
    let program = env!("CARGO_BIN_EXE_warpweft");
    let mut command = Command::new(program);
    command.args(["launch", "-n", "3", "--no-prefix", "--", program, "perf", "all_reduce", "--json"]);
    command.args(BRIEF.split(' '));
    // The test itself may run under a launcher.
    for name in ["RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = lines(&output);
    assert_eq!(engines(&rows), ["host"], "no plan goes across processes, and rank 0 alone prints");
    assert_eq!((&rows[0]["ranks"], &rows[0]["wrong"]), (&3.into(), &0.into()), "{}", rows[0]);
}

/// A communicator of three that fails, since the last rank never makes the second call.
fn fail(folder: &Path) {
    const PATIENCE: Duration = Duration::from_secs(30);
    let flight = FlightConfig { folder: Some(folder.to_owned()), ..FlightConfig::default() };
    let config = CommConfig { timeout: Duration::from_millis(200), flight, ..CommConfig::default() };
    let (backend, meeting) = (HostBackend::with_devices(3).unwrap(), Meeting::new());
    thread::scope(|scope| {
        for rank in 0..3 {
            let (backend, config, meeting) = (&backend, &config, Arc::clone(&meeting));
            scope.spawn(move || {
                let join = JoinConfig::new(Rank(rank), 3);
                let group = Group::join(Rendezvous::Meeting(meeting), join, PATIENCE).unwrap();
                let device = backend.open(rank, Features::empty()).unwrap();
                let comm = Communicator::create(group, &device, config, PATIENCE).unwrap();
                let word = BufferView::whole(device.allocate(&BufferDesc::host_visible(4)).unwrap());
                let sum = || comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
                sum().wait(PATIENCE).unwrap();
                if rank == 2 {
                    // It never calls again, and is told by the others.
                    let end = Instant::now() + PATIENCE;
                    while comm.is_healthy() && Instant::now() < end {
                        thread::yield_now();
                    }
                } else {
                    sum().wait(PATIENCE).unwrap_err();
                }
                assert!(!comm.is_healthy());
            });
        }
    });
}

#[test]
fn records_tell_who_is_to_blame() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    fail(folder.path());
    let shown = warpweft(&["flight", path]);
    let said = text(&shown.stdout) + &text(&shown.stderr);
    assert_eq!(shown.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 2 never made call #2, all_reduce sum of u32, 4 bytes"), "{said}");
    assert!(said.contains("made by the program"), "{said}");
    for words in ["rank 0 of 3, host:0", "rank 2 of 3, host:2", "#1", "not over"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let report = &lines(&warpweft(&["flight", path, "--json"]))[0]["communicators"][0];
    assert_eq!((&report["verdict"], &report["number"]), (&"missing".into(), &2.into()), "{report}");
    assert_eq!((&report["ranks"][0], report["records"].as_array().unwrap().len()), (&2.into(), 3));
    // A rank that was killed leaves none.
    let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let of_rank_1 = files.filter(|path| path.to_str().unwrap().ends_with(".rank-1.json"));
    of_rank_1.for_each(|path| fs::remove_file(path).unwrap());
    let report = &lines(&warpweft(&["flight", path, "--json"]))[0]["communicators"][0];
    assert_eq!((&report["verdict"], &report["ranks"][0]), (&"lost".into(), &1.into()), "{report}");
}

#[test]
fn communicators_in_one_folder_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    fail(folder.path());
    fail(folder.path());
    let path = folder.path().to_str().unwrap();
    let report = &lines(&warpweft(&["flight", path, "--json"]))[0]["communicators"];
    let communicators = report.as_array().unwrap();
    assert_eq!(communicators.len(), 2);
    let shown = warpweft(&["flight", path]);
    let said = text(&shown.stdout) + &text(&shown.stderr);
    for judged in communicators {
        assert_eq!((&judged["verdict"], judged["records"].as_array().unwrap().len()), (&"missing".into(), 3));
        let run = judged["communicator"]["run"].as_str().unwrap();
        assert!(said.contains(&format!("communicator {run}.0-")), "{said}");
    }
    assert_ne!(communicators[0]["communicator"], communicators[1]["communicator"]);
}

#[test]
fn a_folder_without_records_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let empty = warpweft(&["flight", path]);
    assert_eq!(empty.status.code(), Some(1));
    assert!(text(&empty.stderr).contains("has no flight records"), "{}", text(&empty.stderr));
    let missing = warpweft(&["flight", "/no/such/folder"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("/no/such/folder"), "{}", text(&missing.stderr));
    fs::write(folder.path().join("run.0-0.rank-0.json"), "{").unwrap();
    let damaged = warpweft(&["flight", path]);
    assert_eq!(damaged.status.code(), Some(1));
    assert!(text(&damaged.stderr).contains("rank-0.json"), "{}", text(&damaged.stderr));
}

#[test]
fn the_demo_says_who_summed() {
    let summary = &lines(&warpweft(&["demo", "--size", "64K", "--json"]))[0];
    assert_eq!((&summary["ranks"], &summary["engine"]), (&4.into(), &"host".into()), "{summary}");
}
