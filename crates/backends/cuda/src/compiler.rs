//! NVRTC, NVIDIA's compiler of CUDA C as a library: found on this machine if it is here, and loaded at the
//! first compile.

use std::{
    collections::BTreeSet,
    env,
    ffi::{CStr, CString, OsString, c_char, c_int},
    fmt, fs,
    path::{Path, PathBuf},
    ptr,
    sync::OnceLock,
};

use libloading::Library;
use warpweft_core_types::{DriverError, LoadError};

use crate::{
    driver::{in_full, resolve},
    header,
};

/// Names the loader may know by itself, from `LD_LIBRARY_PATH` or the system's folders.
const PLAIN_NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"];

/// The pairs of functions that give something out: how many bytes, and the bytes.
const CUBIN: [&str; 2] = ["nvrtcGetCUBINSize", "nvrtcGetCUBIN"];
const PTX: [&str; 2] = ["nvrtcGetPTXSize", "nvrtcGetPTX"];
const LOG: [&str; 2] = ["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"];

/// The oldest compiler that makes machine code.
const OLDEST: &str = "11.2";

type Program = *mut std::ffi::c_void;

/// A compiler of CUDA C, shared by everyone who has a clone of its owner.
///
/// It needs no GPU and no driver.
///
/// ```no_run
/// # use warpweft_cuda::Compiler;
/// let compiler = Compiler::find();
/// let cubin = compiler.compile("extern \"C\" __global__ void nothing() {}", (9, 0))?;
/// # Ok::<(), warpweft_core_types::LoadError>(())
/// ```
#[derive(Debug)]
pub struct Compiler {
    candidates: Vec<PathBuf>,
    loaded: OnceLock<Result<Nvrtc, String>>,
}

impl Compiler {
    /// Looks for NVRTC by name, in toolkit folders and in the Python packages that bring it, and takes the
    /// newest. Nothing is loaded yet.
    pub fn find() -> Self {
        Self::find_at_most(u32::MAX)
    }

    /// This library and no other, by its path or by a name that the loader knows. Nothing is loaded yet.
    pub fn at(library: impl Into<PathBuf>) -> Self {
        let named = library.into();
        // A path is made absolute, since the compiler's second library is looked for beside the first.
        let path = match named.components().count() {
            0 | 1 => named,
            _ => std::path::absolute(&named).unwrap_or(named),
        };
        Self { candidates: vec![path], loaded: OnceLock::new() }
    }

    /// The same, preferring versions up to `cuda_major`: a driver may not load what a newer compiler made.
    pub(crate) fn find_at_most(cuda_major: u32) -> Self {
        let here = Surroundings { root: Path::new("/"), variable: &|name| env::var_os(name) };
        let mut candidates: Vec<PathBuf> = installed(&here);
        candidates.extend(PLAIN_NAMES.iter().map(PathBuf::from));
        candidates.sort_by_key(|path| {
            let major = major_version(path);
            (major > cuda_major, std::cmp::Reverse(major), path.components().count() > 1)
        });
        Self { candidates, loaded: OnceLock::new() }
    }

    /// Compiles CUDA C to machine code (CUBIN) for one compute capability.
    ///
    /// `#include <warpweft/resident.cuh>` gives what resident kernels need.
    ///
    /// # Errors
    ///
    /// [`LoadError::Rejected`] with the compiler's words, or [`LoadError::Library`] when there is no NVRTC.
    pub fn compile(&self, source: &str, (major, minor): (u32, u32)) -> Result<Vec<u8>, LoadError> {
        let program = self.nvrtc()?.compile(source, &format!("--gpu-architecture=sm_{major}{minor}"))?;
        program.text(&CUBIN, program.nvrtc.cubin_size, program.nvrtc.cubin)
    }

    /// Compiles CUDA C to PTX, which drivers of this compiler's CUDA version and newer translate for devices
    /// of this compute capability and newer.
    ///
    /// # Errors
    ///
    /// As for [`Compiler::compile`].
    pub fn compile_to_ptx(&self, source: &str, (major, minor): (u32, u32)) -> Result<String, LoadError> {
        let program = self.nvrtc()?.compile(source, &format!("--gpu-architecture=compute_{major}{minor}"))?;
        let text = program.text(&PTX, program.nvrtc.ptx_size, program.nvrtc.ptx)?;
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }

