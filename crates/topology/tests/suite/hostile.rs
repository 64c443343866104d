//! No input makes an importer panic, and what is accepted is a sound topology.

use proptest::{prelude::*, sample::Index};
use warpweft_topology::{
    Topology,
    import::{Format, Imported, import, import_as},
};

use crate::fixture::{FIXTURES, fixture};

/// One thing that goes wrong with a file.
#[derive(Debug, Clone)]
enum Mishap {
    Truncate(Index),
    Remove(Index, usize),
    Repeat(Index, usize),
    Insert(Index, &'static str),
    SetByte(Index, u8),
}

fn mishap() -> impl Strategy<Value = Mishap> {
    let words = [
        "X",
        "\n",
        "\t",
        "NV4",
        "GPU0",
        "GPU1",
        "SYS",
        "|",
        "OK",
        "0",
        "-1",
        "99999999999999999999",
        "\u{1b}[4m",
        "N/A",
        "<",
        "/>",
        "\"",
        "<pci>",
        "</cpu>",
        "&lt;",
        "]]>",
        "Legend:",
        "Link 0: 1 GB/s",
        "XL1",
        "é",
        "0x",
        ",",
    ];
    prop_oneof![
        any::<Index>().prop_map(Mishap::Truncate),
        (any::<Index>(), 1_usize..60).prop_map(|(at, length)| Mishap::Remove(at, length)),
        (any::<Index>(), 1_usize..200).prop_map(|(at, length)| Mishap::Repeat(at, length)),
        (any::<Index>(), proptest::sample::select(words.to_vec()))
            .prop_map(|(at, word)| Mishap::Insert(at, word)),
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Mishap::SetByte(at, byte)),
    ]
}

fn suffer(bytes: &mut Vec<u8>, mishap: &Mishap) {
    let place = |at: &Index, bytes: &[u8]| at.index(bytes.len() + 1);
    match mishap {
        Mishap::Truncate(at) => bytes.truncate(place(at, bytes)),
        Mishap::Remove(at, length) => {
            let start = place(at, bytes);
            let end = (start + length).min(bytes.len());
            bytes.drain(start..end);
        }
        Mishap::Repeat(at, length) => {
            let start = place(at, bytes);
            let end = (start + length).min(bytes.len());
            let copy = bytes[start..end].to_vec();
            bytes.splice(start..start, copy);
        }
        Mishap::Insert(at, word) => {
            let start = place(at, bytes);
            bytes.splice(start..start, word.bytes());
        }
        Mishap::SetByte(at, byte) => {
            let at = place(at, bytes);
            if let Some(slot) = bytes.get_mut(at) {
                *slot = *byte;
            }
        }
    }
}

fn check_sound(imported: &Imported) {
    let topology = &imported.topology;
    assert_eq!(Topology::from_json(&topology.to_json()).as_ref().ok(), Some(topology));
    for edge in topology.edges() {
        assert!(edge.from != edge.to && edge.bandwidth().value.gb_per_s.is_finite());
    }
    serde_json::to_string(&imported.report).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn mutated_files_are_imported_or_refused(
        which in any::<Index>(),
        mishaps in prop::collection::vec(mishap(), 1..6),
    ) {
        let mut bytes = FIXTURES[which.index(FIXTURES.len())].text.as_bytes().to_vec();
        for mishap in &mishaps {
            suffer(&mut bytes, mishap);
        }
        for format in Format::ALL {
            if let Ok(imported) = import_as(format, &bytes) {
                check_sound(&imported);
            }
        }
        let _ = import(&bytes);
    }

    #[test]
    fn arbitrary_bytes_are_refused_quietly(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for format in Format::ALL {
            let _ = import_as(format, &bytes);
        }
    }

    /// A cell that is altered is either caught, or altered on both sides of the diagonal.
    #[test]
    fn no_altered_cell_goes_unnoticed(row in 0_usize..8, column in 0_usize..12, word in "PIX|PXB|PHB|NODE|SYS|NV1|X|") {
        let text = fixture("matrix-5-switch.txt");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let mut cells: Vec<&str> = lines[row + 1].split('\t').collect();
        let unchanged = cells[column + 1].trim() == word;
        cells[column + 1] = &word;
        lines[row + 1] = cells.join("\t");
        prop_assert_eq!(import(lines.join("\n").as_bytes()).is_ok(), unchanged);
    }
}

