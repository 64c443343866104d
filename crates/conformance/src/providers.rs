//! The devices the suite runs on.

use std::{sync::Arc, time::Duration};

use warpweft_core_types::{Backend, LinkClass, OpenError};
use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec};
use warpweft_wrappers::{FaultConfig, FaultyBackend, TracingBackend, ValidatingBackend};

use crate::harness::Provider;

/// Every provider, those first that are there on every machine.
pub(crate) fn all() -> Vec<Provider> {
    vec![
        host("host", || Ok(Arc::new(HostBackend::with_devices(4)?))),
        host("host, 3 workers", three_workers),
        host("host, chain", chain),
        host("host, delayed links", delayed_links),
        host("host, no host memory", no_host_memory),
        host("faulty host without faults", || {
            let inner = Arc::new(HostBackend::with_devices(4)?);
            Ok(Arc::new(FaultyBackend::new(inner, FaultConfig::default())))
        }),
        host("validating host", || {
            Ok(Arc::new(ValidatingBackend::new(Arc::new(HostBackend::with_devices(4)?))))
        }),
        host("tracing host", || {
            Ok(Arc::new(TracingBackend::new(Arc::new(HostBackend::with_devices(4)?), 64)))
        }),
    ]
}

fn host(label: &'static str, open: fn() -> Result<Arc<dyn Backend>, OpenError>) -> Provider {
    Provider { label, backend: "host", open, unsupported: &[], expected_failures: &[] }
}

/// Kernels and large copies are split between threads.
fn three_workers() -> Result<Arc<dyn Backend>, OpenError> {
    let config = HostDeviceConfig { workers: 3, ..HostDeviceConfig::default() };
    let link = LinkSpec::default();
    let builder = HostBackend::builder().devices(2, &config);
    Ok(Arc::new(builder.link_all_devices(link).link_all_to_host(link).build()?))
}

/// Devices in a row, each also linked with host memory, slowly.
fn chain() -> Result<Arc<dyn Backend>, OpenError> {
    let fast = LinkSpec::new(LinkClass::NvLink).with_cost(100.0, Duration::from_micros(1));
    let slow = LinkSpec::new(LinkClass::Pcie).with_cost(0.5, Duration::from_millis(1));
    let builder = HostBackend::builder().devices(4, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_chain(fast).link_all_to_host(slow).build()?))
}

/// Copies take time, so that everything is under way for longer.
fn delayed_links() -> Result<Arc<dyn Backend>, OpenError> {
    let link = LinkSpec::new(LinkClass::Pcie).with_cost(4.0, Duration::from_micros(300));
    let builder = HostBackend::builder().devices(4, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_all_devices(link).link_all_to_host(link).delay_links(true).build()?))
}

/// Without links to host memory, whole families are absent.
fn no_host_memory() -> Result<Arc<dyn Backend>, OpenError> {
    let builder = HostBackend::builder().devices(2, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_all_devices(LinkSpec::default()).build()?))
}
