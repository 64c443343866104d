//! The linker, which makes machine code of PTX. Here that is an ELF header with the PTX behind it: its entries
//! are found again when it is loaded.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    context::current,
    exports::{Code, In, Raw, exports},
    machine::running,
    module::{Log, compile},
};

/// What was given to a linker, and what it made of that.
#[derive(Debug)]
pub(crate) struct Linker {
    log: Option<Log>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    text: Option<Vec<u8>>,
    /// Stays where it is until the linker is destroyed.
    image: Option<Box<[u8]>>,
}

/// `CU_JIT_INPUT_PTX`.
const PTX: c_int = 1;

const HEADER: usize = 64;
/// Stands in the header's flags and tells such an image from those of GPUs.
const MARK: [u8; 4] = *b"host";

/// An ELF file of 64 bits that ends with its table of sections, which is empty.
fn image_of(text: &[u8]) -> Box<[u8]> {
    let mut image = vec![0; HEADER];
    image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    image[0x28..0x30].copy_from_slice(&((HEADER + text.len()) as u64).to_le_bytes());
    image[0x30..0x34].copy_from_slice(&MARK);
    image.extend_from_slice(text);
    image.into_boxed_slice()
}

/// The PTX in an image that this linker made.
#[expect(unsafe_code, reason = "reads the caller's memory")]
pub(crate) fn text_of(image: *const c_void) -> Result<String, Code> {
    // SAFETY: an image of this kind is as long as its header says, and the header is there (the caller's duty,
    // by the manual).
    let bytes = unsafe { In::from(image.cast::<u8>()) };
    let read = |from: usize, to: usize| (from..to).map(|at| bytes.at(at)).collect::<Result<Vec<u8>, Code>>();
    let header = read(0, HEADER)?;
    if header[..4] != *b"\x7fELF" || header[0x30..0x34] != MARK {
        // Machine code of a GPU, which no host runs.
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    let end = header[0x28..0x30].try_into().map(u64::from_le_bytes).unwrap_or_default();
    let end = usize::try_from(end).ok().filter(|&end| end >= HEADER).ok_or(Code::INVALID_IMAGE)?;
    let mut text = read(HEADER, end)?;
    text.truncate(text.iter().position(|&byte| byte == 0).unwrap_or(text.len()));
    String::from_utf8(text).map_err(|_| Code::INVALID_IMAGE)
}

exports! {
    fn cuLinkCreate_v2(val count: c_uint, input options: c_int, input values: *mut c_void, out state: Raw) {
        let here = current()?;
        let log = Log::find(count, &options, &values)?;
        state.set(here.machine.linkers.add(Arc::new(Linker { log, state: Mutex::default() })))
    }

    fn cuLinkAddData_v2(
        val state: Raw, val kind: c_int, input data: u8, val size: usize, val name: *const c_char,
        val count: c_uint, val options: *mut c_int, val values: *mut *mut c_void
    ) {
        let linker = current()?.machine.linkers.get(state)?;
        // Options of a single input would change how it is compiled, which happens here in one way only.
        if kind != PTX || count != 0 || size == 0 || name.is_null() || !options.is_null() || !values.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut text = (0..size).map(|at| data.at(at)).collect::<Result<Vec<u8>, Code>>()?;
        text.truncate(text.iter().position(|&byte| byte == 0).unwrap_or(size));
        let words = String::from_utf8_lossy(&text).into_owned();
        if let Err(reason) = compile(&words) {
            if let Some(log) = &linker.log {
                log.write(&format!("ptxas fatal   : {reason}"))?;
            }
            return Err(Code::INVALID_PTX);
        }
        text.push(0);
        linker.state.lock().unwrap_or_else(PoisonError::into_inner).text = Some(text);
        Ok(())
    }

    fn cuLinkComplete(val state: Raw, out image: *const c_void, out size: usize) {
        let linker = current()?.machine.linkers.get(state)?;
        let mut state = linker.state.lock().unwrap_or_else(PoisonError::into_inner);
        let made = image_of(state.text.as_deref().ok_or(Code::INVALID_VALUE)?);
        size.set(made.len())?;
        image.set(state.image.insert(made).as_ptr().cast())
    }

    fn cuLinkDestroy(val state: Raw) {
        running()?.linkers.remove(state).map(|_| ())
    }
}
