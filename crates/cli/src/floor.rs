//! The driver's own calls, timed in the same rounds as ours.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use warpweft::cuda::Baseline;
use warpweft::{BufferDesc, BufferView, CopyRegion, Device, Kernel, Launch, Op, OpenError, Runtime};

/// One raw copy.
#[derive(Debug)]
pub(crate) struct FloorCopy {
    baseline: Baseline,
    src: BufferView,
    dst: BufferView,
}

impl FloorCopy {
    /// The raw copy that does what a copy between these views does; `None` where there is no such call.
    ///
    /// Memory of a device that the driver does not know is replaced by pinned memory, which is what the link
    /// can be fed from at best.
    pub(crate) fn new(runtime: &Runtime, src: &BufferView, dst: &BufferView) -> anyhow::Result<Option<Self>> {
        let (Some(from), Some(to)) = (runtime.device(src.device()), runtime.device(dst.device())) else {
            return Ok(None);
        };
        let pinned = |device: &Arc<dyn Device>| -> anyhow::Result<BufferView> {
            Ok(BufferView::whole(device.allocate(&BufferDesc::host_visible(src.size()))?))
        };
        Ok(match (Baseline::new(from)?, Baseline::new(to)?) {
            (None, None) => None,
            (Some(baseline), None) => Some(Self { baseline, src: src.clone(), dst: pinned(from)? }),
            (None, Some(baseline)) => Some(Self { baseline, src: pinned(to)?, dst: dst.clone() }),
            (Some(baseline), Some(_)) => {
                let reaches = from.peers().is_some_and(|peers| peers.access(dst.device()).write);
                let floor = Self { baseline, src: src.clone(), dst: dst.clone() };
                (src.device() == dst.device() || reaches).then_some(floor)
            }
        })
    }

    /// Does all of them at once and waits for them.
    pub(crate) fn run_together(copies: &[Self]) -> anyhow::Result<()> {
        let ops = copies
            .iter()
            .map(|copy| Ok(Op::Copy(CopyRegion::new(&copy.src, &copy.dst)?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let work: Vec<_> = copies.iter().map(|copy| &copy.baseline).zip(&ops).collect();
        Ok(Baseline::run_together(&work)?)
    }
}

/// The raw launch of a kernel without arguments.
#[derive(Debug)]
pub(crate) struct FloorLaunch<'a> {
    baseline: Baseline,
    kernel: &'a Arc<dyn Kernel>,
}

impl<'a> FloorLaunch<'a> {
    /// `None` where there is no such call.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        kernel: &'a Arc<dyn Kernel>,
    ) -> Result<Option<Self>, OpenError> {
        Ok(Baseline::new(device)?.map(|baseline| Self { baseline, kernel }))
    }

    /// Launches one workgroup and waits for it.
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        Ok(self.baseline.run(&Op::Launch(Launch::new(self.kernel, [1; 3], &[])?))?)
    }
}

/// Built without a backend that has raw calls, there are none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
enum Baseline {}

#[cfg(not(feature = "cuda"))]
impl Baseline {
    fn new(_: &Arc<dyn Device>) -> Result<Option<Self>, OpenError> {
        Ok(None)
    }

    fn run(&self, _: &Op<'_>) -> Result<(), warpweft::SubmitError> {
        match *self {}
    }

    fn run_together(work: &[(&Self, &Op<'_>)]) -> Result<(), warpweft::SubmitError> {
        work.first().map_or(Ok(()), |(this, op)| this.run(op))
    }
}
