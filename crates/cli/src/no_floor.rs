//! Built without a backend whose driver can be called, there are no raw calls to time.

use std::sync::Arc;

use warpweft::{BufferView, Device, Kernel, Runtime};

#[derive(Debug)]
pub(crate) enum FloorCopies {}

impl FloorCopies {
    #[expect(clippy::unnecessary_wraps, reason = "as with a driver")]
    pub(crate) fn new(_: &Runtime, _: &[(BufferView, BufferView)]) -> anyhow::Result<Option<Self>> {
        Ok(None)
    }

    #[expect(clippy::unnecessary_wraps, reason = "as with a driver")]
    pub(crate) fn run_together(_: &[Self]) -> anyhow::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) enum FloorLaunch {}

impl FloorLaunch {
    #[expect(clippy::unnecessary_wraps, reason = "as with a driver")]
    pub(crate) fn new(_: &Arc<dyn Device>, _: &Arc<dyn Kernel>) -> anyhow::Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn run(&self) -> anyhow::Result<()> {
        match *self {}
    }
}
