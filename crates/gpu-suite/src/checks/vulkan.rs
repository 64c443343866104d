//! One allocation, two APIs: host memory that CUDA and Vulkan use on the same GPU.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_cli::vulkan;
use warpweft_core_types::{
    AllocError, Arg, Backend as _, BufferDesc, BufferView, Device, Features, HostMemory, Launch, Op,
};
use warpweft_host::HostBackend;
use warpweft_vulkan::{VulkanBackend, VulkanConfig};

use crate::{
    kernels,
    rig::{Bench, NotRun, Rig, report, say},
};

/// Pages that both use, and the bytes of one.
const PAGES: u32 = 16;
const PAGE: u64 = 4096;

/// The same pages as each API has them.
struct Shared {
    cuda: BufferView,
    vulkan: BufferView,
}

/// Pages that one API pins first and the other one after it. Whether both drivers take them is what is found out; if
/// they do, a kernel of CUDA writes and a shader reads, and nothing is copied.
pub(super) fn one_allocation(rig: &Rig) -> Result<()> {
    let cuda = rig.first();
    let (_backend, vulkan) = same_silicon(cuda)?;
    for cuda_first in [true, false] {
        let order = if cuda_first { "CUDA pins first" } else { "Vulkan pins first" };
        let found = match pin(cuda, &vulkan, cuda_first) {
            Ok(shared) => {
                pass_words(cuda, &vulkan, &shared)?;
                "both pin the same pages; written by CUDA, read by a shader, nothing copied".to_owned()
            }
            Err(error) => format!("not both: {error:#}"),
        };
        report(&json!({"one allocation, two APIs": order, "found": found, "copied_bytes": 0}));
        say(&format!("{order}: {found}"));
    }
    Ok(())
}

/// The GPU of a CUDA device as Vulkan has it.
fn same_silicon(cuda: &Bench) -> Result<(VulkanBackend, Bench)> {
    let id = cuda.device.info().id;
    let absent = |reason: String| NotRun(format!("it needs {id} as a Vulkan device: {reason}"));
    let backend = vulkan::open(&VulkanConfig::default()).map_err(|error| absent(error.to_string()))?;
    let infos = backend.devices()?;
    let same = infos.iter().find(|info| info.id.uuid == id.uuid);
    let same = same.ok_or_else(|| absent(format!("none of {} has its UUID", infos.len())))?;
    let device = backend.open(same.id.ordinal, Features::empty())?;
    Ok((backend, Bench::with(device, &kernels::vulkan())?))
}

/// Fresh pages, pinned by both.
fn pin(cuda: &Bench, vulkan: &Bench, cuda_first: bool) -> Result<Shared> {
    let host = HostBackend::with_devices(1)?.open(0, Features::HOST_VISIBLE_MEMORY)?;
    let pages = host.allocate(&BufferDesc::host_visible(u64::from(PAGES) * PAGE))?;
    let memory = HostMemory::of_buffer(pages).context("memory of a host device")?;
    if cuda_first {
        let cuda = import(&cuda.device, memory.clone())?;
        return Ok(Shared { cuda, vulkan: import(&vulkan.device, memory)? });
    }
    let vulkan = import(&vulkan.device, memory.clone())?;
    Ok(Shared { cuda: import(&cuda.device, memory)?, vulkan })
}

fn import(device: &Arc<dyn Device>, memory: HostMemory) -> Result<BufferView> {
    let id = device.info().id;
    let family = device.host_import().with_context(|| format!("{id} imports no host memory"))?;
    let imported: Result<_, AllocError> = family.import(memory);
    Ok(BufferView::whole(imported.with_context(|| format!("{id} does not take the pages"))?))
}

/// A word of each page: from CUDA to a shader, through the pages alone.
fn pass_words(cuda: &Bench, vulkan: &Bench, shared: &Shared) -> Result<()> {
    let address = |view: &BufferView| view.buffer().mapping().map(|mapping| mapping.as_ptr().addr());
    ensure!(address(&shared.cuda) == address(&shared.vulkan), "they are at two places");
    let step = cuda.kernel("step")?;
    for page in 0..PAGES {
        let word = shared.cuda.slice(u64::from(page) * PAGE..u64::from(page) * PAGE + 4)?;
        let digit = (page + 1).to_le_bytes();
        let args = [Arg::Buffer(&word), Arg::Scalar(&digit)];
        cuda.run(&[Op::Launch(Launch::new(&step, [1, 1, 1], &args)?)])?;
    }
    let (gather, found) =
        (vulkan.kernel("gather")?, vulkan.allocate(BufferDesc::host_visible(4 * u64::from(PAGES)))?);
    let args = [Arg::Buffer(&found), Arg::Buffer(&shared.vulkan)];
    vulkan.run(&[Op::Launch(Launch::new(&gather, [PAGES, 1, 1], &args)?)])?;
    let mut bytes = [0; 4 * PAGES as usize];
    found.read(&mut bytes)?;
    let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    ensure!(words == (1..=PAGES).collect::<Vec<_>>(), "the shader read {words:?}");
    Ok(())
}
