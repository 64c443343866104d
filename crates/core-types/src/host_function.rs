//! Kernels that are functions of this process: what one workgroup sees.

use std::{ffi::c_void, fmt, marker::PhantomData, sync::Arc};

use crate::{Access, Failure};

/// What a resident kernel says when it returns to its executor.
///
/// Other kernels return nothing, which counts as [`Progress::Busy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It worked and may have more to do.
    Busy,
    /// It found nothing to do; the executor may let it rest a little.
    Idle,
    /// It is done for good.
    Finished,
}

/// A kernel as a Rust function, called once for each workgroup (and, if resident, once a slice).
#[derive(Clone)]
pub struct HostFunction(Arc<Body>);

type Body = dyn Fn(&Workgroup<'_>) -> Result<Progress, Arc<Failure>> + Send + Sync;

impl HostFunction {
    /// A kernel that runs to its end.
    pub fn new(body: impl Fn(&Workgroup<'_>) + Send + Sync + 'static) -> Self {
        Self::resident(move |workgroup| {
            body(workgroup);
            Progress::Busy
        })
    }

    /// A resident kernel: it returns at a message boundary as soon as [`Workgroup::should_yield`] says so,
    /// keeps everything it needs again in its buffers, and is called again for the next slice.
    pub fn resident(body: impl Fn(&Workgroup<'_>) -> Progress + Send + Sync + 'static) -> Self {
        Self(Arc::new(move |workgroup| Ok(body(workgroup))))
    }

    /// A kernel that runs to its end or fails, which is what becomes of its submission then.
    pub fn fallible(
        body: impl Fn(&Workgroup<'_>) -> Result<(), Arc<Failure>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(move |workgroup| body(workgroup).map(|()| Progress::Busy)))
    }

    /// Runs one workgroup.
    ///
    /// # Errors
    ///
    /// What the kernel failed with.
    pub fn call(&self, workgroup: &Workgroup<'_>) -> Result<Progress, Arc<Failure>> {
        (self.0)(workgroup)
    }
}

impl fmt::Debug for HostFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostFunction")
    }
}

/// The version of [`RawWorkgroup`]'s layout; a library kernel refuses others with a negative code.
pub const WORKGROUP_ABI: u32 = 2;

/// [`RawArgument::access`] of a value.
const SCALAR: u32 = 0;
/// [`RawArgument::access`] of a buffer that is only read.
const READ: u32 = 1;
/// [`RawArgument::access`] of a buffer that is only written.
const WRITE: u32 = 2;
/// [`RawArgument::access`] of a buffer that is read and written.
const READ_WRITE: u32 = 3;

/// One argument as a library kernel sees it: a buffer's first byte, or a value's.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawArgument {
    /// 0 for a value; for a buffer what the contract lets the kernel do: 1 read, 2 write, 3 both.
    pub access: u32,
    /// First byte.
    pub data: *mut u8,
    /// Length in bytes.
    pub size: u64,
}

impl RawArgument {
    /// A value of `size` bytes at `data`.
    pub const fn scalar(data: *mut u8, size: u64) -> Self {
        Self { access: SCALAR, data, size }
    }

    /// A buffer of `size` bytes at `data`.
    pub const fn buffer(data: *mut u8, size: u64, access: Access) -> Self {
        let access = match access {
            Access::Read => READ,
            Access::Write => WRITE,
            Access::ReadWrite | Access::Accumulate => READ_WRITE,
        };
        Self { access, data, size }
    }
}

/// What a kernel in a dynamic library receives: `int32_t kernel(const RawWorkgroup *)`.
///
/// It returns 0 ([`Progress::Busy`]), 1 ([`Progress::Idle`]), 2 ([`Progress::Finished`]), or a negative
/// code of its own for failure.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawWorkgroup {
    /// [`WORKGROUP_ABI`].
    pub abi: u32,
    /// Length of `arguments`.
    pub argument_count: u32,
    /// Position of this workgroup in the grid.
    pub index: [u32; 3],
    /// The grid: workgroups in each dimension.
    pub workgroups: [u32; 3],
    /// Threads of one workgroup in each dimension.
    pub size: [u32; 3],
    /// The launch's arguments, in order.
    pub arguments: *const RawArgument,
    /// Passed to `should_yield`.
    pub context: *const c_void,
    /// Whether a resident kernel shall return now.
    pub should_yield: extern "C" fn(*const c_void) -> bool,
}

/// One workgroup of a running kernel: where it is in the grid, and its arguments.
#[derive(Debug)]
pub struct Workgroup<'a>(&'a RawWorkgroup);