    /// Loads the compiler, once, so that a caller learns beforehand whether there is one.
    ///
    /// # Errors
    ///
    /// [`LoadError::Library`] with what was tried and how to get one.
    pub fn load(&self) -> Result<&Path, LoadError> {
        Ok(&self.nvrtc()?.path)
    }

    fn nvrtc(&self) -> Result<&Nvrtc, LoadError> {
        let nvrtc = self.loaded.get_or_init(|| Nvrtc::open_any(&self.candidates));
        nvrtc.as_ref().map_err(|reason| LoadError::Library {
            path: "libnvrtc.so".to_owned(),
            reason: format!(
                "{reason}; install the CUDA toolkit's NVRTC (in Python: nvidia-cuda-nvrtc), set \
                 LD_LIBRARY_PATH to its folder, or give PTX or a CUBIN"
            ),
        })
    }
}

/// Where a program looks for what is installed: the system's folders, and the variables that name others.
struct Surroundings<'a> {
    root: &'a Path,
    variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Surroundings<'_> {
    fn named(&self, variables: &[&str]) -> Vec<PathBuf> {
        let named = variables.iter().filter_map(|name| (self.variable)(name));
        named.filter(|value| !value.is_empty()).map(PathBuf::from).collect()
    }

    fn paths(&self, variable: &str) -> Vec<PathBuf> {
        let list = (self.variable)(variable).unwrap_or_default();
        env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect()
    }

    /// Folders that a toolkit may be in.
    fn toolkits(&self) -> Vec<PathBuf> {
        let mut roots = self.named(&["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"]);
        roots.extend(subfolders(&self.root.join("usr/local"), "cuda"));
        roots.extend(subfolders(&self.root.join("opt"), "cuda"));
        roots
    }

    /// Folders that Python packages may be in.
    fn python_packages(&self) -> BTreeSet<PathBuf> {
        let mut prefixes: Vec<PathBuf> =
            ["usr", "usr/local"].iter().map(|name| self.root.join(name)).collect();
        prefixes.extend(self.named(&["VIRTUAL_ENV", "CONDA_PREFIX"]));
        prefixes.extend(self.named(&["HOME"]).iter().map(|home| home.join(".local")));
        prefixes.extend(subfolders(&self.root.join("opt"), ""));
        // A Python that is on the path lies in `bin` of its prefix.
        prefixes.extend(self.paths("PATH").iter().filter_map(|bin| bin.parent().map(Path::to_path_buf)));
        let mut packages: BTreeSet<PathBuf> = prefixes
            .iter()
            .flat_map(|prefix| subfolders(&prefix.join("lib"), "python3"))
            .flat_map(|python| [python.join("site-packages"), python.join("dist-packages")])
            .collect();
        packages.extend(self.paths("PYTHONPATH"));
        packages
    }
}

/// Files that look like NVRTC, in toolkit folders and Python packages.
fn installed(surroundings: &Surroundings<'_>) -> Vec<PathBuf> {
    let mut folders = BTreeSet::new();
    for toolkit in surroundings.toolkits() {
        // `targets` has a folder for each machine that a toolkit makes code for, this one among them; a library of
        // another machine is not loaded, and the next candidate is.
        let targets = subfolders(&toolkit.join("targets"), "");
        folders.extend(targets.map(|target| target.join("lib")));
        folders.extend([toolkit.join("lib64"), toolkit.join("lib")]);
    }
    for packages in surroundings.python_packages() {
        for package in subfolders(&packages.join("nvidia"), "") {
            folders.insert(package.join("lib"));
        }
    }
    let mut found: Vec<PathBuf> =
        folders.iter().flat_map(|folder| entries(folder)).filter(|file| is_nvrtc(file)).collect();
    found.sort_unstable();
    found
}

/// What is in a folder whose names begin with `prefix`; nothing if it cannot be read.
fn subfolders(folder: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> + use<> {
    let prefix = prefix.to_owned();
    entries(folder).filter(move |path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)) && path.is_dir()
    })
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path())
}

fn is_nvrtc(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so."))
}

/// The number behind `.so.`; the newest is assumed where there is none.
fn major_version(path: &Path) -> u32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let digits = name.split_once(".so.").and_then(|(_, version)| version.split('.').next());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// The compiler's functions, resolved together.
struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    path: PathBuf,
    _library: Library,
    _builtins: Vec<Library>,
}

