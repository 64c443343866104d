//! The engine for few bytes: kernels that store what they give straight into the other ranks' memory.
//!
//! A call is a launch in the caller's queue, with the operands, the window by which all ranks' memory is reached, and a
//! page of the host. Which messages are free is kept on the devices, so that graphs replay calls without the host. How
//! ranks do it is in `kernels/low_latency.cu`, and why in `docs/design/low-latency.md`.

mod kernel;
#[cfg(test)]
mod model;
mod plan;
mod room;
mod window;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use smallvec::SmallVec;
use warpweft_bootstrap::Group;
use warpweft_core_types::{
    Arg, CollectiveCall, CollectiveError, CollectiveFailure, CollectiveOp, CopyRegion, DType, Deadline,
    Device, Failure, Kernel, Launch, Op, OwnedOp, ReservedMultiprocessors,
};

use self::{
    kernel::Kernels,
    plan::{Operands, Place, Step, Steps, Unpaired},
    window::{Cause, Told, Window},
};
use super::{Engine, EngineKind};
use crate::{CommConfig, CommError, Shape, dispatch::message_bytes};

pub(crate) use self::kernel::SOURCE;

/// One rank of a window, and how it does calls.
#[derive(Debug)]
pub(crate) struct LowLatencyEngine {
    core: Arc<Core>,
    /// The way of calls that all ranks make; by their size if none was found to be better.
    shape: Option<Shape>,
}

/// What all ways have in common.
#[derive(Debug)]
struct Core {
    window: Window,
    kernels: Kernels,
    place: Place,
    /// So that its blocks find room beside residents and those of others, until it is over.
    reserved: Mutex<Option<ReservedMultiprocessors>>,
    /// How long a device waits for another.
    limit: Duration,
}

impl Core {
    /// Ends what waits on devices, which then takes up to a millisecond, and leaves its room to others.
    fn end(&self) {
        self.window.end();
        // Nothing panics under the lock.
        drop(self.reserved.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl LowLatencyEngine {
    /// Makes this rank's part of a window, which all ranks do together.
    pub(crate) fn new(
        group: &Group,
        device: &Arc<dyn Device>,
        config: &CommConfig,
        deadline: Deadline,
    ) -> Result<Self, CommError> {
        // The host ends a call that is late. The device's own limit is for work that the host knows nothing of.
        let limit = config.timeout.saturating_mul(2);
        // First, and with one outcome for all: whoever fails later meets the others where engines are confirmed.
        let (channels, reserved) = room::reserve(group, device.as_ref(), config.multiprocessors, deadline)?;
        let window = Window::exchange(group, device, limit, deadline)?;
        let place = Place { rank: group.rank().0, ranks: group.size(), channels };
        let kernels = kernel::load(device.as_ref())?;
        Ok(Self::of(Core { window, kernels, place, reserved: Mutex::new(reserved), limit }))
    }

    /// Ranks that are all on one device.
    #[cfg(feature = "__loopback")]
    pub(crate) fn on_one_device(
        device: &Arc<dyn Device>,
        ranks: u32,
        limit: Duration,
        deadline: Deadline,
    ) -> Result<Vec<Self>, CommError> {
        let kernels = kernel::load(device.as_ref())?;
        let windows = Window::on_one_device(device, ranks, limit, deadline)?;
        let of_rank = |(rank, window)| {
            let place = Place { rank, ranks, channels: window::CHANNELS };
            Self::of(Core { window, kernels: kernels.clone(), place, reserved: Mutex::default(), limit })
        };
        Ok((0..).zip(windows).map(of_rank).collect())
    }

    fn of(core: Core) -> Self {
        Self { core: Arc::new(core), shape: None }
    }

    /// Why a device cannot be a rank by itself, if so.
    pub(crate) fn refuses(device: &dyn Device) -> Result<(), String> {
        let id = device.info().id;
        if !kernel::is_run_by(device) {
            return Err(format!("{id} does not run PTX"));
        }
        if device.peers().is_none() || device.sharing().is_none() {
            return Err(format!("{id} does not reach memory of other devices or processes"));
        }
        Ok(())
    }

    fn shape(&self, call: &CollectiveCall<'_>) -> Shape {
        let place = self.core.place;
        self.shape.unwrap_or_else(|| place.usual(call.op(), message_bytes(call, place.ranks)))
    }

    fn steps<'a>(&self, calls: &[CollectiveCall<'a>]) -> Result<Steps<'a>, CommError> {
        plan::plan(self.core.place, calls, |call| self.shape(call)).map_err(|Unpaired| {
            self.cannot("a send to itself without a receive of the same group, or the other way".to_owned())
        })
    }