impl<'a> Workgroup<'a> {
    /// Wraps what an executor prepared.
    ///
    /// # Safety
    ///
    /// - `arguments` points to `argument_count` arguments; `context` is what `should_yield` expects.
    /// - Each argument's bytes are valid for reads and writes, without Rust references to them, for as
    ///   long as `'a` lasts; other threads and devices may touch them at any time.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub const unsafe fn from_raw(raw: &'a RawWorkgroup) -> Self {
        Self(raw)
    }

    /// Position of this workgroup in the grid.
    pub const fn index(&self) -> [u32; 3] {
        self.0.index
    }

    /// The grid: workgroups in each dimension.
    pub const fn workgroups(&self) -> [u32; 3] {
        self.0.workgroups
    }

    /// Threads of one workgroup in each dimension, as the contract says.
    pub const fn size(&self) -> [u32; 3] {
        self.0.size
    }

    /// Whether a resident kernel shall return at its next message boundary.
    pub fn should_yield(&self) -> bool {
        (self.0.should_yield)(self.0.context)
    }

    /// The value of scalar argument `index`.
    ///
    /// # Panics
    ///
    /// If there is no such argument or it has another size; the launch then fails with
    /// [`crate::Failure::KernelPanicked`].
    #[expect(unsafe_code, reason = "arguments are reached through a C pointer")]
    pub fn scalar<T: Element>(&self, index: usize) -> T {
        let argument = self.argument(index);
        assert_eq!(argument.access, SCALAR, "argument {index} is a buffer");
        assert_eq!(argument.size, size_of::<T>() as u64, "size of scalar argument {index}");
        // SAFETY: the argument holds the bytes of one `T` (its size was compared just above), which the
        // executor owns and keeps unchanged while the kernel runs; any bit pattern is an `Element`.
        unsafe { argument.data.cast::<T>().read_unaligned() }
    }

    /// Buffer argument `index` as a slice of `T`; a rest smaller than one element is left out.
    ///
    /// # Panics
    ///
    /// If there is no such argument or it is not aligned for `T`; the launch then fails with
    /// [`crate::Failure::KernelPanicked`].
    pub fn slice<T: Element>(&self, index: usize) -> SharedSlice<'a, T> {
        let argument = self.argument(index);
        assert_ne!(argument.access, SCALAR, "argument {index} is a value");
        let base = argument.data.cast::<T>();
        assert!(base.is_aligned(), "argument {index} is not aligned for its element type");
        // The size of memory in this address space fits a `usize`.
        let len = usize::try_from(argument.size).unwrap_or(usize::MAX) / size_of::<T>();
        SharedSlice { base, len, writable: argument.access != READ, lifetime: PhantomData }
    }

    #[expect(unsafe_code, reason = "arguments are reached through a C pointer")]
    fn argument(&self, index: usize) -> RawArgument {
        assert!(index < self.0.argument_count as usize, "there is no argument {index}");
        let at = self.0.arguments.wrapping_add(index);
        // SAFETY: `arguments` points to `argument_count` arguments (`from_raw`'s duty) and `index` is
        // below that.
        unsafe { *at }
    }
}

/// Elements of a buffer that others may be writing: reads and writes are relaxed atomics.
///
/// On the machines we run on, they compile to plain loads and stores.
#[derive(Debug, Clone, Copy)]
pub struct SharedSlice<'a, T> {
    base: *mut T,
    len: usize,
    writable: bool,
    lifetime: PhantomData<&'a ()>,
}

impl<'a, T: Element> SharedSlice<'a, T> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first element's address, for foreign calls; dereferencing it is up to the caller.
    pub const fn as_ptr(&self) -> *mut T {
        self.base
    }

    /// The element at `index`.
    ///
    /// # Panics
    ///
    /// If `index` is out of bounds; the launch then fails with [`crate::Failure::KernelPanicked`].
    pub fn get(&self, index: usize) -> T {
        T::load(self.at(index))
    }

    /// Writes the element at `index`.
    ///
    /// # Panics
    ///
    /// If `index` is out of bounds or the contract says that the kernel only reads; the launch then fails
    /// with [`crate::Failure::KernelPanicked`].
    pub fn set(&self, index: usize, value: T) {
        assert!(self.writable, "the contract lets the kernel only read this argument");
        T::store(self.at(index), value);
    }

    /// Adds to the element at `index` in one step, around zero where it overflows, and returns what it was before.
    ///
    /// # Panics
    ///
    /// As [`SharedSlice::set`].
    pub fn fetch_add(&self, index: usize, value: T) -> T
    where
        T: AtomicAdd,
    {
        assert!(self.writable, "the contract lets the kernel only read this argument");
        T::fetch_add(self.at(index), value)
    }

    /// The elements from first to last.
    pub fn iter(&self) -> impl Iterator<Item = T> + use<'a, T> {
        let slice = *self;
        (0..self.len).map(move |index| slice.get(index))
    }

    /// The elements as an ordinary slice, which the compiler can vectorize.
    ///
    /// # Safety
    ///
    /// - Nothing writes these elements while the slice lives: no other workgroup, operation or device.
    #[expect(unsafe_code, reason = "the program, not the kernel, knows what else runs")]
    pub unsafe fn as_slice(&self) -> &'a [T] {
        // SAFETY: the memory is valid and aligned (`from_raw`, `slice`); the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    /// The elements as an ordinary mutable slice, which the compiler can vectorize.
    ///
    /// # Safety
    ///
    /// - The contract lets the kernel write them.
    /// - Nothing else reads or writes these elements while the slice lives: no other workgroup,
    ///   operation or device, and no second slice made from this argument.
    #[expect(unsafe_code, reason = "the program, not the kernel, knows what else runs")]
    pub unsafe fn as_mut_slice(&self) -> &'a mut [T] {
        // SAFETY: the memory is valid and aligned (`from_raw`, `slice`); the caller keeps others away.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    fn at(&self, index: usize) -> InBounds<'a, T> {
        assert!(index < self.len, "index {index} is out of bounds for {} elements", self.len);
        InBounds { pointer: self.base.wrapping_add(index), lifetime: PhantomData }
    }
}

