//! From what is written in a file to what can be recorded: names become positions, and what makes no sense is refused
//! before anything is allocated.

use std::{collections::HashMap, fmt, ops::Range};

use warpweft::Bytes;

use super::file::{BufferSpec, File, NodeSpec, Place, Placement, VERSION, Work};

/// A description that makes sense.
#[derive(Debug, Clone)]
pub(crate) struct Description {
    pub(crate) devices: u32,
    pub(crate) buffers: Vec<BufferSpec>,
    pub(crate) nodes: Vec<Node>,
}

#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// As the file says it, or what the node does.
    pub(crate) name: String,
    pub(crate) lane: u32,
    /// None lets the runtime choose, for copies, and is the host for tasks.
    pub(crate) device: Option<u32>,
    pub(crate) work: Work<Span>,
}

/// Bytes of a buffer, by its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) buffer: usize,
    pub(crate) range: Range<u64>,
}

impl Span {
    pub(crate) const fn size(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// What is wrong, and where in the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    field: String,
    problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

type Checked<T> = Result<T, Fault>;

fn fault<T>(field: impl Into<String>, problem: impl Into<String>) -> Checked<T> {
    Err(Fault { field: field.into(), problem: problem.into() })
}

impl Description {
    pub(crate) fn new(file: File) -> Checked<Self> {
        let File { version, devices, buffers, nodes } = file;
        if version != VERSION {
            return fault("version", format!("is {version}; this program reads version {VERSION}"));
        }
        if !(1..=MOST_DEVICES).contains(&devices) {
            return fault("devices", format!("is {devices}; give a number from 1 to {MOST_DEVICES}"));
        }
        if nodes.is_empty() || nodes.len() > MOST_NODES {
            let count = nodes.len();
            return fault("nodes", format!("has {count} entries; give from 1 to {MOST_NODES} nodes"));
        }
        let names = check_buffers(&buffers, devices)?;
        let scope = Scope { devices, buffers: &buffers, names };
        let nodes = (0..).zip(nodes).map(|(number, node)| scope.node(number, node));
        let nodes = nodes.collect::<Checked<_>>()?;
        Ok(Self { devices, buffers, nodes })
    }
}

fn check_buffers(buffers: &[BufferSpec], devices: u32) -> Checked<HashMap<String, usize>> {
    let mut names = HashMap::new();
    let mut total = 0_u64;
    if buffers.len() > MOST_BUFFERS {
        return fault("buffers", format!("has {} entries; {MOST_BUFFERS} is the most", buffers.len()));
    }
    for (position, buffer) in buffers.iter().enumerate() {
        let at = |field: &str| format!("buffers[{position}] ({:?}), {field}", buffer.name);
        if buffer.name.is_empty() {
            return fault(at("name"), "is empty; nodes name buffers");
        }
        if let Some(other) = names.insert(buffer.name.clone(), position) {
            return fault(at("name"), format!("buffers[{other}] has the same; give each its own"));
        }
        total = total.saturating_add(buffer.size);
        if buffer.size == 0 {
            return fault(at("size"), "is 0; give a number of bytes");
        }
        if total > LARGEST_TOTAL {
            let problem =
                format!("brings all buffers to {}; {} is the most", Bytes(total), Bytes(LARGEST_TOTAL));
            return fault(at("size"), problem);
        }
        let places = match &buffer.placement {
            Placement::Device(device) | Placement::HostVisible(device) => std::slice::from_ref(device),
            Placement::Shared(devices) => devices.as_slice(),
        };
        if places.is_empty() {
            return fault(at("placement"), "names no device; name those that share the buffer");
        }
        for (index, device) in places.iter().enumerate() {
            check_device(*device, devices).or_else(|problem| fault(at("placement"), problem))?;
            if places[..index].contains(device) {
                return fault(at("placement"), format!("names device {device} twice"));
            }
        }
    }
    Ok(names)
}

fn check_device(device: u32, devices: u32) -> Result<(), String> {
    if device < devices {
        return Ok(());
    }
    Err(format!("there is no device {device}; `devices` says {devices}, so the last is {}", devices - 1))
}

/// What the nodes of a file can refer to.
struct Scope<'a> {
    devices: u32,
    buffers: &'a [BufferSpec],
    names: HashMap<String, usize>,
}

impl Scope<'_> {
    fn node(&self, number: usize, spec: NodeSpec) -> Checked<Node> {
        let NodeSpec { name, device, lane, work } = spec;
        let (kind, is_task) = work.kind();
        let label = name.clone().unwrap_or_else(|| kind.to_owned());
        let at = |field: &str| format!("nodes[{number}] ({label:?}), {field}");
        if let Some(device) = device {
            check_device(device, self.devices).or_else(|problem| fault(at("device"), problem))?;
            if is_task {
                return fault(at("device"), format!("{kind} is a task of the host; leave the device out"));
            }
        }
        if lane > LAST_LANE {
            return fault(at("lane"), format!("is {lane}; {LAST_LANE} is the last"));
        }
        let place = |field: &'static str, place: &Place| {
            self.span(place).or_else(|problem| fault(at(&format!("{kind}.{field}")), problem))
        };
        let work = work.try_map(place)?;
        self.check_work(&work, is_task)
            .or_else(|(field, problem)| fault(at(&format!("{kind}.{field}")), problem))?;
        let device = device.or_else(|| self.own_device(&work));
        Ok(Node { name: label, lane, device, work })
    }

    fn span(&self, place: &Place) -> Result<Span, String> {
        let Some(&buffer) = self.names.get(&place.buffer) else {
            return Err(format!("there is no buffer {:?}; there are: {}", place.buffer, self.all_names()));
        };
        let size = self.buffers[buffer].size;
        let [start, end] = place.bytes.unwrap_or([0, size]);
        if start >= end || end > size {
            return Err(format!(
                "bytes {start}..{end} are not in {:?}, which has bytes 0..{size}; give [start, end] with start below end",
                place.buffer
            ));
        }
        Ok(Span { buffer, range: start..end })
    }

    fn all_names(&self) -> String {
        const SHOWN: usize = 8;
        let names = self.buffers.iter().take(SHOWN).map(|buffer| buffer.name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        let more = self.buffers.len().saturating_sub(SHOWN);
        if more == 0 { names } else { format!("{names} and {more} more") }
    }

    /// What goes beyond single ranges: lengths, words, overlaps, and who reaches what.
    fn check_work(&self, work: &Work<Span>, is_task: bool) -> Result<(), (&'static str, String)> {
        let (src, dst) = work.operands();
        for (field, span) in [("src", src), ("dst", Some(dst))] {
            let Some(span) = span else { continue };
            if work.is_in_words() && !(span.range.start.is_multiple_of(4) && span.range.end.is_multiple_of(4))
            {
                let problem =
                    format!("bytes {:?} are not whole words; begin and end at multiples of 4", span.range);
                return Err((field, problem));
            }
            if is_task && matches!(self.buffers[span.buffer].placement, Placement::Device(_)) {
                let problem = format!(
                    "the host cannot address {:?}; place it as host_visible or shared, or copy first",
                    self.buffers[span.buffer].name
                );
                return Err((field, problem));
            }
        }
        let Some(src) = src else { return Ok(()) };
        if src.buffer == dst.buffer && src.range.start < dst.range.end && dst.range.start < src.range.end {
            let problem = format!("bytes {:?} overlap src, {:?}, of the same buffer", dst.range, src.range);
            return Err(("dst", problem));
        }
        match work {
            Work::Sum { .. } if dst.size() != 4 => {
                Err(("dst", format!("has {} bytes; the sum is one word of 4", dst.size())))
            }
            Work::Sum { .. } => Ok(()),
            _ if src.size() != dst.size() => {
                Err(("dst", format!("has {} bytes and src {}; give both as many", dst.size(), src.size())))
            }
            _ => Ok(()),
        }
    }

    /// Kernels and fills are where the memory is that they write.
    fn own_device(&self, work: &Work<Span>) -> Option<u32> {
        let (_, dst) = work.operands();
        match work {
            Work::Copy { .. } | Work::Sum { .. } | Work::Reverse { .. } => None,
            _ => Some(match &self.buffers[dst.buffer].placement {
                Placement::Device(device) | Placement::HostVisible(device) => *device,
                Placement::Shared(devices) => devices[0],
            }),
        }
    }
}

