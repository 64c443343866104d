//! The other process of a check.

use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use clap::Subcommand;
use serde_json::json;
use warpweft_core_types::{
    Arg, Backend as _, BufferDesc, BufferView, Deadline, FillRegion, Launch, Op, ResidentDesc, SharedMemory,
};
use warpweft_cuda::CudaBackend;

use crate::rig::{LIMIT, Rig, report};

/// What it does.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Role {
    /// Imports the memory whose descriptor is the standard input.
    Share {
        /// Its size.
        size: u64,
    },
    /// Tells which devices it sees.
    Devices,
    /// Works until something can be read.
    Busy,
    /// Starts a resident.
    Resident,
}

pub(crate) fn play(role: &Role) -> Result<()> {
    match role {
        Role::Share { size } => share(*size),
        Role::Devices => devices(),
        Role::Busy => busy(),
        Role::Resident => resident(),
    }
}

fn share(size: u64) -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    let family = bench.device.sharing().context("sharing")?;
    let descriptor = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    let memory = SharedMemory { device: bench.device.info().id.uuid, size, descriptor };
    let view = BufferView::whole(family.import_shared(memory)?);
    ensure!(bench.read(&view)?.iter().all(|&byte| byte == 0x11), "other bytes are there");
    bench.run(&[Op::Fill(FillRegion::bytes(&view, 0x22))])
}

fn devices() -> Result<()> {
    let backend = CudaBackend::new()?;
    let mut seen = Vec::new();
    for info in backend.devices()? {
        let links = backend.open(info.id.ordinal, warpweft_core_types::Features::empty())?;
        let facts = links.links().map(|links| links.facts()).unwrap_or_default();
        seen.push((info.id.uuid.to_string(), json!({"pci": info.pci, "links": facts})));
    }
    report(&json!(seen));
    Ok(())
}

fn busy() -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    std::io::stdout().write_all(b"!")?;
    std::io::stdout().flush()?;
    let enough = std::thread::spawn(|| std::io::stdin().read(&mut [0]));
    let mut rounds = 0_u32;
    while rounds < 100 || !enough.is_finished() {
        let byte = rounds.to_le_bytes()[0];
        let view = bench.uploaded(&vec![byte; 1 << 16])?;
        ensure!(bench.read(&view)?.iter().all(|&found| found == byte), "round {rounds}");
        rounds += 1;
    }
    Ok(())
}

fn resident() -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    let word = bench.allocate(BufferDesc::device(4))?;
    let (kernel, args) = (bench.kernel("brief")?, [Arg::Buffer(&word)]);
    let desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?);
    let resident = bench.device.residents().context("residents")?.launch(&desc)?;
    Ok(resident.stop(Deadline::within(LIMIT))?)
}
