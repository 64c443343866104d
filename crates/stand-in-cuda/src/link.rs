//! The linker: PTX in, an image that `cuModuleLoadDataEx` loads out.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::{Context, current},
    exports::{Code, Raw, exports},
    image,
    module::{Log, compile},
};

/// A linker and what it was given.
#[derive(Debug)]
pub(crate) struct Linker {
    pub(crate) context: Arc<Context>,
    log: Option<Log>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    texts: Vec<String>,
    /// Made once, and where it is until the linker goes.
    image: Option<Vec<u8>>,
}

/// `CU_JIT_INPUT_PTX`.
const PTX: c_int = 1;

impl Linker {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse(&self, words: &str) -> Code {
        let written = self.log.as_ref().map_or(Ok(()), |log| log.write(words));
        written.err().unwrap_or(Code::INVALID_PTX)
    }
}

exports! {
    fn cuLinkCreate_v2(
        val option_count: c_uint, input options: c_int, input values: *mut c_void, out state: Raw
    ) {
        let here = current()?;
        let _turn = here.enter();
        let log = Log::find(option_count, &options, &values)?;
        let made = Linker { context: Arc::clone(&here.context), log, state: Mutex::default() };
        state.set(here.machine.linkers.add(Arc::new(made)))
    }

    fn cuLinkAddData_v2(
        val state: Raw, val kind: c_int, input data: u8, val size: usize, text name: c_char,
        val _option_count: c_uint, input _options: c_int, input _values: *mut c_void
    ) {
        let here = current()?;
        let _turn = here.enter();
        let linker = here.machine.linkers.get(state)?;
        if kind != PTX || linker.state().image.is_some() {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = (0..size).map(|at| data.at(at)).collect::<Result<Vec<u8>, _>>()?;
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end_matches('\0');
        let file = name.get().unwrap_or_default();
        compile(text).map_err(|words| linker.refuse(&format!("ptxas {file}, fatal   : {words}")))?;
        linker.state().texts.push(text.to_owned());
        Ok(())
    }

    fn cuLinkComplete(val state: Raw, out image: *mut c_void, out size: usize) {
        let here = current()?;
        let _turn = here.enter();
        let linker = here.machine.linkers.get(state)?;
        let mut state = linker.state();
        if state.texts.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        let text = state.texts.join("\n");
        compile(&text).map_err(|words| linker.refuse(&format!("nvlink error   : {words}")))?;
        let made = state.image.get_or_insert_with(|| image::of_ptx(&text));
        size.set(made.len())?;
        image.set(made.as_mut_ptr().cast())
    }

    fn cuLinkDestroy(val state: Raw) {
        let here = current()?;
        let _turn = here.enter();
        here.machine.linkers.remove(state).map(|_| ())
    }
}
