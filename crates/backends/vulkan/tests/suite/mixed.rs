//! Two drivers at once: one allocation, two APIs.

use std::sync::Arc;

use warpweft_core_types::{
    Arg, Backend as _, BufferDesc, BufferView, Device, Features, HostMemory, KernelContract, Param,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, Test, Verdict, kernel, launch, open_backend, words};

pub(crate) const TESTS: &[Test] =
    &[Test { name: "mixed::two_drivers_share_one_allocation", body: two_drivers_share_one_allocation }];

const DOUBLE: &str = "
@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@compute @workgroup_size(64) fn double(@builtin(global_invocation_id) id: vec3<u32>) {
    words[id.x] = words[id.x] * 2u;
}";

/// A kernel of each driver works on the same bytes, which nobody copies.
fn two_drivers_share_one_allocation() -> Verdict {
    let backend = open_backend(&VulkanConfig::default())?;
    let infos = backend.devices()?;
    let imports = |ordinal: &u32| {
        backend.capabilities(*ordinal).is_some_and(|capabilities| capabilities.host_import.is_some())
    };
    let ordinals: Vec<u32> = (0..).take(infos.len()).collect();
    let reader = ordinals.iter().copied().find(imports);
    let reader = reader.ok_or_else(|| Need::Missing("a device that imports host memory".to_owned()))?;
    let owner = ordinals.iter().copied().find(|&ordinal| ordinal != reader);
    let owner = owner.ok_or_else(|| Need::Missing("a second driver".to_owned()))?;
    let (owner, reader) =
        (backend.open(owner, Features::empty())?, backend.open(reader, Features::HOST_IMPORT)?);
    let family = reader.host_import().ok_or("the family is there")?;
    let own = owner.allocate(&BufferDesc::host_visible(family.alignment()))?;
    let memory = HostMemory::of_buffer(Arc::clone(&own)).ok_or("it is mapped")?;
    let (own, import) = (BufferView::whole(own), BufferView::whole(family.import(memory)?));
    own.write(&(0..64_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>())?;
    let contract =
        KernelContract::new("double", [Param::read_write(256).aligned(4)]).with_workgroup_size([64, 1, 1]);
    let double = |device: &Arc<dyn Device>, view: &BufferView| {
        launch(device, &kernel(device, &contract, DOUBLE)?, &[Arg::Buffer(view)])
    };
    double(&owner, &own)?;
    double(&reader, &import)?;
    double(&owner, &own)?;
    assert_eq!(words(&import)?[..64], (0..64).map(|word| word * 8).collect::<Vec<u32>>());
    Ok(())
}
