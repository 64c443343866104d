//! Pictures hold every node, say why one comes after another, and names cannot break out of them.
#![expect(clippy::unwrap_used, reason = "helpers of tests may fail a test")]

use quick_xml::{events::Event, reader::Reader};
use warpweft_core_types::{Backend as _, DeviceId, Features, FillRegion};
use warpweft_graph_runtime::{Graph, HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig, Usage};
use warpweft_host::HostBackend;

fn runtime(devices: u32) -> (Runtime, Vec<DeviceId>) {
    let backend = HostBackend::with_devices(devices).unwrap();
    let devices: Vec<_> =
        (0..devices).map(|ordinal| backend.open(ordinal, Features::empty()).unwrap()).collect();
    let ids = devices.iter().map(|device| device.info().id).collect();
    (Runtime::new(devices, RuntimeConfig::default()).unwrap(), ids)
}

/// Two devices fill, trade halves and hand over to a task of the host.
fn halves() -> Graph {
    let (runtime, ids) = runtime(2);
    let memory = |device| runtime.allocate(&MemoryPlacement::HostVisible(ids[device]), 8192).unwrap();
    let (left, right, sum) = (memory(0), memory(1), memory(0));
    let mut graph = runtime.graph();
    for (buffer, name) in [(&left, "left"), (&right, "right"), (&sum, "sum")] {
        graph.name_buffer(buffer.view(), name).unwrap();
    }
    graph.add(NodeDesc::fill(FillRegion::bytes(left.view(), 1)).named("fill left")).unwrap();
    graph.add(NodeDesc::fill(FillRegion::bytes(right.view(), 2)).named("fill right")).unwrap();
    let (low, high) = (left.slice(0..4096).unwrap(), right.slice(4096..8192).unwrap());
    graph.add(NodeDesc::copy(&low, &high).unwrap().named("low to high")).unwrap();
    let add = HostTask::new(|_| {});
    let operands = [
        (left.view().clone(), Usage::Read),
        (right.view().clone(), Usage::Read),
        (sum.view().clone(), Usage::Write),
    ];
    graph.add(NodeDesc::task(&add, &operands).named("add up")).unwrap();
    graph.fill(FillRegion::bytes(left.view(), 0)).unwrap();
    graph
}

