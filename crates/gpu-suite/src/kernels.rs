//! The suite's kernels and their contracts.

use std::sync::Arc;

use anyhow::Result;
use warpweft_core_types::{
    CodeFormat, Device, ForeignCode, Kernel, KernelCode, KernelContract, Module, Param,
};

/// The CUDA C of all kernels.
pub(crate) const SOURCE: &str = include_str!("../kernels/suite.cu");

/// The same as PTX.
const PTX: &str = include_str!("../kernels/suite.ptx");

/// Bytes of what `beat` keeps: a count, a time, and 4,096 gaps.
pub(crate) const GAPS_BYTES: u64 = 8 * (2 + 4096);

/// Workgroups that `beat` has counters for.
pub(crate) const BEAT_WORKGROUPS: u32 = 128;

pub(crate) fn contracts() -> Vec<KernelContract> {
    vec![
        KernelContract::new("nothing", []),
        KernelContract::new("step", [Param::read_write(4), Param::scalar::<u32>()]),
        KernelContract::new("hold", [Param::read_write(4), Param::scalar::<u64>()]),
        KernelContract::new("fault", [Param::write(4)]),
        KernelContract::new(
            "beat",
            [
                Param::read_write(8 * u64::from(BEAT_WORKGROUPS)),
                Param::write(8),
                Param::read_write(GAPS_BYTES),
            ],
        )
        .with_workgroup_size([32, 1, 1])
        .resident(),
        KernelContract::new("sliced_answer", [Param::read(64), Param::write(16), Param::read_write(4)])
            .with_workgroup_size([32, 1, 1])
            .resident(),
        KernelContract::new("brief", [Param::read_write(4)]).resident(),
    ]
}

/// All kernels, as PTX: a machine with a driver alone runs them.
fn all() -> KernelCode {
    let text = PTX.to_owned();
    foreign(contracts(), ForeignCode::Source { format: CodeFormat::Ptx, text })
}

/// A kernel that nobody has loaded before: stores `value`.
pub(crate) fn second(value: u32) -> String {
    format!("extern \"C\" __global__ void second(unsigned int* out) {{ *out = {value}u; }}")
}

pub(crate) fn second_contract() -> KernelContract {
    KernelContract::new("second", [Param::write(4)])
}

/// The code with its contracts.
#[expect(unsafe_code, reason = "vouches for the kernels above")]
pub(crate) fn foreign(contracts: Vec<KernelContract>, code: ForeignCode) -> KernelCode {
    // SAFETY: the contracts are those beside the kernels, with their parameters in order, or such as the
    // device refuses to load. The kernels mask or bound their indices to the least sizes of the contracts,
    // whatever the scalars and memory are.
    unsafe { KernelCode::new().with_foreign(contracts, code) }
}

/// The loaded kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels(Arc<dyn Module>);

impl Kernels {
    pub(crate) fn load(device: &dyn Device) -> Result<Self> {
        Ok(Self(device.load(&all())?))
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<dyn Kernel>> {
        Ok(self.0.kernel(name)?)
    }
}
