//! Modules and their functions.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    context::{Context, current},
    exports::{Code, In, Out, Outcome, Raw, exports},
    kernels::Kernel,
    linker,
    machine::running,
    ptx::{self, Entry},
};

/// Loaded code.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) context: Arc<Context>,
    entries: Vec<Entry>,
}

/// An entry of a module, and the Rust function that stands in for its code.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    pub(crate) entry: Entry,
    pub(crate) kernel: Kernel,
    /// How much dynamic shared memory it may have.
    pub(crate) most_shared: AtomicU32,
}

/// `CUjit_option`.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

/// `CUfunction_attribute`.
const MAX_THREADS: c_int = 0;
const SHARED_BYTES: c_int = 1;
const LOCAL_BYTES: c_int = 3;
const REGISTERS: c_int = 4;
const MOST_SHARED: c_int = 8;

/// What every kernel takes, and what a multiprocessor has.
const REGISTERS_OF_THREAD: u32 = 32;
const REGISTERS_OF_ALL: u32 = 65_536;
const THREADS_OF_ALL: u32 = 2048;
const BLOCKS_OF_ALL: u32 = 32;
const SHARED_OF_ALL: usize = 228 << 10;

/// Dynamic shared memory that a kernel has without asking, and after asking.
const SHARED_UNASKED: u32 = 48 << 10;
const SHARED_AT_MOST: u32 = 227 << 10;

/// Where a compiler's words go: an address, since the caller gives it with one call and it is used in another.
#[derive(Debug)]
pub(crate) struct Log {
    address: usize,
    bytes: usize,
}

impl Log {
    pub(crate) fn find(
        count: c_uint,
        options: &In<c_int>,
        values: &In<*mut c_void>,
    ) -> Result<Option<Self>, Code> {
        let (mut buffer, mut bytes) = (None, 0);
        for index in 0..count as usize {
            let value = values.at(index)?;
            match options.at(index)? {
                ERROR_LOG => buffer = Some(value),
                ERROR_LOG_BYTES => bytes = value.addr(),
                _ => {}
            }
        }
        let Some(place) = buffer.filter(|_| bytes > 0) else { return Ok(None) };
        Ok(Some(Self { address: place.expose_provenance(), bytes }))
    }

    #[expect(unsafe_code, reason = "writes to the caller's memory")]
    pub(crate) fn write(&self, words: &str) -> Outcome {
        let place = std::ptr::with_exposed_provenance_mut::<u8>(self.address);
        // SAFETY: the caller of the function that was given the options vouches that the one names a buffer of
        // as many bytes as the other says, until the module is loaded or the linker is destroyed.
        let buffer = unsafe { Out::to(place) };
        let text = words.bytes().take(self.bytes - 1).chain([0]);
        text.enumerate().try_for_each(|(at, byte)| buffer.at(at).set(byte))
    }
}

/// The text of an image, which ends in a zero byte.
#[expect(unsafe_code, reason = "reads the caller's memory")]
fn text_of(image: *const c_void) -> Result<String, Code> {
    // SAFETY: an image has a first byte, whatever it is (the caller's duty, by the manual).
    let first = unsafe { In::from(image.cast::<u8>()) }.get()?;
    if first == 0x7f {
        return linker::text_of(image);
    }
    Ok(terminated(image.cast()).to_string_lossy().into_owned())
}

#[expect(unsafe_code, reason = "reads the caller's memory")]
fn terminated<'a>(text: *const c_char) -> &'a CStr {
    // SAFETY: an image that is not binary is a terminated text (the caller's duty, by the manual), and the
    // result is not kept beyond the call.
    unsafe { CStr::from_ptr(text) }
}

pub(crate) fn compile(text: &str) -> Result<Vec<Entry>, String> {
    let entries = ptx::entries(text)?;
    for entry in &entries {
        let kernel = Kernel::named(&entry.name)
            .ok_or_else(|| format!("entry '{}' has no function in the stand-in", entry.name))?;
        let sizes: Vec<usize> = entry.params.iter().map(|param| param.size).collect();
        if sizes != kernel.params {
            return Err(format!(
                "entry '{}' has parameters of {sizes:?} bytes, not {:?}",
                entry.name, kernel.params
            ));
        }
    }
    Ok(entries)
}

