//! What is there, what is missing, and how to get it.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod trial;
#[cfg(feature = "vulkan")]
mod vulkan;

use std::process::ExitCode;

use serde::Serialize;
use warpweft::{
    Backend as _, BufferDesc, BufferView, Bytes, Features, FillRegion, Op, OpenError, QueueDesc,
    SemaphorePoint, Submission, host::HostBackend,
};

use crate::{args, output, select};

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    what: String,
    found: bool,
    /// Whether the backend is of no use without it.
    required: bool,
    /// What was found, or what to do.
    detail: String,
}

impl Check {
    fn found(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { what: what.into(), found: true, required: true, detail: detail.into() }
    }

    fn missing(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { what: what.into(), found: false, required: true, detail: detail.into() }
    }

    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    fn optional(self) -> Self {
        Self { required: false, ..self }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// Backends this program was built with.
    backends: &'static [&'static str],
    checks: Vec<Check>,
    healthy: bool,
}

pub(crate) fn run(args: &args::Doctor) -> anyhow::Result<ExitCode> {
    if args.probe_resident && !args.backend.iter().any(|name| name == "cuda") {
        let reason = "--probe-resident asks CUDA devices: add --backend cuda".to_owned();
        return Err(output::WrongCall(reason).into());
    }
    let mut checks = vec![cores()];
    for name in &args.backend {
        match name.as_str() {
            "host" => checks.push(host()),
            #[cfg(feature = "cuda")]
            "cuda" => checks.extend(cuda::checks(args.probe_resident)),
            #[cfg(feature = "vulkan")]
            "vulkan" => checks.extend(vulkan::checks()),
            _ => checks.push(unknown(name)),
        }
    }
    let healthy = checks.iter().all(|check| check.found || !check.required);
    let report = Report { version: env!("CARGO_PKG_VERSION"), backends: select::KNOWN, checks, healthy };
    if args.json {
        output::json(&report)?
    } else {
        print(&report)
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(report: &Report) {
    output::title(&format!("warpweft {}", report.version));
    output::note(&format!("built with: {}", report.backends.join(", ")));
    let width = report.checks.iter().map(|check| check.what.len()).max().unwrap_or(0).max(17);
    for check in &report.checks {
        let text = format!("{:<width$} {}", check.what, check.detail);
        match (check.found, check.required) {
            (true, _) => output::good(&text),
            (false, true) => output::bad(&text),
            (false, false) => output::lacking(&text),
        }
    }
}

fn cores() -> Check {
    match std::thread::available_parallelism() {
        Ok(cores) => Check::found("processor", format!("{cores} cores for this process")),
        Err(error) => Check::missing("processor", format!("the number of cores is not known: {error}")),
    }
}

/// Opens a host device and has it work, rather than believe that it would.
fn host() -> Check {
    match try_host() {
        Ok(detail) => Check::found("host devices", detail),
        Err(error) => Check::missing(
            "host devices",
            format!("{error}; host devices need threads and memory: look at the limits of this process"),
        ),
    }
}

fn try_host() -> Result<String, warpweft::Error> {
    let device = HostBackend::with_devices(1)?.open(0, Features::HOST_VISIBLE_MEMORY)?;
    let view = BufferView::whole(device.allocate(&BufferDesc::host_visible(4096))?);
    let queue = device.create_queue(&QueueDesc::default())?;
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    let ops = [Op::Fill(FillRegion::bytes(&view, 0x5a))];
    queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&done) })?;
    done.wait(std::time::Duration::from_secs(5))?;
    let mut bytes = [0; 4096];
    view.read(&mut bytes)?;
    if bytes != [0x5a; 4096] {
        let reason = "a filled buffer holds other bytes".to_owned();
        return Err(OpenError::Unavailable { backend: "host", missing: reason, driver: None }.into());
    }
    let formats: Vec<String> = device.info().code_formats.iter().map(ToString::to_string).collect();
    let memory = Bytes(device.memory()?.capacity.0);
    Ok(format!("work; up to {memory} each by default, run {}", formats.join(" and ")))
}

fn unknown(name: &str) -> Check {
    Check::missing(name, format!("this program was built without it; it has: {}", select::KNOWN.join(", ")))
}
