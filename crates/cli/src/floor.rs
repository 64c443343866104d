//! The driver's own calls, timed in the same rounds as ours.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use warpweft::cuda::Baseline;
use warpweft::{BufferDesc, BufferView, CopyRegion, Device, Kernel, Launch, Op, OpenError, Runtime};

/// The raw copies of one way, in one stream.
#[derive(Debug)]
pub(crate) struct FloorCopies {
    baseline: Baseline,
    /// From where and to where.
    copies: Vec<(BufferView, BufferView)>,
}

impl FloorCopies {
    /// The raw copies that do what copies between these views do, all of them of the same two devices; `None`
    /// where there is no such call.
    ///
    /// Memory of a device that the driver does not know is replaced by pinned memory, which is what the link
    /// can be fed from at best.
    pub(crate) fn new(
        runtime: &Runtime,
        copies: &[(BufferView, BufferView)],
    ) -> anyhow::Result<Option<Self>> {
        let Some((src, dst)) = copies.first() else { return Ok(None) };
        let (Some(from), Some(to)) = (runtime.device(src.device()), runtime.device(dst.device())) else {
            return Ok(None);
        };
        let pinned = |device: &Arc<dyn Device>| -> anyhow::Result<BufferView> {
            Ok(BufferView::whole(device.allocate(&BufferDesc::host_visible(src.size()))?))
        };
        let (baseline, copies) = match (Baseline::new(from)?, Baseline::new(to)?) {
            (None, None) => return Ok(None),
            (Some(baseline), None) => {
                let to_pinned = |(src, _): &(BufferView, _)| Ok((src.clone(), pinned(from)?));
                (baseline, copies.iter().map(to_pinned).collect::<anyhow::Result<_>>()?)
            }
            (None, Some(baseline)) => {
                let src = pinned(to)?;
                (baseline, copies.iter().map(|(_, dst)| (src.clone(), dst.clone())).collect())
            }
            (Some(baseline), Some(_)) => {
                let reaches = from.peers().is_some_and(|peers| peers.access(dst.device()).write);
                if src.device() != dst.device() && !reaches {
                    return Ok(None);
                }
                (baseline, copies.to_vec())
            }
        };
        Ok(Some(Self { baseline, copies }))
    }

    /// Starts the copies of all ways by turns, then waits for them.
    pub(crate) fn run_together(ways: &[Self]) -> anyhow::Result<()> {
        let longest = ways.iter().map(|way| way.copies.len()).max().unwrap_or(0);
        let turns = (0..longest).flat_map(|turn| ways.iter().map(move |way| (way, turn)));
        let turns = turns.filter_map(|(way, turn)| Some((&way.baseline, way.copies.get(turn)?)));
        let work = turns
            .map(|(baseline, (src, dst))| Ok((baseline, Op::Copy(CopyRegion::new(src, dst)?))))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let work: Vec<_> = work.iter().map(|(baseline, op)| (*baseline, op)).collect();
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
