//! How a function is exported, and what its raw arguments become.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::control::calls;

/// A code of the CUDA manual, other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_IMAGE: Self = Self(200);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const ALREADY_MAPPED: Self = Self(208);
    pub(crate) const NO_BINARY_FOR_GPU: Self = Self(209);
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(crate) const MISALIGNED_ADDRESS: Self = Self(716);
    pub(crate) const LAUNCH_FAILED: Self = Self(719);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const STREAM_CAPTURE_ISOLATION: Self = Self(905);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);
    pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);
    pub(crate) const UNKNOWN: Self = Self(999);

    /// The manual's name.
    pub(crate) const fn name(code: c_int) -> Option<&'static CStr> {
        Some(match code {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            3 => c"CUDA_ERROR_NOT_INITIALIZED",
            100 => c"CUDA_ERROR_NO_DEVICE",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            200 => c"CUDA_ERROR_INVALID_IMAGE",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            208 => c"CUDA_ERROR_ALREADY_MAPPED",
            209 => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
            217 => c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            218 => c"CUDA_ERROR_INVALID_PTX",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            401 => c"CUDA_ERROR_ILLEGAL_STATE",
            500 => c"CUDA_ERROR_NOT_FOUND",
            600 => c"CUDA_ERROR_NOT_READY",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            704 => c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
            709 => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
            712 => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            716 => c"CUDA_ERROR_MISALIGNED_ADDRESS",
            719 => c"CUDA_ERROR_LAUNCH_FAILED",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            905 => c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            907 => c"CUDA_ERROR_CAPTURED_EVENT",
            908 => c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            999 => c"CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}

pub(crate) type Outcome = Result<(), Code>;

/// A driver object as the caller has it: a number in a pointer's clothes.
pub(crate) type Raw = *mut c_void;

/// Where a result goes.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place that stands in an array of arguments.
    ///
    /// # Safety
    ///
    /// - As for `wrap::out`.
    #[expect(unsafe_code, reason = "takes the caller's word for its pointers")]
    pub(crate) const unsafe fn to(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) const fn is_null(&self) -> bool {
        self.0.is_null()
    }

    #[expect(unsafe_code, reason = "writes to the caller's memory")]
    pub(crate) fn set(&self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: whoever made `self` vouches that a pointer that is not null can be written through.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// What is there, for arguments that go both ways.
    #[expect(unsafe_code, reason = "reads the caller's memory")]
    pub(crate) fn get(&self) -> Result<T, Code>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: as for `set`; the caller initialised an argument that goes both ways.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The place `index` values further on, of an array that the caller said is longer than that.
    pub(crate) fn at(&self, index: usize) -> Self {
        if self.0.is_null() { Self(self.0) } else { Self(self.0.wrapping_add(index)) }
    }

    pub(crate) fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// Where an argument is read from.
pub(crate) struct In<T>(*const T);

impl<T> In<T> {
    /// A place that stands in an array of arguments.
    ///
    /// # Safety
    ///
    /// - As for `wrap::input`.
    #[expect(unsafe_code, reason = "takes the caller's word for its pointers")]
    pub(crate) const unsafe fn from(pointer: *const T) -> Self {
        Self(pointer)
    }
}

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, Code> {
        self.at(0)
    }

    /// One of an array that the caller said is longer than `index`.
    #[expect(unsafe_code, reason = "reads the caller's memory")]
    pub(crate) fn at(&self, index: usize) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: whoever made `self` vouches that a pointer that is not null can be read, for as many
        // values as the call says.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }

    pub(crate) const fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// A terminated text.
pub(crate) struct Text(*const c_char);

impl Text {
    #[expect(unsafe_code, reason = "reads the caller's memory")]
    pub(crate) fn get(&self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: whoever made `self` vouches that a pointer that is not null is of a terminated text.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Makes of a raw argument what functions work with.
#[expect(unsafe_code, reason = "takes the caller's word for its pointers")]
pub(crate) mod wrap {
    use super::{In, Out, Text, c_char};

    /// Takes a value as it is.
    ///
    /// # Safety
    ///
    /// - None; it has the signature of the others.
    pub(crate) unsafe fn val<T>(value: T) -> T {
        value
    }

    /// Takes a place for a result.
    ///
    /// # Safety
    ///
    /// - The pointer is null or valid for writes (and reads, where the argument goes both ways) of as many
    ///   values as the call says.
    pub(crate) unsafe fn out<T>(pointer: *mut T) -> Out<T> {
        Out(pointer)
    }

    /// Takes a place to read from.
    ///
    /// # Safety
    ///
    /// - The pointer is null or valid for reads of as many values as the call says.
    pub(crate) unsafe fn input<T>(pointer: *const T) -> In<T> {
        In(pointer)
    }

    /// Takes a text.
    ///
    /// # Safety
    ///
    /// - The pointer is null or of a terminated text.
    pub(crate) unsafe fn text(pointer: *const c_char) -> Text {
        Text(pointer)
    }
}

/// The C type of an argument of each kind.
macro_rules! raw_type {
    (val $type:ty) => { $type };
    (out $type:ty) => { *mut $type };
    (input $type:ty) => { *const $type };
    (text $type:ty) => { *const $type };
}
pub(crate) use raw_type;

/// Declares functions of the driver. An argument is a `val`, an `out`, an `input` or a `text`.
macro_rules! exports {
    ($($(#[$attribute:meta])* fn $name:ident($($kind:ident $arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        ///
        /// - Pointers are null, or valid for what the vendor's manual says is read and written through them.
        #[expect(unsafe_code, reason = "the vendor's interface")]
        // SAFETY: nothing else in this library, or in a program that links it, has this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $crate::exports::raw_type!($kind $type)),*) -> std::ffi::c_int {
            $(
                // SAFETY: the caller's duty.
                let $arg = unsafe { $crate::exports::wrap::$kind($arg) };
            )*
            $crate::exports::answer(stringify!($name), move || $body)
        }
    )*};
}
pub(crate) use exports;

/// Counts a call, fails it if a test wants that, and keeps its panics.
pub(crate) fn answer(name: &'static str, body: impl FnOnce() -> Outcome) -> c_int {
    if let Some(code) = calls().note(name) {
        return code;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(code))) => code,
        Err(_) => Code::UNKNOWN.0,
    }
}