impl Nvrtc {
    fn open_any(candidates: &[PathBuf]) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for path in candidates {
            match Self::open(path) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; "))
    }

    #[expect(unsafe_code, reason = "opens a dynamic library")]
    fn open(path: &Path) -> Result<Self, String> {
        let builtins = open_builtins(path);
        // SAFETY: a library of this name is the vendor's compiler, whose initialisers the vendor made to be
        // run by any program that links it.
        let library = unsafe { Library::new(path) }.map_err(|error| in_full(&error))?;
        let version = version_of(&library);
        Self::resolve(path, library, builtins).ok_or_else(|| match version {
            Some((major, minor)) => {
                format!("{} is NVRTC {major}.{minor}, {OLDEST} or newer is needed", path.display())
            }
            None => format!("{} is no NVRTC of CUDA {OLDEST} or newer", path.display()),
        })
    }

    /// `None` unless the library has every function.
    #[expect(unsafe_code, reason = "looks functions up by name and type")]
    fn resolve(path: &Path, library: Library, builtins: Vec<Library>) -> Option<Self> {
        Some(Self {
            // SAFETY: here and below, the field has the type of the compiler's function of this name.
            create: unsafe { resolve(&library, "nvrtcCreateProgram") }?,
            // SAFETY: as above.
            compile: unsafe { resolve(&library, "nvrtcCompileProgram") }?,
            // SAFETY: as above.
            destroy: unsafe { resolve(&library, "nvrtcDestroyProgram") }?,
            // SAFETY: as above.
            log_size: unsafe { resolve(&library, "nvrtcGetProgramLogSize") }?,
            // SAFETY: as above.
            log: unsafe { resolve(&library, "nvrtcGetProgramLog") }?,
            // SAFETY: as above.
            cubin_size: unsafe { resolve(&library, "nvrtcGetCUBINSize") }?,
            // SAFETY: as above.
            cubin: unsafe { resolve(&library, "nvrtcGetCUBIN") }?,
            // SAFETY: as above.
            ptx_size: unsafe { resolve(&library, "nvrtcGetPTXSize") }?,
            // SAFETY: as above.
            ptx: unsafe { resolve(&library, "nvrtcGetPTX") }?,
            // SAFETY: as above.
            error_string: unsafe { resolve(&library, "nvrtcGetErrorString") }?,
            path: path.to_path_buf(),
            _library: library,
            _builtins: builtins,
        })
    }

    #[expect(unsafe_code, reason = "calls the compiler")]
    fn compile(&self, source: &str, architecture: &str) -> Result<Owned<'_>, LoadError> {
        let program = self.program(source)?;
        let options = [architecture, "--std=c++17"].map(|option| CString::new(option).unwrap_or_default());
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(0);
        // SAFETY: the program is live; there are `count` options, terminated, which live until the return.
        let code = unsafe { (self.compile)(program.raw, count, options.as_ptr()) };
        if code != 0 {
            let log = program.text(&LOG, self.log_size, self.log)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
            return Err(LoadError::Rejected { log });
        }
        Ok(program)
    }

    #[expect(unsafe_code, reason = "calls the compiler")]
    fn program(&self, source: &str) -> Result<Owned<'_>, LoadError> {
        let source = CString::new(source)
            .map_err(|_| LoadError::Rejected { log: "the source holds a zero byte".to_owned() })?;
        let (headers, names) = ([header::TEXT.as_ptr()], [header::NAME.as_ptr()]);
        let mut raw = ptr::null_mut();
        // SAFETY: all texts are terminated and live until the return, when the compiler has copies; one
        // header goes with one name; the result is written to this stack frame.
        let code = unsafe {
            (self.create)(
                &mut raw,
                source.as_ptr(),
                c"kernel.cu".as_ptr(),
                1,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        Ok(Owned { nvrtc: self, raw })
    }

    #[expect(unsafe_code, reason = "asks the compiler for a text")]
    fn check(&self, api: &'static str, code: c_int) -> Result<(), LoadError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: any code may be asked about.
        let text = unsafe { (self.error_string)(code) };
        // SAFETY: the compiler answers with a static, terminated string, whatever the code.
        let name = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Err(LoadError::Driver(DriverError { api, code: code.into(), name }))
    }
}