/// A pointer to an element known to be valid, aligned and free of Rust references.
#[derive(Debug)]
pub struct InBounds<'a, T> {
    pointer: *mut T,
    lifetime: PhantomData<&'a ()>,
}

/// A number that kernels can keep in buffers: any bit pattern is a value.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// Reads one element.
    fn load(at: InBounds<'_, Self>) -> Self;

    /// Writes one element.
    fn store(at: InBounds<'_, Self>, value: Self);
}

/// An element that can be added to in one step.
pub trait AtomicAdd: Element {
    /// Adds, around zero where it overflows, and returns what was there before.
    fn fetch_add(at: InBounds<'_, Self>, value: Self) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($type:ty as $atomic:ident of $bits:ty: $to:expr, $from:expr;)*) => {$(
        impl sealed::Sealed for $type {}

        #[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
        impl Element for $type {
            fn load(at: InBounds<'_, Self>) -> Self {
                // SAFETY: an `InBounds` is valid and aligned, and its memory is only touched through
                // atomics, raw copies and devices; the atomic has the size and alignment of the element.
                let atomic = unsafe { std::sync::atomic::$atomic::from_ptr(at.pointer.cast::<$bits>()) };
                // Relaxed: kernels order memory by semaphores, not by elements.
                $from(atomic.load(std::sync::atomic::Ordering::Relaxed))
            }

            fn store(at: InBounds<'_, Self>, value: Self) {
                // SAFETY: as in `load`.
                let atomic = unsafe { std::sync::atomic::$atomic::from_ptr(at.pointer.cast::<$bits>()) };
                atomic.store($to(value), std::sync::atomic::Ordering::Relaxed);
            }
        }
    )*};
}

element! {
    u8 as AtomicU8 of u8: std::convert::identity, std::convert::identity;
    u16 as AtomicU16 of u16: std::convert::identity, std::convert::identity;
    u32 as AtomicU32 of u32: std::convert::identity, std::convert::identity;
    u64 as AtomicU64 of u64: std::convert::identity, std::convert::identity;
    i8 as AtomicI8 of i8: std::convert::identity, std::convert::identity;
    i16 as AtomicI16 of i16: std::convert::identity, std::convert::identity;
    i32 as AtomicI32 of i32: std::convert::identity, std::convert::identity;
    i64 as AtomicI64 of i64: std::convert::identity, std::convert::identity;
    f32 as AtomicU32 of u32: f32::to_bits, f32::from_bits;
    f64 as AtomicU64 of u64: f64::to_bits, f64::from_bits;
}

macro_rules! atomic_add {
    ($($type:ty as $atomic:ident;)*) => {$(
        #[expect(unsafe_code, reason = "shared memory is only reachable through raw pointers")]
        impl AtomicAdd for $type {
            fn fetch_add(at: InBounds<'_, Self>, value: Self) -> Self {
                // SAFETY: as in `Element::load`.
                let atomic = unsafe { std::sync::atomic::$atomic::from_ptr(at.pointer) };
                // Relaxed: as in `Element::load`.
                atomic.fetch_add(value, std::sync::atomic::Ordering::Relaxed)
            }
        }
    )*};
}

atomic_add! {
    u8 as AtomicU8;
    u16 as AtomicU16;
    u32 as AtomicU32;
    u64 as AtomicU64;
    i8 as AtomicI8;
    i16 as AtomicI16;
    i32 as AtomicI32;
    i64 as AtomicI64;
}
