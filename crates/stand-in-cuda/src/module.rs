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
    image,
    kernels::Kernel,
    machine::{MOST_SHARED_BYTES, running},
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
    /// Dynamic shared memory that a launch may ask for.
    most_shared: AtomicU32,
}

impl Function {
    pub(crate) fn most_shared(&self) -> u32 {
        // Relaxed, here and where it is set: a figure that orders nothing.
        self.most_shared.load(Ordering::Relaxed)
    }
}

/// `CUjit_option`.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

/// `CUfunction_attribute`.
const MAX_THREADS: c_int = 0;
const SHARED_BYTES: c_int = 1;
const LOCAL_BYTES: c_int = 3;
const REGISTERS: c_int = 4;
const MOST_DYNAMIC_SHARED_BYTES: c_int = 8;

/// What a function may have without asking.
const USUAL_SHARED_BYTES: u32 = 48 << 10;

/// Where a compiler's words go: the address of a buffer, and its length.
#[derive(Debug)]
pub(crate) struct Log {
    buffer: usize,
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
        Ok(buffer.filter(|_| bytes > 0).map(|buffer| Self { buffer: buffer.expose_provenance(), bytes }))
    }

    #[expect(unsafe_code, reason = "writes to the caller's memory")]
    pub(crate) fn write(&self, words: &str) -> Outcome {
        let buffer = std::ptr::with_exposed_provenance_mut::<u8>(self.buffer);
        // SAFETY: the caller vouches for the buffer and its length, while the object it gave them for lives.
        let buffer = unsafe { Out::to(buffer) };
        let text = words.bytes().take(self.bytes - 1).chain([0]);
        text.enumerate().try_for_each(|(at, byte)| buffer.at(at).set(byte))
    }
}

/// The text of an image, which ends in a zero byte, or lies in an image of the linker's.
#[expect(unsafe_code, reason = "reads the caller's memory")]
fn text_of(image: *const c_void) -> Result<String, Code> {
    // SAFETY: an image is as long as its header says, or ends in a zero byte (the caller's duty, by the manual).
    let bytes = unsafe { In::from(image.cast::<u8>()) };
    if bytes.get()? == 0x7f {
        return image::ptx_of(&bytes);
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
        if let Some(params) = kernel.params
            && sizes != params
        {
            return Err(format!("entry '{}' has parameters of {sizes:?} bytes, not {params:?}", entry.name));
        }
    }
    Ok(entries)
}

fn load(module: &Out<Raw>, image: *const c_void, log: Option<&Log>) -> Outcome {
    let here = current()?;
    here.machine.captures.forbid()?;
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

exports! {
    fn cuModuleLoadDataEx(
        out module: Raw, val image: *const c_void, val option_count: c_uint, input options: c_int,
        input values: *mut c_void
    ) {
        let log = Log::find(option_count, &options, &values)?;
        load(&module, image, log.as_ref())
    }

    fn cuModuleLoadData(out module: Raw, val image: *const c_void) {
        load(&module, image, None)
    }

    fn cuModuleUnload(val module: Raw) {
        let here = current()?;
        here.machine.captures.forbid()?;
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
        function.set(here.machine.functions.add(Arc::new(Function {
            module,
            entry,
            kernel,
            most_shared: AtomicU32::new(USUAL_SHARED_BYTES),
        })))
    }

    fn cuFuncGetAttribute(out value: c_int, val attribute: c_int, val function: Raw) {
        let function = running()?.functions.get(function)?;
        value.set(match attribute {
            MAX_THREADS => 1024,
            SHARED_BYTES | LOCAL_BYTES => 0,
            REGISTERS => 32,
            MOST_DYNAMIC_SHARED_BYTES => c_int::try_from(function.most_shared()).unwrap_or(c_int::MAX),
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(val function: Raw, val attribute: c_int, val value: c_int) {
        let function = running()?.functions.get(function)?;
        let bytes = u32::try_from(value).ok().filter(|&bytes| bytes <= MOST_SHARED_BYTES);
        let bytes = bytes.filter(|_| attribute == MOST_DYNAMIC_SHARED_BYTES).ok_or(Code::INVALID_VALUE)?;
        function.most_shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn cuFuncGetParamInfo(val function: Raw, val index: usize, out offset: usize, out size: usize) {
        let function = running()?.functions.get(function)?;
        let param = function.entry.params.get(index).ok_or(Code::INVALID_VALUE)?;
        offset.set(param.offset)?;
        if size.is_null() { Ok(()) } else { size.set(param.size) }
    }
}