exports! {
    fn cuModuleLoadDataEx(
        out module: Raw, val image: *const c_void, val option_count: c_uint, input options: c_int,
        input values: *mut c_void
    ) {
        let here = current()?;
        let log = Log::find(option_count, &options, &values)?;
        let _turn = here.enter_cold()?;
        match compile(&text_of(image)?) {
            Ok(entries) => {
                let context = Arc::clone(&here.context);
                module.set(here.machine.modules.add(Arc::new(Module { context, entries })))
            }
            Err(words) => {
                if let Some(log) = log {
                    log.write(&format!("ptxas fatal   : {words}"))?;
                }
                Err(Code::INVALID_PTX)
            }
        }
    }

    fn cuModuleUnload(val module: Raw) {
        let here = current()?;
        let _turn = here.enter_cold()?;
        let gone = here.machine.modules.remove(module)?;
        here.machine.functions.retain(|function| !Arc::ptr_eq(&function.module, &gone));
        Ok(())
    }

    /// Code is loaded lazily, so that this may be what brings it to the device.
    fn cuModuleGetFunction(out function: Raw, val module: Raw, text name: c_char) {
        let here = current()?;
        let _turn = here.enter_cold()?;
        let (module, name) = (here.machine.modules.get(module)?, name.get()?);
        let entry = module.entries.iter().find(|entry| entry.name == name).ok_or(Code::NOT_FOUND)?.clone();
        let kernel = Kernel::named(&name).ok_or(Code::NOT_FOUND)?;
        function.set(here.machine.functions.add(Arc::new(Function { module, entry, kernel, most_shared: AtomicU32::new(SHARED_UNASKED) })))
    }

    fn cuFuncGetAttribute(out value: c_int, val attribute: c_int, val function: Raw) {
        let function = running()?.functions.get(function)?;
        // Relaxed, here and below: a figure that orders nothing.
        let most_shared = function.most_shared.load(Ordering::Relaxed);
        value.set(match attribute {
            MAX_THREADS => 1024,
            SHARED_BYTES | LOCAL_BYTES => 0,
            REGISTERS => c_int::try_from(REGISTERS_OF_THREAD).unwrap_or(0),
            MOST_SHARED => c_int::try_from(most_shared).unwrap_or(c_int::MAX),
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(val function: Raw, val attribute: c_int, val value: c_int) {
        let function = running()?.functions.get(function)?;
        let bytes = u32::try_from(value).ok().filter(|&bytes| bytes <= SHARED_AT_MOST);
        match (attribute, bytes) {
            (MOST_SHARED, Some(bytes)) => function.most_shared.store(bytes, Ordering::Relaxed),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out count: c_int, val function: Raw, val threads: c_int, val shared: usize
    ) {
        running()?.functions.get(function)?;
        let threads = u32::try_from(threads).ok().filter(|threads| (1..=1024).contains(threads));
        // Whole warps, and what the system takes of shared memory for each block.
        let threads = threads.ok_or(Code::INVALID_VALUE)?.next_multiple_of(32);
        let by_memory = u32::try_from(SHARED_OF_ALL / (shared + 1024)).unwrap_or(u32::MAX);
        let by_registers = REGISTERS_OF_ALL / (REGISTERS_OF_THREAD * threads);
        let most = (THREADS_OF_ALL / threads).min(by_registers).min(by_memory).min(BLOCKS_OF_ALL);
        count.set(c_int::try_from(most).unwrap_or(c_int::MAX))
    }

    fn cuFuncGetParamInfo(val function: Raw, val index: usize, out offset: usize, out size: usize) {
        let function = running()?.functions.get(function)?;
        let param = function.entry.params.get(index).ok_or(Code::INVALID_VALUE)?;
        offset.set(param.offset)?;
        if size.is_null() { Ok(()) } else { size.set(param.size) }
    }
}
