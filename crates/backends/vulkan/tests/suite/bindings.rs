//! What Vulkan allows of the buffers that a kernel is given.

use warpweft_core_types::{
    AllocError, Arg, BufferDesc, CopyRegion, Device, KernelContract, Op, Param, SubmitError,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Test, Verdict, kernel, launch, memory, open, refused_launch, run, words};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "bindings::a_view_that_starts_badly_is_refused", body: a_view_that_starts_badly_is_refused },
    Test { name: "bindings::a_view_that_is_too_large_is_refused", body: a_view_that_is_too_large_is_refused },
    Test { name: "bindings::windows_of_a_large_buffer_are_bound", body: windows_of_a_large_buffer_are_bound },
];

const MARK: &str = "
@group(0) @binding(0) var<storage, read_write> to: array<u32>;
@compute @workgroup_size(1) fn mark() { to[0] = 7u; to[arrayLength(&to) - 1u] = 8u; }";

fn mark(
    device: &std::sync::Arc<dyn Device>,
) -> Result<std::sync::Arc<dyn warpweft_core_types::Kernel>, crate::support::Need> {
    Ok(kernel(device, &KernelContract::new("mark", [Param::write(8).aligned(4)]), MARK)?)
}

fn a_view_that_starts_badly_is_refused() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let multiple = backend.capabilities(0).ok_or("device 0 is there")?.binding_alignment;
    let (kernel, whole) = (mark(&device)?, memory(&device, BufferDesc::host_visible(4 * multiple))?);
    let good = whole.slice(multiple..multiple + 16)?;
    launch(&device, &kernel, &[Arg::Buffer(&good)])?;
    assert_eq!(words(&good)?, [7, 0, 0, 8]);
    if multiple > 4 {
        let bad = whole.slice(4..20)?;
        let error = refused_launch(&device, &kernel, &[Arg::Buffer(&bad)])?;
        let named = matches!(
            &error,
            SubmitError::BindingMisaligned { buffer: 0, offset: 4, multiple_bytes, .. } if *multiple_bytes == multiple
        );
        assert!(named, "{error}");
    }
    Ok(())
}

fn a_view_that_is_too_large_is_refused() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let capabilities = backend.capabilities(0).ok_or("device 0 is there")?;
    let (kernel, most) = (mark(&device)?, capabilities.binding_bytes);
    let view = match device.allocate(&BufferDesc::device(most + 4)) {
        Ok(buffer) => warpweft_core_types::BufferView::whole(buffer),
        // Some devices bind as much as they can allocate.
        Err(AllocError::OutOfMemory { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let error = refused_launch(&device, &kernel, &[Arg::Buffer(&view)])?;
    let named = matches!(
        &error,
        SubmitError::BindingTooLarge { buffer: 0, size_bytes, limit_bytes, .. }
            if (*size_bytes, *limit_bytes) == (most + 4, most)
    );
    assert!(named, "{error}");
    Ok(())
}

/// The buffer is larger than what can be bound, where the device allocates as much.
fn windows_of_a_large_buffer_are_bound() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let capabilities = backend.capabilities(0).ok_or("device 0 is there")?;
    let (most, window) = (capabilities.binding_bytes.next_multiple_of(256), 1 << 20);
    let size = if most < 1 << 30 { most + window } else { 5 * window };
    let (kernel, whole) = (mark(&device)?, memory(&device, BufferDesc::device(size))?);
    let seen = memory(&device, BufferDesc::host_visible(window))?;
    for start in [0, window, size - window] {
        let view = whole.slice(start..start + window)?;
        launch(&device, &kernel, &[Arg::Buffer(&view)])?;
        run(&device, Op::Copy(CopyRegion::new(&view, &seen)?))?;
        let words = words(&seen)?;
        assert_eq!((words[0], words[1], words[words.len() - 1]), (7, 0, 8), "window at {start}");
    }
    Ok(())
}
