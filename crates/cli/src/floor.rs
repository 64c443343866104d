//! The driver's own calls, timed in the same rounds as ours.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use warpweft::cuda;
#[cfg(feature = "vulkan")]
use warpweft::vulkan;
use warpweft::{BufferDesc, BufferView, CopyRegion, Device, Kernel, Launch, Op, OpenError, Runtime};

/// A driver that is called without us.
enum Driver {
    #[cfg(feature = "cuda")]
    Cuda(cuda::Baseline),
    #[cfg(feature = "vulkan")]
    Vulkan(vulkan::Baseline),
}

impl Driver {
    /// `None` for a device that has no driver, as host devices.
    fn of(device: &Arc<dyn Device>) -> Result<Option<Self>, OpenError> {
        #[cfg(feature = "cuda")]
        if let Some(baseline) = cuda::Baseline::new(device)? {
            return Ok(Some(Self::Cuda(baseline)));
        }
        #[cfg(feature = "vulkan")]
        if let Some(baseline) = vulkan::Baseline::new(device) {
            return Ok(Some(Self::Vulkan(baseline)));
        }
        Ok(None)
    }
}

/// From where and to where.
type Copies = Vec<(BufferView, BufferView)>;

/// The raw copies of one way.
#[derive(Debug)]
pub(crate) enum FloorCopies {
    /// In one stream.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Baseline, Copies),
    /// Each recorded beforehand.
    #[cfg(feature = "vulkan")]
    Vulkan(Vec<vulkan::Prerecorded>),
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
        let (driver, copies) = match (Driver::of(from)?, Driver::of(to)?) {
            (None, None) => return Ok(None),
            (Some(driver), None) => {
                let to_pinned = |(src, _): &(BufferView, _)| Ok((src.clone(), pinned(from)?));
                (driver, copies.iter().map(to_pinned).collect::<anyhow::Result<_>>()?)
            }
            (None, Some(driver)) => {
                let src = pinned(to)?;
                (driver, copies.iter().map(|(_, dst)| (src.clone(), dst.clone())).collect())
            }
            (Some(driver), Some(_)) => {
                let reaches = from.peers().is_some_and(|peers| peers.access(dst.device()).write);
                if src.device() != dst.device() && !reaches {
                    return Ok(None);
                }
                (driver, copies.to_vec())
            }
        };
        Self::prepare(driver, copies).map(Some)
    }

    fn prepare(driver: Driver, copies: Copies) -> anyhow::Result<Self> {
        match driver {
            #[cfg(feature = "cuda")]
            Driver::Cuda(baseline) => Ok(Self::Cuda(baseline, copies)),
            #[cfg(feature = "vulkan")]
            Driver::Vulkan(baseline) => {
                let record =
                    |(src, dst): &(_, _)| Ok(baseline.record(&[Op::Copy(CopyRegion::new(src, dst)?)])?);
                Ok(Self::Vulkan(copies.iter().map(record).collect::<anyhow::Result<_>>()?))
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_, copies) => copies.len(),
            #[cfg(feature = "vulkan")]
            Self::Vulkan(copies) => copies.len(),
        }
    }

    /// Starts the copies of all ways by turns, then waits for them. All ways are of one driver, since they have the
    /// same ends.
    pub(crate) fn run_together(ways: &[Self]) -> anyhow::Result<()> {
        let longest = ways.iter().map(Self::len).max().unwrap_or(0);
        let turns = (0..longest).flat_map(|turn| ways.iter().map(move |way| (way, turn)));
        let mut work = Work::default();
        for (way, turn) in turns {
            work.add(way, turn)?;
        }
        work.run()
    }
}

/// Copies that are about to start.
#[derive(Default)]
struct Work<'a> {
    #[cfg(feature = "cuda")]
    cuda: Vec<(&'a cuda::Baseline, Op<'a>)>,
    #[cfg(feature = "vulkan")]
    vulkan: Vec<&'a vulkan::Prerecorded>,
}

impl<'a> Work<'a> {
    fn add(&mut self, way: &'a FloorCopies, turn: usize) -> anyhow::Result<()> {
        match way {
            #[cfg(feature = "cuda")]
            FloorCopies::Cuda(baseline, copies) => {
                if let Some((src, dst)) = copies.get(turn) {
                    self.cuda.push((baseline, Op::Copy(CopyRegion::new(src, dst)?)));
                }
            }
            #[cfg(feature = "vulkan")]
            FloorCopies::Vulkan(copies) => self.vulkan.extend(copies.get(turn)),
        }
        Ok(())
    }

    fn run(&self) -> anyhow::Result<()> {
        #[cfg(feature = "cuda")]
        {
            let work: Vec<_> = self.cuda.iter().map(|(baseline, op)| (*baseline, op)).collect();
            cuda::Baseline::run_together(&work)?;
        }
        #[cfg(feature = "vulkan")]
        vulkan::Prerecorded::run_together(&self.vulkan)?;
        Ok(())
    }
}

/// The raw launch of one workgroup of a kernel without arguments.
#[derive(Debug)]
pub(crate) enum FloorLaunch {
    #[cfg(feature = "cuda")]
    Cuda(cuda::Baseline, Arc<dyn Kernel>),
    /// Recorded beforehand.
    #[cfg(feature = "vulkan")]
    Vulkan(vulkan::Prerecorded),
}

impl FloorLaunch {
    /// `None` where there is no such call.
    pub(crate) fn new(device: &Arc<dyn Device>, kernel: &Arc<dyn Kernel>) -> anyhow::Result<Option<Self>> {
        Ok(match Driver::of(device)? {
            None => None,
            #[cfg(feature = "cuda")]
            Some(Driver::Cuda(baseline)) => Some(Self::Cuda(baseline, Arc::clone(kernel))),
            #[cfg(feature = "vulkan")]
            Some(Driver::Vulkan(baseline)) => {
                let launch = Op::Launch(Launch::new(kernel, [1; 3], &[])?);
                Some(Self::Vulkan(baseline.record(&[launch])?))
            }
        })
    }

    /// Launches it and waits for it.
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(baseline, kernel) => {
                Ok(baseline.run(&Op::Launch(Launch::new(kernel, [1; 3], &[])?))?)
            }
            #[cfg(feature = "vulkan")]
            Self::Vulkan(launch) => Ok(launch.run()?),
        }
    }
}
