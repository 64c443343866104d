//! `warpweft graph` and `warpweft perf graph`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{lines, text, warpweft};

fn halo() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/halo.json");
    path.to_str().unwrap().to_owned()
}

/// A file with these bytes, which is gone with the folder.
fn file(folder: &tempfile::TempDir, text: &str) -> String {
    let path: PathBuf = folder.path().join("graph.json");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_description_is_explained() {
    let output = warpweft(&["graph", &halo()]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for words in [
        "12 nodes, 14 edges, 6 segments",
        "0 -> 7        write after read, bytes 1024..2048 of \"right\" (1 KiB)",
        "-> 11 add up",
        "3, 5, 7, 9  after 0, 1",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let why = text(&warpweft(&["graph", &halo(), "--why", "left edge,7"]).stdout);
    assert_eq!(
        why,
        "node 7 (\"right back\") comes after node 0 (\"left edge\"): write after read of bytes 1024..2048 of \"right\" on host:1\n"
    );
    let apart = text(&warpweft(&["graph", &halo(), "--why", "smooth left,smooth right"]).stdout);
    assert!(apart.contains("does not wait for"), "{apart}");
}

#[test]
fn a_run_comes_to_the_bytes_of_a_serial_one() {
    for more in [
        &["--replays", "5"][..],
        &["--devices", "1"],
        &["--devices", "3", "--links", "chain"],
        &["--links", "none", "--replays", "2"],
    ] {
        let output = warpweft(&[&["graph", &halo(), "--run", "--json"], more].concat());
        assert_eq!(output.status.code(), Some(0), "{more:?}: {}", text(&output.stderr));
        let run = &lines(&output)[0]["run"];
        assert_eq!(run["wrong_bytes"], 0, "{more:?}: {run}");
        assert_eq!(run["compared_bytes"], (4 * 65_536 + 2 * 131_072 + 4), "{more:?}: {run}");
    }
    let said = text(&warpweft(&["graph", &halo(), "--run", "--devices", "1"]).stdout);
    assert!(said.contains("note: the file has 2 devices and 1 is open") && said.contains("ok "), "{said}");
}

#[test]
fn programs_get_nodes_edges_and_reasons() {
    let output = warpweft(&["graph", &halo(), "--json", "--why", "0,11"]);
    let report = &lines(&output)[0];
    let len = |key: &str| report[key].as_array().unwrap().len();
    assert_eq!((len("nodes"), len("edges"), len("segments"), len("critical_path")), (12, 14, 6, 6));
    let reason = &report["edges"][0]["reasons"][0];
    assert_eq!(reason["hazard"], "read-after-write", "{reason}");
    assert_eq!(reason["buffer_name"], "left", "{reason}");
    assert_eq!(report["nodes"][10]["device"], Value::Null);
    assert_eq!(report["why"]["chain"].as_array().unwrap().len(), 3);
    assert!(report["run"].is_null());
}

#[test]
fn a_graph_is_saved_as_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let (dot, svg) = (folder.path().join("a.dot"), folder.path().join("a.svg"));
    let output =
        warpweft(&["graph", &halo(), "--dot", dot.to_str().unwrap(), "--svg", svg.to_str().unwrap()]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), ""));
    let (dot, svg) = (std::fs::read_to_string(dot).unwrap(), std::fs::read_to_string(svg).unwrap());
    assert!(dot.starts_with("digraph") && dot.contains("smooth right"), "{dot}");
    assert!(svg.starts_with("<svg") && svg.contains("smooth right"), "{svg}");
    let nowhere = warpweft(&["graph", &halo(), "--svg", "/no/such/folder/a.svg"]);
    assert_eq!(nowhere.status.code(), Some(1));
}

