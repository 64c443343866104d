//! What is linked to what: on this machine, between opened devices, or in a file.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{ErrorKind, Read as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use serde::Serialize;
use warpweft::{
    Bytes, Device, LinkEnd, Runtime,
    topology::{
        NodeDesc, Topology, TopologyDiff, discover,
        import::{Imported, Labelled, NvLinkReport, Report, import_reader},
    },
    transfer::{MeasureCache, MeasureConfig, MeasuredLink, apply, measure},
};

use crate::{
    args::{Selection, Topo},
    kernels,
    output::{self, WrongCall},
    select,
};

/// A topology with what is known beside it.
struct Found {
    topology: Topology,
    report: Report,
    measured: Vec<MeasuredLink>,
    notes: Vec<String>,
}

pub(crate) fn run(args: &Topo) -> anyhow::Result<ExitCode> {
    if let [before, after] = args.diff.as_slice() {
        return diff(before, after, args.json);
    }
    let found = match (&args.import, &args.backend) {
        (Some(path), _) => from_file(path)?,
        (None, Some(_)) => from_devices(args)?,
        (None, None) => from_machine(),
    };
    let files = [
        (&args.dot, Topology::to_dot as fn(&Topology) -> String),
        (&args.svg, Topology::to_svg),
        (&args.nccl, Topology::to_nccl_xml),
        (&args.save, Topology::to_json),
    ];
    let mut written = false;
    for (path, render) in files {
        if let Some(path) = path {
            fs::write(path, render(&found.topology))
                .with_context(|| format!("{} cannot be written", path.display()))?;
            written = true;
        }
    }
    if args.json {
        print_json(&found)?;
    } else if !written {
        print(&found, args.size);
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads a file of any known format. A file that is not right is a wrong call, with code 2.
pub(crate) fn read(path: &Path) -> anyhow::Result<Imported> {
    let wrong = |error: &dyn std::error::Error| {
        let mut text = format!("{}: {error}", path.display());
        let mut source = error.source();
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        WrongCall(text)
    };
    let file = File::open(path).map_err(|error| wrong(&error))?;
    Ok(import_reader(file).map_err(|error| wrong(&error))?)
}

fn from_file(path: &Path) -> anyhow::Result<Found> {
    let Imported { topology, report, .. } = read(path)?;
    let notes = report.warnings.clone();
    Ok(Found { topology, report, measured: Vec::new(), notes })
}

fn from_machine() -> Found {
    let mut discovery = discover(Path::new("/sys"));
    if discovery.topology.devices().next().is_none() {
        let hint = "no accelerator was found; `--backend host` shows host devices".to_owned();
        discovery.notes.push(hint);
    }
    let report = Report::of(&discovery.topology);
    Found { topology: discovery.topology, report, measured: Vec::new(), notes: discovery.notes }
}

fn from_devices(args: &Topo) -> anyhow::Result<Found> {
    let selection = Selection {
        backend: args.backend.clone().unwrap_or_default(),
        devices: args.devices,
        links: args.links,
        copies: args.copies,
        impersonate: None,
    };
    let mut builder = Runtime::builder();
    let chosen = select::chosen(&selection)?;
    for chosen in &chosen {
        builder = builder.shared_backend(Arc::clone(&chosen.backend));
    }
    let runtime = builder.build()?;
    let mut topology = topology_of(runtime.devices())?;
    let measured = if args.measure { measured(runtime.devices(), args)? } else { Vec::new() };
    apply(&measured, &mut topology);
    let report = Report::of(&topology);
    let notes = chosen.iter().flat_map(select::Chosen::notes).collect();
    Ok(Found { topology, report, measured, notes })
}

/// Silicon that two backends reach is one node, named by the first.
fn topology_of(devices: &[Arc<dyn Device>]) -> anyhow::Result<Topology> {
    let mut nodes: BTreeMap<_, NodeDesc> = BTreeMap::new();
    for device in devices {
        let info = device.info();
        let mut node = NodeDesc::device(info.id.to_string(), info.kind).uuid(info.id.uuid).model(&info.name);
        node.place.pci = info.pci;
        node.place.numa_node = info.numa_node;
        nodes.entry(info.id.uuid).or_insert(node);
    }
    let facts: Vec<_> =
        devices.iter().filter_map(|device| device.links()).flat_map(|links| links.facts()).collect();
    // In the order of the devices, not of their ids.
    let order = devices.iter().filter_map(|device| nodes.remove(&device.info().id.uuid)).collect();
    Ok(Topology::from_facts(order, &facts)?)
}

fn measured(devices: &[Arc<dyn Device>], args: &Topo) -> anyhow::Result<Vec<MeasuredLink>> {
    let cache_path = args.cache.as_deref();
    let mut cache = cache_path.map(load_cache).transpose()?.unwrap_or_default();
    let config = MeasureConfig {
        large: Bytes(args.size),
        kernel: Some(kernels::copy_words()),
        ..MeasureConfig::default()
    };
    if let Some(known) = cache.get(devices, &config) {
        return Ok(known.to_vec());
    }
    let bar = output::progress(1, "measuring links");
    let links = measure(devices.iter().cloned(), &config)?;
    bar.finish_and_clear();
    if let Some(path) = cache_path {
        cache.insert(devices, &config, links.clone());
        let text = serde_json::to_string(&cache)?;
        fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(links)
}

/// A cache that is not there yet is empty; one that is damaged is an error, since it is not ours to overwrite.
fn load_cache(path: &Path) -> anyhow::Result<MeasureCache> {
    /// More than any cache that this command writes; a device that never ends is no cache.
    const LONGEST: u64 = 16 << 20;
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(MeasureCache::default()),
        file => file.with_context(|| format!("{} cannot be read", path.display()))?,
    };
    let mut text = String::new();
    file.take(LONGEST + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("{} cannot be read", path.display()))?;
    if text.len() as u64 > LONGEST {
        bail!("{} is no cache of measurements: it is longer than {}", path.display(), Bytes(LONGEST));
    }
    serde_json::from_str(&text).with_context(|| format!("{} is no cache of measurements", path.display()))
}

fn print_json(found: &Found) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Document<'a> {
        #[serde(flatten)]
        report: &'a Report,
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        measured: &'a [MeasuredLink],
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        notes: &'a [String],
    }
    output::json(&Document { report: &found.report, measured: &found.measured, notes: &found.notes })
}