    fn args<'a>(&'a self, step: &Step<'a>, told: &'a [u8]) -> SmallVec<[Arg<'a>; 5]> {
        let own = [self.core.window.all(), self.core.window.host()].into_iter();
        own.chain(step.operands()).map(Arg::Buffer).chain([Arg::Scalar(told)]).collect()
    }

    fn op<'a>(&'a self, step: &Step<'a>, args: &'a [Arg<'a>]) -> Result<Op<'a>, CommError> {
        match *step {
            Step::Launch { operands, channels, call } => {
                let [lines, bare] = match operands {
                    Operands::Apart(..) => &self.core.kernels.apart,
                    Operands::Within(_) => &self.core.kernels.within,
                };
                let kernel = if call.bare == [false; 2] { lines } else { bare };
                Ok(Op::Launch(Launch::new(kernel, [channels, 1, 1], args)?))
            }
            Step::Copy { src, dst } => {
                let region = CopyRegion::new(src, dst).map_err(|error| CommError::Call(error.into()))?;
                Ok(Op::Copy(region))
            }
        }
    }

    fn is_own(&self, kernel: &Arc<dyn Kernel>) -> bool {
        let Kernels { apart, within } = &self.core.kernels;
        apart.iter().chain(within).any(|own| Arc::ptr_eq(own, kernel))
    }

    /// What became of a device that waited, as all ranks are told of it.
    fn failure_of(&self, told: Told) -> CollectiveFailure {
        let Told { cause, peer, message, channel } = told;
        match cause {
            Cause::Late => CollectiveFailure::TimedOut {
                number: 0,
                op: format!("message {message} of channel {channel}"),
                after: self.core.limit,
                waiting: format!("the device of rank {} waited for rank {peer}", self.core.place.rank),
            },
            Cause::Peer => CollectiveFailure::Aborted {
                rank: peer,
                reason: format!("its device gave up; the device of rank {} was told", self.core.place.rank),
            },
            Cause::Host => CollectiveFailure::Aborted {
                rank: self.core.place.rank,
                reason: format!("its device was ended while it waited for rank {peer}"),
            },
        }
    }
}

impl Engine for LowLatencyEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::LowLatency
    }

    fn does(&self, op: CollectiveOp, dtype: DType) -> bool {
        kernel::code(op.reduction(), dtype).is_some()
    }

    /// Numbers of messages are those of the order in which kernels run.
    fn needs_order(&self) -> bool {
        true
    }

    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let steps = self.steps(calls)?;
        let told: SmallVec<[_; 2]> = steps.iter().map(Step::bytes).collect();
        let args = steps.iter().zip(&told).map(|(step, told)| self.args(step, told));
        let args: SmallVec<[_; 2]> = args.collect();
        let ops = steps.iter().zip(&args).map(|(step, args)| self.op(step, args));
        let ops = ops.collect::<Result<SmallVec<[_; 2]>, CommError>>()?;
        visit(&ops)
    }

    fn shapes(&self, op: CollectiveOp, bytes: u64) -> Vec<Shape> {
        self.core.place.shapes(op, bytes)
    }

    fn in_shape(self: Arc<Self>, shape: Shape) -> Option<Arc<dyn Engine>> {
        let is_known = (1..=self.core.place.channels).contains(&shape.channels);
        is_known
            .then(|| Arc::new(Self { core: Arc::clone(&self.core), shape: Some(shape) }) as Arc<dyn Engine>)
    }

    fn calls_in(&self, node: &OwnedOp) -> usize {
        let own = node.launch().filter(|launch| self.is_own(launch.kernel()));
        own.map_or(0, |launch| usize::from(launch.with(|launch| !plan::is_pairwise(launch.args()))))
    }

    fn check(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn given_up(&self) -> Option<Arc<Failure>> {
        self.core.window.told().map(|told| Arc::new(self.failure_of(told).into()))
    }

    fn abort(&self, _failure: &Arc<Failure>, _deadline: Deadline) {
        self.core.end();
    }

    /// Graphs that are replayed later end, which tells the other ranks' devices.
    fn leave(&self, _failure: &Arc<Failure>) {
        self.core.end();
    }

    /// By its room, which is not always the same.
    fn variant(&self) -> u32 {
        self.core.place.channels
    }
}