#[test]
fn every_prefix_of_every_file_is_imported_or_refused() {
    for fixture in FIXTURES.iter().filter(|fixture| fixture.text.len() < 2_500) {
        for end in 0..fixture.text.len() {
            let _ = import(&fixture.text.as_bytes()[..end]);
        }
    }
}

#[test]
fn large_sound_inputs_are_read() {
    let nodes: String = (0..30_000)
        .map(|index| {
            format!("{{\"name\":\"{index}\",\"kind\":{{\"device\":{{\"uuid\":null,\"kind\":\"gpu\"}}}}}},")
        })
        .collect();
    let nodes = nodes.trim_end_matches(',');
    let text = format!("{{\"format\":\"warpweft-topology\",\"version\":1,\"nodes\":[{nodes}],\"edges\":[]}}");
    assert_eq!(import(text.as_bytes()).unwrap().report.gpus, 30_000);
    let header: String = (0..300).map(|index| format!("\tGPU{index}")).collect();
    let rows: String = (0..300)
        .map(|row| {
            let cells: String = (0..300).map(|column| if row == column { "\tX" } else { "\tSYS" }).collect();
            format!("GPU{row}{cells}\n")
        })
        .collect();
    assert_eq!(import(format!("{header}\n{rows}").as_bytes()).unwrap().report.gpus, 300);
}

#[test]
fn large_hostile_inputs_end_soon_and_with_an_error() {
    let columns: String = (0..1_024).map(|index| format!("\tGPU{index}")).collect();
    let inputs = [
        "GPU0\n".repeat(600_000),
        format!("{columns}\n{}", "\n".repeat(400_000)),
        format!("{columns}\n{}", "GPU9999 X\n".repeat(200_000)),
        format!("{columns}\n{}", "x ".repeat(1_500_000)),
        "|".repeat(3_000_000),
        "\u{1b}[".repeat(1_000_000),
        "<a ".repeat(1_000_000),
        format!("<system>{}", "<pci busid=''>".repeat(200_000)),
        format!("<system>{}", "<pci/>".repeat(400_000)),
        format!("<topology><object a='{}'/>", "&amp;".repeat(600_000)),
        "[".repeat(3_000_000),
        format!("{{\"format\":{}", "[".repeat(2_000_000)),
        format!(
            "{{\"format\":\"warpweft-topology\",\"version\":1,\"nodes\":[],\"edges\":[{}",
            "{},".repeat(800_000)
        ),
        format!("Link 0: 1 GB/s\n{}", "GPU 0: a (UUID: b)\n".repeat(500_000)),
        format!("<system><cpu numaid='0' affinity='{}'/></system>", "f,".repeat(1_000_000)),
    ];
    let numbered = |count: usize, part: &dyn Fn(usize) -> String| (0..count).map(part).collect::<String>();
    let many = [
        format!(
            "<topology>{}</topology>",
            numbered(30_000, &|n| format!("<object type='NUMANode' os_index='{n}'/>"))
        ),
        format!(
            "<topology><object nodeset='{}'>{}</object></topology>",
            "ffffffff,".repeat(2_000),
            "<object/>".repeat(30_000)
        ),
        format!("<system>{}</system>", numbered(30_000, &|n| format!("<cpu numaid='{n}' host_hash='{n}'/>"))),
        format!(
            "{columns}\tNUMA Affinity\n{}",
            numbered(300, &|n| {
                let cells: String = (0..300).map(|m| if m == n { "\tX" } else { "\tSYS" }).collect();
                format!("GPU{n}{cells}\t{n}\n")
            })
        ),
    ];
    for input in inputs.iter().chain(&many) {
        let start: String = input.chars().take(40).collect();
        assert!(import(input.as_bytes()).is_err(), "{start}");
    }
}
