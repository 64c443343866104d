//! Making the backends that the command line names.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use warpweft::{
    Backend, LinkClass,
    host::{HostBackend, HostBuilder, HostDeviceConfig, LinkSpec, Place},
};

use crate::{
    args::{Links, Selection},
    impersonate,
    output::WrongCall,
    topo,
};

/// Backends this program was built with.
pub(crate) const KNOWN: &[&str] = &[
    "host",
    #[cfg(feature = "cuda")]
    "cuda",
    #[cfg(feature = "vulkan")]
    "vulkan",
];

/// A backend that was named, and what it tells people beyond the seam.
pub(crate) struct Chosen {
    pub(crate) backend: Arc<dyn Backend>,
    notes: Box<dyn Fn() -> Vec<String>>,
}

impl Chosen {
    /// What it found out about links, and why if that is less than usual.
    pub(crate) fn notes(&self) -> Vec<String> {
        (self.notes)()
    }
}

/// The backends named, each once.
pub(crate) fn backends(selection: &Selection) -> anyhow::Result<Vec<Arc<dyn Backend>>> {
    Ok(chosen(selection)?.into_iter().map(|chosen| chosen.backend).collect())
}

/// The same, with what they have to tell.
pub(crate) fn chosen(selection: &Selection) -> anyhow::Result<Vec<Chosen>> {
    if selection.copies > 1 && !selection.backend.iter().any(|name| name == "vulkan") {
        return Err(WrongCall(
            "--copies opens Vulkan's devices several times; add --backend vulkan".to_owned(),
        )
        .into());
    }
    let mut all = Vec::new();
    for (position, name) in selection.backend.iter().enumerate() {
        if selection.backend[..position].contains(name) {
            return Err(WrongCall(format!("backend {name:?} is named twice")).into());
        }
        all.push(named(name, selection)?);
    }
    Ok(all)
}

fn named(name: &str, selection: &Selection) -> anyhow::Result<Chosen> {
    match name {
        "host" => Ok(Chosen { backend: Arc::new(host(selection)?), notes: Box::new(Vec::new) }),
        #[cfg(feature = "cuda")]
        "cuda" => {
            let backend = Arc::new(warpweft::cuda::CudaBackend::new()?);
            Ok(Chosen {
                backend: Arc::clone(&backend) as Arc<dyn Backend>,
                notes: Box::new(move || backend.notes()),
            })
        }
        #[cfg(feature = "vulkan")]
        "vulkan" => vulkan(selection.copies),
        _ => {
            Err(WrongCall(format!("there is no backend {name:?}; this program has: {}", KNOWN.join(", ")))
                .into())
        }
    }
}

#[cfg(feature = "vulkan")]
fn vulkan(copies: u32) -> anyhow::Result<Chosen> {
    use warpweft::vulkan::VulkanConfig;

    let backend = Arc::new(crate::vulkan::open(&VulkanConfig::default().with_copies(copies))?);
    let mut notes = vec!["Vulkan tells nothing of links; --measure times them".to_owned()];
    notes.extend(backend.skipped().iter().map(|skipped| format!("not used: {skipped}")));
    Ok(Chosen { backend, notes: Box::new(move || notes.clone()) })
}

fn host(selection: &Selection) -> anyhow::Result<HostBackend> {
    let builder = match &selection.impersonate {
        Some(path) => impersonate::builder(&topo::read(path)?.topology)?,
        None => linked(selection),
    };
    builder.build().context("the host devices cannot be made")
}

/// Links between devices are marked cheaper than those to host memory, so that a chain is relayed.
fn linked(selection: &Selection) -> HostBuilder {
    let near = LinkSpec::new(LinkClass::HostMemory).with_cost(10.0, Duration::from_nanos(500));
    let far = LinkSpec::new(LinkClass::HostMemory).with_cost(1.0, Duration::from_micros(5));
    let last = Place::Device(selection.devices - 1);
    let builder = HostBackend::builder().devices(selection.devices, &HostDeviceConfig::default());
    let builder = match selection.links {
        Links::All => builder.link_all_devices(near),
        Links::Chain => builder.link_chain(near),
        Links::Ring if selection.devices > 2 => {
            builder.link_chain(near).link_both(last, Place::Device(0), near)
        }
        Links::Ring => builder.link_chain(near),
        Links::None => builder,
    };
    builder.link_all_to_host(far)
}
