//! The spike's kernels and their contracts.

use std::sync::Arc;

use anyhow::Result;
use warpweft_core_types::{
    CodeFormat, Device, ForeignCode, Kernel, KernelCode, KernelContract, Module, Param,
};

/// The CUDA C of all kernels.
pub(crate) const SOURCE: &str = include_str!("kernels.cu");

/// Words that `add` works on.
pub(crate) const ADD_WORDS: u64 = 1 << 16;

/// Bytes of what `beat` keeps: a count, a time, and 4,096 gaps.
pub(crate) const GAPS_BYTES: u64 = 8 * (2 + 4096);

/// Workgroups that `beat` has counters for.
pub(crate) const BEAT_WORKGROUPS: u32 = 128;

/// A kernel in hand-written PTX: stores 42.
pub(crate) const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry answer(.param .u64 out) {
    .reg .u64 %address;
    .reg .u32 %value;
    ld.param.u64 %address, [out];
    cvta.to.global.u64 %address, %address;
    mov.u32 %value, 42;
    st.global.u32 [%address], %value;
    ret;
}
";

pub(crate) fn contracts() -> Vec<KernelContract> {
    let words = 4 * ADD_WORDS;
    vec![
        KernelContract::new("nothing", []),
        KernelContract::new(
            "add",
            [Param::read(words), Param::read(words), Param::write(words), Param::scalar::<u32>()],
        )
        .with_workgroup_size([256, 1, 1]),
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
        KernelContract::new("stubborn", [Param::read_write(4)]).resident(),
        KernelContract::new("brief", [Param::read_write(4)]).resident(),
    ]
}

/// All kernels as CUDA C.
pub(crate) fn cuda_c() -> KernelCode {
    let text = SOURCE.to_owned();
    foreign(contracts(), ForeignCode::Source { format: CodeFormat::CudaC, text })
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
        Ok(Self(device.load(&cuda_c())?))
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<dyn Kernel>> {
        Ok(self.0.kernel(name)?)
    }
}
