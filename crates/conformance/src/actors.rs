//! The suite's actors in CUDA C, and the library that they are for the stand-in for CUDA.

use std::{
    env, fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, OnceLock},
};

use warpweft_core_types::{CodeFormat, ForeignCode};
use warpweft_k2k_router::{EXECUTOR_HEADER, ExecutorImage, LANES_HEADER, WIRE_HEADER};

const SOURCE: &str = include_str!("../kernels/actors.cu");

/// A warp for the CPU.
const WARP: &str = include_str!("../kernels/warp.h");

/// Handlers, by their numbers.
const HANDLERS: [&str; 11] =
    ["echo", "tally", "source", "looping", "gate", "forward", "trap", "stream", "sink", "ping", "pong"];

/// An executor with the handlers of `kernels/actors.cu`, the same for everybody.
#[expect(unsafe_code, reason = "vouches for the actors in CUDA C")]
pub fn executor_image() -> Arc<ExecutorImage> {
    static IMAGE: OnceLock<Arc<ExecutorImage>> = OnceLock::new();
    let make = || {
        let text = include_str!("../kernels/actors.ptx").to_owned();
        let code = ForeignCode::Source { format: CodeFormat::Ptx, text };
        // SAFETY: the PTX is made of the executor of this version and handlers that have these numbers. They return
        // within four seconds, and touch their states and messages within the lengths that those have; states are as long
        // as the cases say beside the handlers' names, which the tests of this module compare.
        unsafe { ExecutorImage::new(code, &HANDLERS) }
    };
    Arc::clone(IMAGE.get_or_init(make))
}

/// The same for the CPU, made by the system's C++ compiler beside the running program; in words why not, if not.
///
/// With `WARPWEFT_ACTORS=warps` in the environment each executor has 32 threads, as on a GPU, instead of one.
///
/// # Errors
///
/// The compiler's words, or the system's.
pub fn actors_library() -> Result<&'static Path, &'static str> {
    static LIBRARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| build().map_err(|error| error.to_string()));
    library.as_deref().map_err(String::as_str)
}

fn build() -> io::Result<PathBuf> {
    let mut digest = DefaultHasher::new();
    let is_warp = env::var_os("WARPWEFT_ACTORS").is_some_and(|what| what == "warps");
    (is_warp, WARP).hash(&mut digest);
    [SOURCE, EXECUTOR_HEADER, LANES_HEADER, WIRE_HEADER].hash(&mut digest);
    let name = format!("actors-{:016x}", digest.finish());
    let program = env::current_exe()?;
    let folder = program.parent().ok_or(io::ErrorKind::NotFound)?;
    let library = folder.join(format!("lib{name}.so"));
    if library.exists() {
        return Ok(library);
    }
    // Several processes may be at it: each has a folder of its own, and the last to come is as good as the first.
    let scratch = folder.join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let built = compile(&scratch, is_warp).and_then(|made| fs::rename(made, &library));
    fs::remove_dir_all(&scratch)?;
    built.map(|()| library)
}

fn compile(folder: &Path, is_warp: bool) -> io::Result<PathBuf> {
    for (name, text) in [
        ("actors.cpp", SOURCE),
        ("warpweft_executor.cuh", EXECUTOR_HEADER),
        ("warpweft_lanes.cuh", LANES_HEADER),
        ("warpweft_wire.h", WIRE_HEADER),
        ("warp.h", WARP),
    ] {
        fs::write(folder.join(name), text)?;
    }
    let (source, made) = (folder.join("actors.cpp"), folder.join("actors.so"));
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]);
    if is_warp {
        command.arg("-DWARPWEFT_WARP=\"warp.h\"");
    }
    let output = command.arg(source).arg("-o").arg(&made).output()?;
    match output.status.success() {
        true => Ok(made),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handlers_have_their_numbers() {
        for (number, name) in HANDLERS.iter().enumerate() {
            let case = format!("case {number}: return warpweft_call({name}, cx, state, m);");
            assert!(SOURCE.contains(&case), "{case}");
        }
    }
}