#[test]
fn files_and_calls_that_are_not_right_end_with_code_2_and_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str], words: &[&str]| {
        let output = warpweft(&[&["graph"], args].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)) && !said.contains("panicked"), "{said}");
    };
    check(&["/no/such/file.json"], &["/no/such/file.json"]);
    check(&[&halo(), "--why", "0,nobody"], &["no node \"nobody\"", "0 to 11"]);
    check(&[&halo(), "--why", "0"], &["two nodes"]);
    check(&[&halo(), "--replays", "2"], &["--run"]);
    check(&[&file(&folder, "{\"version\": 1,\n \"nodes\": 7}")], &["line 2 column 11"]);
    let one = |size: &str, work: &str| {
        let text = format!(
            r#"{{"version": 1, "devices": 1, "buffers": [{{"name": "a", "size": {size}, "placement": {{"device": 0}}}}],
                "nodes": [{{"do": {work}}}]}}"#
        );
        file(&folder, &text)
    };
    let fill = r#"{"fill": {"dst": "a", "byte": 1}}"#;
    // Refused before anything of that size is allocated.
    check(&[&one("18446744073709551615", fill), "--run"], &["buffers[0] (\"a\"), size", "1 GiB is the most"]);
    check(
        &[&one("8", r#"{"copy": {"src": "a", "dst": "a"}}"#)],
        &["nodes[0] (\"copy\"), copy.dst", "overlap"],
    );
    check(&[&one("8", r#"{"fill": {"dst": "b", "byte": 1}}"#)], &["there is no buffer \"b\"", "a"]);
    let beyond = r#"{"fill": {"dst": {"buffer": "a", "bytes": [4, 12]}, "byte": 1}}"#;
    check(&[&one("8", beyond)], &["nodes[0] (\"fill\"), fill.dst", "0..8"]);
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    check(&[&file(&folder, &nested)], &["line 1"]);
}

/// Whatever becomes of a byte, the command ends by itself, and says what is wrong.
#[test]
fn damaged_files_are_refused_or_run() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(halo()).unwrap();
    for turn in 0..40_usize {
        let mut damaged = whole.clone();
        let at = turn * 7919 % damaged.len();
        damaged[at] = b"{}[]\",:019"[turn % 10];
        damaged.truncate(if turn % 4 == 0 { at } else { damaged.len() });
        let path = file(&folder, &String::from_utf8(damaged).unwrap());
        let output = warpweft(&["graph", &path]);
        let said = text(&output.stderr);
        let code = output.status.code();
        assert!(code == Some(0) || code == Some(2), "{turn}: {code:?} {said}");
        assert!(!said.contains("panicked"), "{turn}: {said}");
    }
}

#[test]
fn perf_graph_prints_a_row_for_each_shape_kind_and_size() {
    let args = ["perf", "graph", "--nodes", "8,33", "-n", "3", "-w", "1", "--devices", "2"];
    let output = warpweft(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = lines(&output);
    assert_eq!(rows.len(), 8);
    for row in &rows {
        let edges = match (row["shape"].as_str().unwrap(), row["nodes"].as_u64().unwrap()) {
            ("chain", nodes) => nodes - 1,
            // A row alone has none; the row behind it has three for each node but two at the ends.
            (_, 8) => 0,
            _ => 46 + 2,
        };
        assert_eq!(row["edges"], edges, "{row}");
        for time in ["record", "prepare", "submit", "replay", "one_empty_node"] {
            assert_eq!(row[time]["rounds"], 3, "{time}: {row}");
            assert!(row[time]["p50_ns"].as_u64().unwrap() > 0, "{time}: {row}");
        }
        let is_kernel = row["kind"] == "kernel";
        assert!(row["floor"]["plain"]["p50_ns"].as_u64().unwrap() > 0, "{row}");
        assert_eq!((row["floor"]["handmade"].is_null(), row["ratio"].is_null()), (!is_kernel, !is_kernel));
        let per_node = row["replay"]["p50_ns"].as_f64().unwrap() / row["nodes"].as_f64().unwrap();
        assert!((row["per_node"]["replay_ns"].as_f64().unwrap() - per_node).abs() < 1e-6, "{row}");
    }
    let table = text(&warpweft(&args).stdout);
    assert_eq!(table.lines().count(), 2 + 8, "{table}");
}
