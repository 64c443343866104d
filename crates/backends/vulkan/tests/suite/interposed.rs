//! A driver that fails when it is told to: the functions of the real one, some of which answer otherwise first.
//!
//! Software drivers never lose a device, and have memory until the machine has none.

#![expect(unsafe_code, reason = "stands between the backend and the loader")]

use std::{
    ffi::{CStr, c_char, c_void},
    mem,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering},
    },
};

use ash::vk;
use warpweft_core_types::Deadline;
use warpweft_vulkan::VulkanConfig;

use crate::support::Need;

/// A function that can be told to fail.
pub(crate) struct Call {
    /// What it answers in place of the driver; zero while the driver does.
    answer: AtomicI32,
    real: AtomicPtr<c_void>,
}

pub(crate) static CREATE_DEVICE: Call = Call::new();
pub(crate) static ALLOCATE: Call = Call::new();
pub(crate) static MAKE_COMMANDS: Call = Call::new();
pub(crate) static COMPILE: Call = Call::new();
pub(crate) static SUBMIT: Call = Call::new();
pub(crate) static COUNTER: Call = Call::new();
pub(crate) static WAIT: Call = Call::new();

const CALLS: [&Call; 7] = [&CREATE_DEVICE, &ALLOCATE, &MAKE_COMMANDS, &COMPILE, &SUBMIT, &COUNTER, &WAIT];

/// Counters answer that nothing is reached, and waits that it takes longer.
pub(crate) const NOT_YET: vk::Result = vk::Result::NOT_READY;

/// What the counter had reached that was asked last while it answered that nothing is.
static REACHED: AtomicU64 = AtomicU64::new(0);

