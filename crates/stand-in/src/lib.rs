//! Stand-ins for libraries of vendors: copies of a library that cargo built, each with a state of its own.

use std::{
    collections::BTreeMap,
    env,
    ffi::CStr,
    fs, io,
    path::{Path, PathBuf},
};

use libloading::Library;
use tempfile::TempDir;

/// The library that cargo built beside this test: `target/PROFILE/deps`.
fn built(stem: &str) -> io::Result<PathBuf> {
    let name = format!("{}{stem}{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let program = env::current_exe()?;
    let folders =
        program.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_path_buf(), folder.join("deps")]);
    let candidates: Vec<PathBuf> = folders.map(|folder| folder.join(&name)).collect();
    candidates.iter().find(|path| path.exists()).cloned().ok_or_else(|| {
        let text = format!("{name} is not beside {}: build {}", program.display(), stem.replace('_', "-"));
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// A copy in a folder of its own, since the loader knows files and gives one library for one file. The names
/// of functions that it is to lack are changed in its tables.
///
/// # Errors
///
/// The operating system's; a function that is not there cannot be taken away.
pub fn copied(stem: &str, lacking: &[&str]) -> io::Result<(TempDir, PathBuf)> {
    let (source, folder) = (built(stem)?, tempfile::tempdir()?);
    let path = folder.path().join(source.file_name().unwrap_or_default());
    if lacking.is_empty() {
        fs::copy(&source, &path)?;
        return Ok((folder, path));
    }
    let mut bytes = fs::read(&source)?;
    let (mut start, mut places) = (0, BTreeMap::new());
    for text in bytes.split(|&byte| byte == 0) {
        if let Some(function) = lacking.iter().find(|function| function.as_bytes() == text) {
            places.entry(function).or_insert_with(Vec::new).push(start);
        }
        start += text.len() + 1;
    }
    if let Some(unknown) = lacking.iter().find(|function| !places.contains_key(function)) {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no {unknown}")));
    }
    places.into_values().flatten().for_each(|at| bytes[at] = b'-');
    fs::write(&path, bytes)?;
    Ok((folder, path))
}

/// Loads a copy.
///
/// # Errors
///
/// The loader's.
#[expect(unsafe_code, reason = "opens a dynamic library")]
pub fn open(path: &Path) -> io::Result<Library> {
    // SAFETY: a copy of a stand-in, which runs nothing when it is loaded.
    unsafe { Library::new(path) }.map_err(io::Error::other)
}

/// A function of a stand-in's.
///
/// # Errors
///
/// The loader's, if there is none.
///
/// # Safety
///
/// - It has this type.
#[expect(unsafe_code, reason = "looks symbols up")]
pub unsafe fn symbol<F: Copy>(library: &Library, name: &CStr) -> io::Result<F> {
    // SAFETY: the caller's duty.
    unsafe { library.get::<F>(name.to_bytes_with_nul()) }.map(|found| *found).map_err(io::Error::other)
}