const MOST_DEVICES: u32 = 64;
const MOST_BUFFERS: usize = 4096;
const MOST_NODES: usize = 100_000;
/// Each lane of a device is queues of its own.
const LAST_LANE: u32 = 15;
/// Of all buffers together. The serial run holds them once more.
const LARGEST_TOTAL: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Description, String> {
        let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
        Description::new(file).map_err(|fault| fault.to_string())
    }

    /// A file of three buffers, 64 bytes each, with one node.
    fn node(work: &str) -> String {
        file("", &format!("{{\"name\": \"n\", \"do\": {work}}}"))
    }

    fn file(more_buffers: &str, nodes: &str) -> String {
        format!(
            r#"{{"version": 1, "devices": 2, "buffers": [
                {{"name": "a", "size": 64, "placement": {{"device": 0}}}},
                {{"name": "b", "size": 64, "placement": {{"host_visible": 1}}}},
                {{"name": "c", "size": 64, "placement": {{"shared": [0, 1]}}}}{more_buffers}],
              "nodes": [{nodes}]}}"#
        )
    }

    #[test]
    fn everything_that_can_be_written_is_read() {
        for work in [
            r#"{"fill": {"dst": "a", "byte": 7}}"#,
            r#"{"copy": {"src": "a", "dst": "b"}}"#,
            r#"{"copy": {"src": {"buffer": "a", "bytes": [0, 32]}, "dst": {"buffer": "a", "bytes": [32, 64]}}}"#,
            r#"{"scale": {"dst": {"buffer": "a"}, "factor": 3}}"#,
            r#"{"add": {"src": "c", "dst": "b"}}"#,
            r#"{"stencil": {"src": "b", "dst": "c"}}"#,
            r#"{"sum": {"src": "b", "dst": {"buffer": "c", "bytes": [60, 64]}}}"#,
            r#"{"reverse": {"src": "b", "dst": "c"}}"#,
        ] {
            assert!(read(&node(work)).is_ok(), "{work}: {:?}", read(&node(work)));
        }
        let lanes = r#"{"device": 1, "lane": 2, "do": {"fill": {"dst": "b", "byte": 0}}}"#;
        let description = read(&file("", lanes)).expect("it is right");
        let node = &description.nodes[0];
        assert_eq!((node.name.as_str(), node.device, node.lane), ("fill", Some(1), 2));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_field() {
        let check = |text: &str, words: &[&str]| {
            let error = read(text).expect_err(text);
            for word in words {
                assert!(error.contains(word), "{error} has no {word:?}");
            }
        };
        let work = |work: &str, words: &[&str]| check(&node(work), words);
        work(r#"{"copy": {"src": "a", "dst": "a"}}"#, &["nodes[0] (\"n\"), copy.dst", "overlap"]);
        work(
            r#"{"add": {"src": {"buffer": "a", "bytes": [0, 40]}, "dst": {"buffer": "a", "bytes": [24, 64]}}}"#,
            &["add.dst", "overlap"],
        );
        work(r#"{"fill": {"dst": "z", "byte": 0}}"#, &["fill.dst", "no buffer \"z\"", "a, b, c"]);
        work(r#"{"fill": {"dst": {"buffer": "a", "bytes": [0, 65]}, "byte": 0}}"#, &["fill.dst", "0..64"]);
        work(r#"{"fill": {"dst": {"buffer": "a", "bytes": [9, 9]}, "byte": 0}}"#, &["start below end"]);
        work(
            r#"{"fill": {"dst": {"buffer": "a", "bytes": [0, 18446744073709551615]}, "byte": 0}}"#,
            &["0..64"],
        );
        work(r#"{"scale": {"dst": {"buffer": "a", "bytes": [2, 8]}, "factor": 1}}"#, &["multiples of 4"]);
        work(
            r#"{"copy": {"src": {"buffer": "a", "bytes": [0, 4]}, "dst": "b"}}"#,
            &["copy.dst", "64 bytes and src 4"],
        );
        work(r#"{"sum": {"src": "b", "dst": "c"}}"#, &["sum.dst", "one word"]);
        work(r#"{"reverse": {"src": "a", "dst": "c"}}"#, &["reverse.src", "host_visible"]);
        work(r#"{"fill": {"dst": "a", "byte": 256}}"#, &["line 5", "256"]);
        work(r#"{"fill": {"dst": "a", "byte": 1, "word": 1}}"#, &["line 5", "unknown field `word`"]);
        work(r#"{"fill": {"dst": 3, "byte": 1}}"#, &["line 5", "a buffer's name"]);
        work(r#"{"melt": {"dst": "a"}}"#, &["line 5", "unknown variant `melt`", "`fill`"]);
        let buffer = |buffer: &str, words: &[&str]| {
            check(&file(&format!(", {buffer}"), r#"{"do": {"fill": {"dst": "a", "byte": 0}}}"#), words);
        };
        buffer(
            r#"{"name": "a", "size": 4, "placement": {"device": 0}}"#,
            &["buffers[3] (\"a\"), name", "same"],
        );
        buffer(r#"{"name": "", "size": 4, "placement": {"device": 0}}"#, &["name", "empty"]);
        buffer(r#"{"name": "d", "size": 0, "placement": {"device": 0}}"#, &["size", "0"]);
        let huge = r#"{"name": "d", "size": 18446744073709551615, "placement": {"device": 0}}"#;
        buffer(huge, &["buffers[3] (\"d\"), size", "1 GiB is the most"]);
        buffer(r#"{"name": "d", "size": 4, "placement": {"device": 2}}"#, &["placement", "the last is 1"]);
        buffer(r#"{"name": "d", "size": 4, "placement": {"shared": []}}"#, &["placement", "no device"]);
        buffer(r#"{"name": "d", "size": 4, "placement": {"shared": [1, 1]}}"#, &["placement", "twice"]);
        buffer(r#"{"name": "d", "size": -1, "placement": {"device": 0}}"#, &["line 4", "-1"]);
        check(&file("", ""), &["nodes", "0 entries"]);
        check(&file("", r#"{"do": {"fill": {"dst": "a", "byte": 0}}, "device": 7}"#), &["device 7"]);
        check(&file("", r#"{"do": {"fill": {"dst": "a", "byte": 0}}, "lane": 99}"#), &["lane", "99"]);
        let task = r#"{"device": 0, "do": {"reverse": {"src": "b", "dst": "c"}}}"#;
        check(&file("", task), &["device", "task of the host"]);
        check(r#"{"version": 2, "devices": 1, "buffers": [], "nodes": []}"#, &["version", "reads version 1"]);
        check(r#"{"version": 1, "devices": 0, "buffers": [], "nodes": []}"#, &["devices", "1 to 64"]);
        check("{\"version\": 1,\n\"edges\": []}", &["line 2", "unknown field `edges`"]);
        check("", &["line 1"]);
    }
}
