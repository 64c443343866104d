//! Reductions with a factor.

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    sync::Arc,
};

use crate::{
    communicator::Communicator,
    dtype::{DataType, Element, ReduceOp},
    error::Error,
    shared::Shared,
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
    pub fn premul_sum<T: Element>(&self, factor: T) -> Result<PremulSum, Error> {
        let mut factor = factor;
        self.create_premul_sum(ptr::from_mut(&mut factor).cast(), T::TYPE)
    }

    /// [`Self::premul_sum`] with a factor of a type that is known at run time, as its bytes.
    ///
    /// # Errors
    ///
    /// As for [`Self::premul_sum`]; [`Error::Length`] unless there are as many bytes as the type has.
    pub fn premul_sum_of(&self, dtype: DataType, factor: &[u8]) -> Result<PremulSum, Error> {
        let (expected, found) = (dtype.size_bytes(), factor.len());
        let mut aligned = [0_u64; 1];
        if found != expected {
            let call = "ncclRedOpCreatePreMulSum";
            return Err(Error::Length { call, what: "the factor", expected, found });
        }
        let mut bytes = aligned[0].to_ne_bytes();
        bytes[..found].copy_from_slice(factor);
        aligned[0] = u64::from_ne_bytes(bytes);
        self.create_premul_sum(aligned.as_mut_ptr().cast(), dtype)
    }

    /// The factor is one element of the type, at an address of its alignment.
    #[expect(unsafe_code, reason = "calls the library")]
    fn create_premul_sum(&self, factor: *mut c_void, dtype: DataType) -> Result<PremulSum, Error> {
        dtype.check(self.version())?;
        let (create, mut code) = (self.shared().nccl.functions().create_premul_sum, 0);
        self.shared().call("ncclRedOpCreatePreMulSum", |comm| {
            // SAFETY: the communicator is live; the factor is read and the result written before the call returns, and
            // both live on the stacks of the callers, which are this type's own.
            unsafe { create(&raw mut code, factor, dtype.code(), SCALAR_ON_HOST, comm) }
        })?;
        Ok(PremulSum { shared: Arc::clone(self.shared()), code, dtype })
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