/// The text of a picture that is well-formed and whose texts are inside of it.
fn check_svg(svg: &str) -> String {
    let mut reader = Reader::from_str(svg);
    let mut text = String::new();
    let mut size = None;
    loop {
        match reader.read_event().unwrap() {
            Event::Start(tag) | Event::Empty(tag) => {
                let attributes: Vec<(String, String)> = tag
                    .attributes()
                    .map(Result::unwrap)
                    .map(|attribute| (attribute.key.as_ref().to_owned(), attribute.value.into_owned()))
                    .collect();
                let number = |name: &str| -> Option<f64> {
                    attributes.iter().find(|(key, _)| key == name)?.1.parse().ok()
                };
                assert!(attributes.iter().all(|(_, value)| !value.contains("NaN") && !value.contains("inf")));
                let (width, height) = *size.get_or_insert_with(|| (number("width"), number("height")));
                if let (Some(x), Some(y)) = (number("x"), number("y")) {
                    let (width, height) = (width.unwrap(), height.unwrap());
                    let right = x + number("width").unwrap_or(0.0);
                    let bottom = y + number("height").unwrap_or(0.0);
                    assert!(x >= 0.0 && y >= 0.0 && right <= width && bottom <= height, "{tag:?}");
                }
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::GeneralRef(name) => {
                text.push_str(match &*name {
                    "amp" => "&",
                    "lt" => "<",
                    "gt" => ">",
                    "quot" => "\"",
                    "apos" => "'",
                    other => other,
                });
            }
            Event::Eof => return text,
            _ => {}
        }
    }
}

#[test]
fn a_graph_is_written_for_graphviz() {
    insta::assert_snapshot!(halves().to_dot());
}

#[test]
fn a_graph_is_drawn() {
    let svg = halves().to_svg();
    let text = check_svg(&svg);
    for words in ["fill left", "low to high", "add up", "2 copy, host:0", "RAW 4 KiB", "read after write"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    insta::assert_snapshot!(svg);
}

#[test]
fn every_name_is_in_the_picture_and_none_breaks_out_of_it() {
    let (runtime, ids) = runtime(1);
    let memory = runtime.allocate(&MemoryPlacement::Device(ids[0]), 64).unwrap();
    let mut graph = runtime.graph();
    let names = [
        "</text><script>alert(1)</script>",
        "\"];\nx [label=\"",
        "a \\ b & 'c'",
        "\u{1}\u{fffe}\u{7}bell",
        "模型 层 一",
        "a name that is far longer than any box of any picture can be, and then goes on for a while",
        "",
    ];
    for name in names {
        graph.add(NodeDesc::fill(FillRegion::bytes(memory.view(), 1)).named(name)).unwrap();
    }
    graph.name_buffer(memory.view(), "<b>\"]").unwrap();
    let text = check_svg(&graph.to_svg());
    for name in names {
        let kept: String =
            name.chars().filter(|c| (*c == '\n' || !c.is_control()) && *c != '\u{fffe}').collect();
        assert!(text.contains(&kept), "{name:?}: {text}");
    }
    let dot = graph.to_dot();
    assert!(dot.contains(r#"label="\"];\nx [label=\"\n1 fill"#), "{dot}");
    // Quotes that are not escaped come in pairs on each line.
    for line in dot.lines() {
        let bare = line.replace("\\\\", "").replace("\\\"", "");
        assert_eq!(bare.matches('"').count() % 2, 0, "{line}");
    }
}

#[test]
fn edges_tell_all_bytes_that_both_ends_share() {
    let graph = halves();
    let ids: Vec<_> = graph.ids().collect();
    let reasons = graph.reasons(ids[2], ids[3]);
    let words: Vec<String> = reasons.iter().map(|reason| graph.explain(reason)).collect();
    assert_eq!(
        words,
        [
            "node 3 (\"add up\") comes after node 2 (\"low to high\"): read after write of bytes 4096..8192 of \"right\" on host:1"
        ]
    );
    assert!(graph.reasons(ids[0], ids[1]).is_empty() && graph.reasons(ids[3], ids[2]).is_empty());
}

#[test]
fn segments_are_those_that_devices_are_handed() {
    let graph = halves();
    let segments = graph.segments();
    assert_eq!(segments.iter().map(|segment| segment.nodes.len()).sum::<usize>(), graph.len());
    for (position, segment) in segments.iter().enumerate() {
        assert!(segment.after.iter().all(|&before| before < position));
        assert!(segment.nodes.iter().all(|&node| graph.device(node) == segment.device));
    }
    let count = segments.len();
    assert_eq!(graph.prepare().unwrap().segment_count(), count);
}

#[test]
fn many_readers_before_many_writers_are_drawn_with_a_join() {
    let (runtime, ids) = runtime(1);
    let memory = runtime.allocate(&MemoryPlacement::HostVisible(ids[0]), 64 * 64).unwrap();
    let mut graph = runtime.graph();
    let read = [(memory.view().clone(), Usage::Read)];
    for _ in 0..40 {
        graph.task(&HostTask::new(|_| {}), &read).unwrap();
    }
    for part in 0..40 {
        let view = memory.slice(64 * part..64 * (part + 1)).unwrap();
        graph.fill(FillRegion::bytes(&view, 1)).unwrap();
    }
    let (svg, dot) = (graph.to_svg(), graph.to_dot());
    check_svg(&svg);
    assert_eq!(svg.matches("<circle").count(), 1);
    assert!(svg.contains("80 nodes, 80 edges, 2 on the critical path"), "{svg}");
    assert_eq!(dot.matches(" -> ").count(), 80);
}

#[test]
fn large_graphs_are_drawn_in_part_and_say_so() {
    let (runtime, ids) = runtime(2);
    let memory = |device| runtime.allocate(&MemoryPlacement::Device(ids[device]), 1 << 16).unwrap();
    let pair = [memory(0), memory(1)];
    let mut graph = runtime.graph();
    for node in 0..2000_u64 {
        let view = pair[usize::from(node % 2 == 0)].slice(64 * (node % 97)..64 * (node % 97 + 5)).unwrap();
        graph.fill(FillRegion::bytes(&view, 1)).unwrap();
    }
    let svg = graph.to_svg();
    check_svg(&svg);
    assert!(svg.contains("2000 nodes") && svg.contains("the last 1400 nodes are left out"));
    assert_eq!(svg.matches("fill, host:").count(), 2 * 600, "each in its box and in its tooltip");
    assert_eq!(graph.to_dot().matches("fillcolor=").count(), 600);
}

#[test]
fn commutative_nodes_are_drawn_in_the_order_that_suits_them() {
    let (runtime, ids) = runtime(1);
    let memory = |size| runtime.allocate(&MemoryPlacement::HostVisible(ids[0]), size).unwrap();
    let (shared, other) = (memory(64), memory(64));
    let mut graph = runtime.graph();
    let nothing = HostTask::new(|_| {});
    graph.fill(FillRegion::bytes(other.view(), 1)).unwrap();
    let late = [(other.view().clone(), Usage::Read), (shared.view().clone(), Usage::Commutative)];
    graph.add(NodeDesc::task(&nothing, &late).named("late")).unwrap();
    let early = [(shared.view().clone(), Usage::Commutative)];
    graph.add(NodeDesc::task(&nothing, &early).named("early")).unwrap();
    let dot = graph.to_dot();
    assert!(dot.contains("label=\"turns\""), "{dot}");
    check_svg(&graph.to_svg());
}

#[test]
fn an_empty_graph_is_a_picture_too() {
    let (runtime, _) = runtime(1);
    let text = check_svg(&runtime.graph().to_svg());
    assert!(text.contains("0 nodes, 0 edges"), "{text}");
    assert!(runtime.graph().to_dot().ends_with("}\n"));
}
