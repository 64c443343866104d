//! Reductions with a factor.

use std::{ffi::c_int, fmt, ptr, sync::Arc};

use crate::{
    communicator::{Communicator, Shared},
    dtype::{DataType, Element, ReduceOp},
    error::Error,
    sys::SCALAR_ON_HOST,
};

/// How a call reduces.
#[derive(Debug, Clone, Copy)]
pub enum Reduction<'a> {
    /// As the library does.
    Plain(ReduceOp),
    /// The sum of what each rank multiplied before.
    PremulSum(&'a PremulSum),
}

impl From<ReduceOp> for Reduction<'_> {
    fn from(op: ReduceOp) -> Self {
        Self::Plain(op)
    }
}

impl<'a> From<&'a PremulSum> for Reduction<'a> {
    fn from(op: &'a PremulSum) -> Self {
        Self::PremulSum(op)
    }
}

impl Reduction<'_> {
    /// `ncclRedOp_t`, for elements of a communicator.
    pub(crate) fn code(
        self,
        comm: &Communicator,
        call: &'static str,
        dtype: DataType,
    ) -> Result<c_int, Error> {
        match self {
            Self::Plain(op) => Ok(op.code()),
            Self::PremulSum(op) if !Arc::ptr_eq(&op.shared, comm.shared()) => {
                Err(Error::Invalid { what: format!("{call}: the factor was made for another communicator") })
            }
            Self::PremulSum(op) if op.dtype != dtype => {
                Err(Error::Types { call, one: op.dtype, other: dtype })
            }
            Self::PremulSum(op) => Ok(op.code),
        }
    }
}

/// A sum of products: each rank's elements are multiplied by its factor first (`ncclRedOpCreatePreMulSum`).
pub struct PremulSum {
    shared: Arc<Shared>,
    code: c_int,
    dtype: DataType,
}

impl Communicator {
    /// A sum of what each rank multiplies by a factor of its own. It can be dropped once the calls that use it have
    /// returned.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], as for a type that cannot be multiplied.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn premul_sum<T: Element>(&self, factor: T) -> Result<PremulSum, Error> {
        T::TYPE.check(self.version())?;
        let create = self.shared().nccl.functions().create_premul_sum;
        let (mut code, mut factor) = (0, factor);
        self.shared().call("ncclRedOpCreatePreMulSum", |comm| {
            let factor = ptr::from_mut(&mut factor).cast();
            // SAFETY: the communicator is live; the factor is read and the result written before the call returns.
            unsafe { create(&raw mut code, factor, T::TYPE.code(), SCALAR_ON_HOST, comm) }
        })?;
        Ok(PremulSum { shared: Arc::clone(self.shared()), code, dtype: T::TYPE })
    }
}

impl Drop for PremulSum {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        let destroy = self.shared.nccl.functions().destroy_op;
        // SAFETY: the communicator is live, or the call is not made; the operation is destroyed once. Without it the
        // communicator keeps a few bytes more.
        let _destroyed = self.shared.call("ncclRedOpDestroy", |comm| unsafe { destroy(self.code, comm) });
    }
}

impl fmt::Debug for PremulSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PremulSum({})", self.dtype)
    }
}
