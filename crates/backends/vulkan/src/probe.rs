//! A trial of the driver when a device is opened: some software drivers stop loops early and say nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use warpweft_core_types::{
    Access, Buffer as _, BufferDesc, CodeFormat, ForeignCode, KernelContract, OpenError, Param,
};

use crate::{
    device::no_memory,
    gpu::Gpu,
    instance::unavailable,
    memory::{Arena, Span},
    pipeline::Pipeline,
    record::Recording,
    service::Service,
    shader::Shader,
};

/// More rounds than lavapipe of Mesa 22.3 makes in one shader: it ends after 65,535.
const ROUNDS: u32 = 70_000;

/// How long the trial may take: compilers of software drivers need a quarter of a second.
const PATIENCE: Duration = Duration::from_secs(20);

/// Each round depends on the one before, so that no compiler leaves the loop out.
const KERNEL: &str = "
@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@compute @workgroup_size(1) fn main() {
    let rounds = words[0];
    var state = 1u;
    for (var round = 0u; round < rounds; round++) {
        state = state * 1664525u + 1013904223u;
    }
    words[1] = state;
}";

/// Verdicts so far, by driver and device: each is tried once in a process.
static VERDICTS: Mutex<Option<HashMap<[String; 2], Option<String>>>> = Mutex::new(None);

/// Refuses a driver whose loops end early.
pub(crate) fn check(gpu: &Arc<Gpu>, arena: &Arena, service: &Arc<Service>) -> Result<(), OpenError> {
    let capabilities = gpu.capabilities();
    let key = [capabilities.name.clone(), capabilities.driver.clone()];
    // Nothing but the trial runs under the lock, which one thread shall make and others wait for.
    let mut verdicts = VERDICTS.lock().unwrap_or_else(PoisonError::into_inner);
    let verdicts = verdicts.get_or_insert_default();
    let verdict = match verdicts.get(&key) {
        Some(verdict) => verdict.clone(),
        None => {
            let verdict = match try_loop(gpu, arena, service) {
                Ok(()) => None,
                Err(Flaw::Lasting(reason)) => Some(reason),
                // It says nothing of the driver's loops.
                Err(Flaw::Passing(error)) => return Err(error),
            };
            verdicts.insert(key, verdict.clone());
            verdict
        }
    };
    match verdict {
        None => Ok(()),
        Some(reason) => {
            let (name, driver) = (&capabilities.name, &capabilities.driver);
            Err(unavailable(format!("a driver that can be relied on: {name} ({driver}) {reason}")))
        }
    }
}

/// Why the trial was not passed.
enum Flaw {
    /// The driver is at fault.
    Lasting(String),
    /// The driver was not tried to the end, for want of memory or of a device.
    Passing(OpenError),
}

fn lasting(reason: impl ToString) -> Flaw {
    Flaw::Lasting(reason.to_string())
}

#[expect(unsafe_code, reason = "runs a kernel on memory that it keeps")]
fn try_loop(gpu: &Arc<Gpu>, arena: &Arena, service: &Arc<Service>) -> Result<(), Flaw> {
    let passing = |error| Flaw::Passing(gpu.sort(error, OpenError::Failed, OpenError::Driver));
    let words = arena.allocate(&BufferDesc::host_visible(8));
    let words = Arc::new(words.map_err(|error| Flaw::Passing(no_memory(error)))?);
    let mapping = words.mapping().ok_or_else(|| lasting("has no memory that the host reaches"))?;
    mapping.write(0, &ROUNDS.to_le_bytes()).map_err(lasting)?;
    let param = Param::Buffer { access: Access::ReadWrite, min_size: 8, alignment: 4 };
    let contract = KernelContract::new("main", [param]);
    let code = ForeignCode::Source { format: CodeFormat::Wgsl, text: KERNEL.to_owned() };
    let contracts = std::slice::from_ref(&contract);
    let shader = Shader::read(&code, contracts, gpu.capabilities()).map_err(lasting)?;
    let entry = shader.entry(&contract, gpu.capabilities()).map_err(lasting)?;
    let pipeline = Pipeline::create(gpu, "main", &entry, 1).map_err(passing)?;
    let spans: [Span; 1] = [words.span()];
    let keep = Arc::new((Arc::clone(&words), Arc::clone(&pipeline)));
    let record = |recording: &mut Recording| {
        // SAFETY: the pipeline was made for one buffer and no scalars; the kernel touches its first two words alone,
        // which start at a multiple that every device binds (`ALIGNMENT`).
        unsafe { recording.dispatch(&pipeline, &spans, None, &[], [1, 1, 1]) }
    };
    // SAFETY: `keep` holds both.
    let done = unsafe { service.submit(Some(keep), record) }
        .and_then(|ticket| ticket.wait(PATIENCE))
        .map_err(passing)?;
    if !done {
        return Err(lasting(format!("did not finish a loop of {ROUNDS} rounds within {PATIENCE:?}")));
    }
    let mut answer = [0; 4];
    mapping.read(4, &mut answer).map_err(lasting)?;
    if u32::from_le_bytes(answer) == expected() {
        return Ok(());
    }
    Err(lasting(format!(
        "ends a loop of {ROUNDS} rounds early and says nothing, as lavapipe of Mesa 22.3 does; Mesa 24 and newer do not"
    )))
}

fn expected() -> u32 {
    (0..ROUNDS).fold(1, |state: u32, _| state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223))
}
