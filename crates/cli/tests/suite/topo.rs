//! Calls of `topo`, and of `demo` on a file's devices.

use std::{fs, path::PathBuf, process::Output};

use tempfile::TempDir;

use crate::{lines, text, warpweft};

/// Four devices in two pairs, each pair behind one socket.
const MATRIX: &str = "\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
";

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn named(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Writes a file and returns its path.
    fn with(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), content).unwrap();
        self.named(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }
}

fn succeeds(args: &[&str]) -> Output {
    let output = warpweft(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    output
}

#[test]
fn a_file_is_shown_as_a_matrix_and_as_json() {
    let folder = Folder::new();
    let file = folder.with("machine.txt", MATRIX);
    let matrix = text(&succeeds(&["topo", "--import", &file]).stdout);
    assert!(matrix.contains("GPU3") && matrix.contains("NV4") && matrix.contains("SYS"), "{matrix}");
    let report = &lines(&succeeds(&["topo", "--import", &file, "--json"]))[0];
    assert_eq!(report["gpus"], 4);
    let nvlinks = report["links"].as_array().unwrap().iter().filter(|link| link["count"] == 4);
    assert_eq!(nvlinks.count(), 2, "{report}");
}

#[test]
fn a_file_is_written_in_every_format() {
    let folder = Folder::new();
    let file = folder.with("machine.txt", MATRIX);
    let [svg, dot, nccl, save] = ["a.svg", "a.dot", "a.xml", "a.json"].map(|name| folder.named(name));
    succeeds(&["topo", "--import", &file, "--svg", &svg, "--dot", &dot, "--nccl", &nccl, "--save", &save]);
    for (name, start, content) in [
        ("a.svg", "<svg", "GPU3"),
        ("a.dot", "graph", "GPU3"),
        ("a.xml", "<system", "<gpu"),
        ("a.json", "{", "GPU3"),
    ] {
        let written = folder.read(name);
        assert!(written.trim_start().starts_with(start) && written.contains(content), "{name}: {written}");
    }
    let same = succeeds(&["topo", "--diff", &file, &save]);
    assert!(!text(&same.stdout).is_empty(), "it says that there is no difference");
    let nowhere = warpweft(&["topo", "--import", &file, "--svg", "/no/such/folder/a.svg"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/no/such/folder/a.svg"));
}

#[test]
fn damaged_files_end_with_code_2_and_one_message_that_says_where() {
    let folder = Folder::new();
    let wrong = MATRIX.replacen("NV4", "NW4", 1);
    for (name, content, said) in [
        ("token.txt", wrong.as_bytes(), &["NW4", "line 2"][..]),
        ("binary.txt", &[0xff, 0xfe, 0x00], &["binary.txt"]),
        ("empty.txt", b"", &["empty.txt", "is empty"]),
    ] {
        for command in ["topo --import", "demo --impersonate"] {
            let file = folder.with(name, content);
            let args: Vec<&str> = command.split(' ').chain([file.as_str()]).collect();
            let output = warpweft(&args);
            let message = text(&output.stderr);
            assert_eq!((output.status.code(), message.trim().lines().count()), (Some(2), 1), "{message}");
            assert!(said.iter().all(|part| message.contains(part)), "{name}: {message}");
        }
    }
    let missing = warpweft(&["topo", "--import", &folder.named("missing.txt")]);
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn a_difference_is_printed_and_ends_with_code_1() {
    let folder = Folder::new();
    let before = folder.with("before.txt", MATRIX);
    let after = folder.with("after.txt", MATRIX.replace("NV4", "NV2"));
    let changed = warpweft(&["topo", "--diff", &before, &after]);
    assert_eq!(changed.status.code(), Some(1));
    assert!(text(&changed.stdout).contains("GPU1"), "{}", text(&changed.stdout));
    assert_eq!(warpweft(&["topo", "--diff", &before, &after, "--json"]).status.code(), Some(1));
    assert_eq!(succeeds(&["topo", "--diff", &before, &before]).status.code(), Some(0));
}

#[test]
fn measurements_are_kept_and_used_again() {
    let folder = Folder::new();
    let cache = folder.named("cache.json");
    let args = [
        "topo",
        "--backend",
        "host",
        "--devices",
        "2",
        "--measure",
        "--size",
        "64K",
        "--cache",
        &cache,
        "--json",
    ];
    let first = lines(&succeeds(&args));
    let measured = first[0]["measured"].as_array().unwrap();
    assert!(!measured.is_empty());
    assert!(measured.iter().all(|link| link["wrong_bytes"] == 0), "{measured:?}");
    let again = lines(&succeeds(&args));
    assert_eq!(first[0]["measured"], again[0]["measured"], "to the nanosecond, so not measured again");
    let damaged = folder.with("cache.json", "{");
    let refused = warpweft(&args);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains(&damaged), "{}", text(&refused.stderr));
    assert_eq!(folder.read("cache.json"), "{", "what is not ours is not overwritten");
}

#[test]
fn what_would_have_no_effect_is_refused() {
    let folder = Folder::new();
    let file = folder.with("machine.txt", MATRIX);
    for extra in [&["--measure"][..], &["--devices", "3"], &["--links", "ring"], &["--size", "1M"]] {
        let output = warpweft(&[&["topo", "--import", &file], extra].concat());
        assert_eq!(output.status.code(), Some(2), "{extra:?}");
        assert!(text(&output.stderr).contains(extra[0]), "{}", text(&output.stderr));
        assert_eq!(warpweft(&[&["topo"], extra].concat()).status.code(), Some(2), "{extra:?} alone");
    }
    let svg = folder.named("a.svg");
    assert_eq!(warpweft(&["topo", "--diff", &file, &file, "--svg", &svg]).status.code(), Some(2));
    let saved = folder.with("report.json", &warpweft(&["topo", "--import", &file, "--json"]).stdout);
    let output = warpweft(&["topo", "--import", &saved]);
    assert!(text(&output.stderr).contains("--save"), "{}", text(&output.stderr));
}

#[test]
fn this_machine_is_shown_without_any_argument() {
    let report = &lines(&succeeds(&["topo", "--json"]))[0];
    assert!(report["gpus"].is_u64() && report["links"].is_array(), "{report}");
}

#[test]
fn the_demo_runs_on_the_devices_and_links_of_a_file() {
    let folder = Folder::new();
    let file = folder.with("machine.txt", MATRIX);
    let args = ["demo", "--size", "64K", "--json", "--impersonate", &file];
    let summary = &lines(&succeeds(&args))[0];
    assert_eq!((&summary["devices"], &summary["pairs"]), (&4.into(), &12.into()), "{summary}");
    assert_eq!(warpweft(&[&args[..], &["--devices", "2"]].concat()).status.code(), Some(2));
}