/// Returns once the work is over of which the driver is told not to say so.
pub(crate) fn wait_for_secret(value: u64, deadline: Deadline) -> Result<(), Need> {
    while REACHED.load(Ordering::SeqCst) < value {
        if deadline.is_past() {
            return Err("the device did not come to it".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Keeps the driver to one test, and has it answer as it is at the end.
pub(crate) struct Turn(#[expect(dead_code, reason = "held for its drop")] MutexGuard<'static, ()>);

static LOADER: OnceLock<ash::Entry> = OnceLock::new();
static TURN: Mutex<()> = Mutex::new(());

/// How to open the driver; only its first device.
pub(crate) fn config() -> Result<(Turn, VulkanConfig), Need> {
    let turn = Turn(TURN.lock().unwrap_or_else(PoisonError::into_inner));
    if LOADER.get().is_none() {
        // SAFETY: the system's Vulkan loader has no duties for those who load it.
        let loader = unsafe { ash::Entry::load() }.map_err(|error| Need::Missing(error.to_string()))?;
        LOADER.get_or_init(|| loader);
    }
    // SAFETY: `entry` hands out the loader's functions, which stays loaded, and those of this file, which call them.
    Ok((turn, unsafe { VulkanConfig::default().with_entry_point(entry) }))
}

impl Drop for Turn {
    fn drop(&mut self) {
        CALLS.iter().for_each(|call| call.work());
        REACHED.store(0, Ordering::SeqCst);
    }
}

impl Call {
    const fn new() -> Self {
        Self { answer: AtomicI32::new(0), real: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// From now on it answers this and does nothing.
    pub(crate) fn fail(&self, answer: vk::Result) {
        self.answer.store(answer.as_raw(), Ordering::SeqCst);
    }

    /// From now on it is the driver's again.
    pub(crate) fn work(&self) {
        self.answer.store(0, Ordering::SeqCst);
    }

    fn answer(&self) -> Option<vk::Result> {
        Some(self.answer.load(Ordering::SeqCst)).filter(|&code| code != 0).map(vk::Result::from_raw)
    }

    /// Puts `ours` in the place of the driver's.
    fn replace(&self, real: vk::PFN_vkVoidFunction, ours: *const c_void) -> vk::PFN_vkVoidFunction {
        self.real.store(real.map_or(std::ptr::null_mut(), |real| real as *mut c_void), Ordering::SeqCst);
        // SAFETY: both are pointers to functions, or null.
        unsafe { mem::transmute::<*const c_void, vk::PFN_vkVoidFunction>(ours) }
    }

    /// The driver's own, which is of type `F`.
    fn real<F: Copy>(&self) -> F {
        let real = self.real.load(Ordering::SeqCst);
        assert!(!real.is_null() && size_of::<F>() == size_of_val(&real), "the driver has the function");
        // SAFETY: `replace` stored it under the name whose type the caller says; it is not null.
        unsafe { mem::transmute_copy::<*mut c_void, F>(&real) }
    }
}

/// The loader's functions by their names.
///
/// # Safety
///
/// - The duties of the loader's own.
unsafe extern "system" fn entry(
    instance: *mut c_void,
    name: *const c_char,
) -> Option<unsafe extern "system" fn()> {
    let loader = LOADER.get()?.static_fn().get_instance_proc_addr;
    // SAFETY: handles of instances are pointers.
    let instance = unsafe { mem::transmute::<*mut c_void, vk::Instance>(instance) };
    // SAFETY: the caller's arguments.
    let real = unsafe { loader(instance, name) };
    // SAFETY: a name that ends with a zero, by the contract of the function.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"vkGetDeviceProcAddr" => DEVICE_ENTRY.replace(real, device_entry as *const c_void),
        b"vkCreateDevice" => CREATE_DEVICE.replace(real, create_device as *const c_void),
        _ => real,
    }
}

static DEVICE_ENTRY: Call = Call::new();

/// The device's functions by their names.
///
/// # Safety
///
/// - The duties of the loader's own.
unsafe extern "system" fn device_entry(device: vk::Device, name: *const c_char) -> vk::PFN_vkVoidFunction {
    // SAFETY: the caller's arguments.
    let real = unsafe { DEVICE_ENTRY.real::<vk::PFN_vkGetDeviceProcAddr>()(device, name) };
    // SAFETY: a name that ends with a zero, by the contract of the function.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"vkAllocateMemory" => ALLOCATE.replace(real, allocate as *const c_void),
        b"vkCreateCommandPool" => MAKE_COMMANDS.replace(real, make_commands as *const c_void),
        b"vkCreateComputePipelines" => COMPILE.replace(real, compile as *const c_void),
        b"vkQueueSubmit2" => SUBMIT.replace(real, submit as *const c_void),
        b"vkGetSemaphoreCounterValue" => COUNTER.replace(real, counter as *const c_void),
        b"vkWaitSemaphores" => WAIT.replace(real, wait as *const c_void),
        _ => real,
    }
}

/// Functions that answer what they are told, or else as the driver does.
macro_rules! stand_before {
    ($($real:ident as $ours:ident for $call:ident($($arg:ident: $kind:ty),*);)*) => {$(
        /// The driver's, unless it is told to fail.
        ///
        /// # Safety
        ///
        /// - The duties of the driver's own.
        unsafe extern "system" fn $ours($($arg: $kind),*) -> vk::Result {
            $call.answer().unwrap_or_else(|| {
                let real = $call.real::<vk::$real>();
                // SAFETY: the caller's arguments and the caller's word.
                unsafe { real($($arg),*) }
            })
        }
    )*};
}

type Callbacks = *const vk::AllocationCallbacks<'static>;

stand_before! {
    PFN_vkCreateDevice as create_device for CREATE_DEVICE(
        physical: vk::PhysicalDevice,
        info: *const vk::DeviceCreateInfo<'static>,
        allocator: Callbacks,
        device: *mut vk::Device
    );
    PFN_vkAllocateMemory as allocate for ALLOCATE(
        device: vk::Device,
        info: *const vk::MemoryAllocateInfo<'static>,
        allocator: Callbacks,
        memory: *mut vk::DeviceMemory
    );
    PFN_vkCreateCommandPool as make_commands for MAKE_COMMANDS(
        device: vk::Device,
        info: *const vk::CommandPoolCreateInfo<'static>,
        allocator: Callbacks,
        pool: *mut vk::CommandPool
    );
    PFN_vkCreateComputePipelines as compile for COMPILE(
        device: vk::Device,
        cache: vk::PipelineCache,
        count: u32,
        infos: *const vk::ComputePipelineCreateInfo<'static>,
        allocator: Callbacks,
        pipelines: *mut vk::Pipeline
    );
    PFN_vkQueueSubmit2 as submit for SUBMIT(
        queue: vk::Queue,
        count: u32,
        submits: *const vk::SubmitInfo2<'static>,
        fence: vk::Fence
    );
}

/// The driver's, unless it is told to fail or to keep what it knows.
///
/// # Safety
///
/// - The duties of the driver's own.
unsafe extern "system" fn counter(
    device: vk::Device,
    semaphore: vk::Semaphore,
    value: *mut u64,
) -> vk::Result {
    let ask = |value: *mut u64| {
        let real = COUNTER.real::<vk::PFN_vkGetSemaphoreCounterValue>();
        // SAFETY: the caller's arguments, and a place for the answer.
        unsafe { real(device, semaphore, value) }
    };
    match COUNTER.answer() {
        Some(NOT_YET) => {
            let mut reached = 0;
            let answer = ask(&raw mut reached);
            REACHED.store(reached, Ordering::SeqCst);
            // SAFETY: the caller's place for the answer.
            unsafe { value.write(0) };
            answer
        }
        Some(answer) => answer,
        None => ask(value),
    }
}

/// The driver's, unless it is told to fail or to keep what it knows.
///
/// # Safety
///
/// - The duties of the driver's own.
unsafe extern "system" fn wait(
    device: vk::Device,
    info: *const vk::SemaphoreWaitInfo<'_>,
    timeout: u64,
) -> vk::Result {
    match WAIT.answer() {
        Some(NOT_YET) => vk::Result::TIMEOUT,
        Some(answer) => answer,
        // SAFETY: the caller's arguments and the caller's word.
        None => unsafe { WAIT.real::<vk::PFN_vkWaitSemaphores>()(device, info, timeout) },
    }
}