/// What a compiler says of itself; `None` if it lacks the function.
#[expect(unsafe_code, reason = "asks the compiler")]
fn version_of(library: &Library) -> Option<(c_int, c_int)> {
    // SAFETY: the compiler's function of this name has this type.
    let get =
        unsafe { resolve::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(library, "nvrtcVersion") }?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers are written to this stack frame.
    let code = unsafe { get(&mut major, &mut minor) };
    (code == 0).then_some((major, minor))
}

/// NVRTC opens a second library by name when it compiles. Where the loader does not know the folder, as in
/// Python packages, it finds that library if it is loaded already.
#[expect(unsafe_code, reason = "opens a dynamic library")]
fn open_builtins(nvrtc: &Path) -> Vec<Library> {
    let Some(folder) = nvrtc.parent().filter(|folder| folder.is_absolute()) else { return Vec::new() };
    let is_builtins = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so.")
    };
    // SAFETY: a library of this name is the vendor's, made to be opened by the compiler beside it.
    entries(folder).filter(is_builtins).filter_map(|path| unsafe { Library::new(path) }.ok()).collect()
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvrtc({})", self.path.display())
    }
}

/// A program of the compiler's, destroyed when dropped.
struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl Owned<'_> {
    /// What one pair of functions gives out: how many bytes, and the bytes.
    #[expect(unsafe_code, reason = "calls the compiler")]
    fn text(
        &self,
        [size_api, text_api]: &[&'static str; 2],
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        text: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, LoadError> {
        let mut bytes = 0;
        // SAFETY: the program is live; one integer is written to this stack frame.
        self.nvrtc.check(size_api, unsafe { size(self.raw, &mut bytes) })?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the program is live; the buffer holds as many bytes as the paired function said.
        self.nvrtc.check(text_api, unsafe { text(self.raw, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}

impl Drop for Owned<'_> {
    #[expect(unsafe_code, reason = "calls the compiler")]
    fn drop(&mut self) {
        // SAFETY: created by `program`, destroyed once.
        let _code = unsafe { (self.nvrtc.destroy)(&mut self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_file_names() {
        let check = |path: &str, version| assert_eq!(major_version(Path::new(path)), version, "{path}");
        check("/usr/local/cuda/lib64/libnvrtc.so.12.4", 12);
        check("site-packages/nvidia/cu13/lib/libnvrtc.so.13", 13);
        check("libnvrtc.so", 0);
    }

    /// A file for each path in a folder of its own, and what is found there with these variables.
    fn check_installed(files: &[&str], variables: &[(&str, &str)], expected: &[&str]) {
        let root = tempfile::tempdir().unwrap();
        for file in files.iter().map(|file| root.path().join(file)) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            let paths = value
                .split(':')
                .map(|part| if part.is_empty() { PathBuf::new() } else { root.path().join(part) });
            env::join_paths(paths).ok()
        };
        let found = installed(&Surroundings { root: root.path(), variable: &variable });
        let expected: Vec<PathBuf> = expected.iter().map(|file| root.path().join(file)).collect();
        assert_eq!(found, expected, "{variables:?}");
    }

    #[test]
    fn a_compiler_is_found_in_every_toolkit() {
        let own = [
            "toolkit/lib/libnvrtc.so.12",
            "toolkit/lib/libnvrtc-builtins.so.12.4",
            "toolkit/lib/libcudart.so.12",
        ];
        check_installed(&own, &[], &[]);
        check_installed(&own, &[("CUDA_HOME", "toolkit")], &own[..1]);
        check_installed(&own, &[("CUDA_PATH", "toolkit"), ("CUDA_HOME", "")], &own[..1]);
        let cross = ["toolkit/lib64/libnvrtc.so.12", "toolkit/targets/x86_64-linux/lib/libnvrtc.so.12"];
        check_installed(&cross, &[("CUDA_HOME", "toolkit")], &cross);
        let conda = ["conda/lib/libnvrtc.so.12", "conda/targets/sbsa-linux/lib/libnvrtc.so.12"];
        check_installed(&conda, &[("CONDA_PREFIX", "conda")], &conda);
    }

    #[test]
    fn a_compiler_is_found_in_the_folders_of_the_system() {
        let system = [
            "opt/cuda/lib64/libnvrtc.so.13",
            "opt/cuda/targets/x86_64-linux/lib/libnvrtc.so.13",
            "usr/local/cuda/lib64/libnvrtc.so.12",
            "usr/local/cuda-11.8/lib64/libnvrtc.so.11.2",
        ];
        check_installed(&system, &[], &system);
        check_installed(
            &["usr/local/other/lib64/libnvrtc.so.12", "opt/other/lib64/libnvrtc.so.12"],
            &[],
            &[],
        );
    }

    #[test]
    fn a_compiler_is_found_in_python_packages() {
        let wheel = |prefix: &str| format!("{prefix}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        let check = |prefix: &str, variables: &[(&str, &str)]| {
            let file = wheel(prefix);
            check_installed(&[&file], variables, &[&file]);
        };
        check("venv/lib/python3.12/site-packages", &[("VIRTUAL_ENV", "venv")]);
        check("conda/lib/python3.12/site-packages", &[("CONDA_PREFIX", "conda")]);
        check("home/.local/lib/python3.12/site-packages", &[("HOME", "home")]);
        check("somewhere/lib/python3.12/site-packages", &[("PATH", "other/bin:somewhere/bin")]);
        check("packages", &[("PYTHONPATH", "packages")]);
        check("usr/lib/python3/dist-packages", &[]);
        check("opt/venv/lib/python3.13/site-packages", &[]);
        check_installed(&[&wheel("venv/lib/python3.12/site-packages")], &[("VIRTUAL_ENV", "")], &[]);
    }

    #[test]
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "stands in for the compiler's functions")]
    fn a_function_that_fails_is_called_by_its_name() {
        extern "C" fn create(
            program: *mut Program,
            _: *const c_char,
            _: *const c_char,
            _: c_int,
            _: *const *const c_char,
            _: *const *const c_char,
        ) -> c_int {
            // SAFETY: the caller gives a place for the result.
            unsafe { program.write(ptr::without_provenance_mut(8)) };
            0
        }
        extern "C" fn compile(_: Program, _: c_int, _: *const *const c_char) -> c_int {
            0
        }
        extern "C" fn destroy(_: *mut Program) -> c_int {
            0
        }
        extern "C" fn size(_: Program, size: *mut usize) -> c_int {
            // SAFETY: the caller gives a place for the result.
            unsafe { size.write(4) };
            0
        }
        extern "C" fn no_size(_: Program, _: *mut usize) -> c_int {
            11
        }
        extern "C" fn no_text(_: Program, _: *mut c_char) -> c_int {
            11
        }
        extern "C" fn error_string(_: c_int) -> *const c_char {
            c"a defect".as_ptr()
        }
        let nvrtc = Nvrtc {
            create,
            compile,
            destroy,
            log_size: size,
            log: no_text,
            cubin_size: size,
            cubin: no_text,
            ptx_size: no_size,
            ptx: no_text,
            error_string,
            path: PathBuf::new(),
            _library: libloading::os::unix::Library::this().into(),
            _builtins: Vec::new(),
        };
        let compiler = Compiler { candidates: Vec::new(), loaded: OnceLock::from(Ok(nvrtc)) };
        let check = |error: LoadError, function| {
            let LoadError::Driver(error) = error else { panic!("{error}") };
            assert_eq!((error.api, error.code, error.name.as_str()), (function, 11, "a defect"));
        };
        check(compiler.compile("", (9, 0)).unwrap_err(), "nvrtcGetCUBIN");
        check(compiler.compile_to_ptx("", (9, 0)).unwrap_err(), "nvrtcGetPTXSize");
    }

    #[test]
    fn a_driver_is_given_the_newest_compiler_it_can_load_from() {
        let first = |major| Compiler::find_at_most(major).candidates.first().map(|path| major_version(path));
        assert_eq!(first(12), Some(12));
        assert_eq!(first(11), Some(11));
    }

    #[test]
    fn a_machine_without_a_compiler_is_told_how_to_get_one() {
        let nowhere = Compiler::at("libnvrtc-of-nobody.so");
        let error = nowhere.compile("", (9, 0)).unwrap_err();
        assert!(matches!(error, LoadError::Library { .. }));
        let text = error.to_string();
        assert!(text.contains("libnvrtc-of-nobody.so") && text.contains("nvidia-cuda-nvrtc"), "{text}");
    }
}