fn print(found: &Found, size: u64) {
    output::line(found.topology.to_matrix().trim_end());
    if let Some(nvlink) = &found.report.nvlink {
        print_nvlinks(nvlink);
    }
    if !found.measured.is_empty() {
        print_measured(found, size);
    }
    for note in &found.notes {
        output::note(&format!("note: {note}"));
    }
}

/// What a file says of links without naming their other ends.
fn print_nvlinks(nvlink: &Labelled<NvLinkReport>) {
    output::title("\nNVLinks, whose other ends the file does not name");
    for (gpu, links) in &nvlink.0 {
        let NvLinkReport { active, inactive, sum_gb_s, .. } = links;
        output::line(format!(
            "  {gpu:<6} {active:>2} active, {inactive} inactive, {sum_gb_s:.0} GB/s per direction"
        ));
    }
}

fn print_measured(found: &Found, size: u64) {
    output::title("\nMeasured");
    output::line("  from       to            us     GB/s  both ways   kernel  wrong");
    for link in &found.measured {
        let kernel = link.kernel.map_or_else(|| "-".to_owned(), |rate| format!("{:.1}", rate.gb_per_s));
        output::line(format!(
            "  {:<10} {:<10} {:>5.1} {:>8.1} {:>10.1} {:>8} {:>6}",
            name_of(&found.topology, link.from),
            name_of(&found.topology, link.to),
            link.latency.as_secs_f64() * 1e6,
            link.bandwidth.gb_per_s,
            link.both_ways.gb_per_s,
            kernel,
            link.wrong_bytes
        ));
    }
    output::note(&format!(
        "  us: one small copy from its submission to its end; GB/s: copies of {}, 10^9 bytes a second;\n  \
         both ways: each direction while the other runs too; kernel: the same bytes moved by a kernel;\n  \
         wrong: bytes that arrived other than they were sent",
        Bytes(size)
    ));
}

fn name_of(topology: &Topology, end: LinkEnd) -> String {
    topology
        .end(end)
        .and_then(|id| topology.node(id))
        .map_or_else(|| nameless(end).to_owned(), |node| node.name.clone())
}

/// Memory of the host is no node where no device tells of a link with it.
const fn nameless(end: LinkEnd) -> &'static str {
    match end {
        LinkEnd::Host { .. } => "host",
        LinkEnd::Device(_) => "?",
    }
}

/// Prints what has to change in one file's topology to get the other's; code 1 if anything has.
fn diff(before: &Path, after: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let diff = TopologyDiff::between(&read(before)?.topology, &read(after)?.topology);
    if json {
        output::json(&diff)?;
    } else {
        output::line(diff.to_string());
    }
    Ok(if diff.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
