//! Where the library may be.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// Names that the system's loader knows it by: packages that programs run with bring the first alone.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The variable that names a library.
pub(crate) const VARIABLE: &str = "NCCL_LIBRARY";

/// The machine, as far as it matters here.
pub(crate) struct Surroundings<'a> {
    pub(crate) root: &'a Path,
    pub(crate) variable: &'a dyn Fn(&str) -> Option<OsString>,
}

/// What to load, best first: the named one alone if one is named, or the loader's, then those of Python packages.
pub(crate) fn candidates() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name);
    Surroundings { root: Path::new("/"), variable: &variable }.candidates()
}

impl Surroundings<'_> {
    fn candidates(&self) -> Vec<PathBuf> {
        if let Some(named) = self.paths(VARIABLE).into_iter().next() {
            return vec![named];
        }
        let folders = self.toolkits().into_iter().chain(self.packages());
        let files = folders.flat_map(|folder| NAMES.map(|name| folder.join(name)));
        NAMES.iter().map(PathBuf::from).chain(files.filter(|file| file.is_file())).collect()
    }

    /// Folders of libraries beside CUDA, of the system and of Conda.
    fn toolkits(&self) -> Vec<PathBuf> {
        let named = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"].into_iter().flat_map(|name| self.paths(name));
        let known =
            ["usr/local/cuda", "opt/cuda", "usr/local/nccl", "opt/nccl"].map(|path| self.root.join(path));
        named.chain(known).flat_map(|folder| ["lib64", "lib"].map(|lib| folder.join(lib))).collect()
    }

    /// `nvidia/nccl/lib` in every folder of Python packages: of environments, the user's, the system's, and of any
    /// Python on the path.
    fn packages(&self) -> BTreeSet<PathBuf> {
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().flat_map(|name| self.paths(name));
        let home = self.paths("HOME").into_iter().map(|home| home.join(".local"));
        let beside = self.paths("PATH").into_iter().filter_map(|path| Some(path.parent()?.to_owned()));
        let system = ["usr", "usr/local", "opt/venv", "opt/conda"].map(|path| self.root.join(path));
        let installed = environments
            .chain(home)
            .chain(beside)
            .chain(system)
            .flat_map(|prefix| ["lib", "lib64"].map(|lib| prefix.join(lib)))
            .flat_map(|lib| pythons(&lib))
            .flat_map(|python| ["site-packages", "dist-packages"].map(|folder| python.join(folder)));
        let folders = installed.chain(self.paths("PYTHONPATH"));
        folders.map(|folder| folder.join("nvidia/nccl/lib")).filter(|folder| folder.is_dir()).collect()
    }

    /// The paths in a variable, without empty ones.
    fn paths(&self, variable: &str) -> Vec<PathBuf> {
        let value = (self.variable)(variable).unwrap_or_default();
        env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
    }
}

/// `python3`, `python3.12` and so on.
fn pythons(lib: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(lib).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python"))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is looked at where these files are, with these variables; files by their path below the root.
    fn check(files: &[&str], variables: &[(&str, &str)], expected: &[&str]) {
        let root = tempfile::tempdir().unwrap();
        for file in files.iter().map(|file| root.path().join(file)) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            let join = |part: &str| if part.is_empty() { PathBuf::new() } else { root.path().join(part) };
            env::join_paths(value.split(':').map(join)).ok()
        };
        let found = Surroundings { root: root.path(), variable: &variable }.candidates();
        let expected: Vec<_> = expected
            .iter()
            .map(|file| if NAMES.contains(file) { PathBuf::from(file) } else { root.path().join(file) })
            .collect();
        assert_eq!(found, expected, "{variables:?}");
    }

    #[test]
    fn the_loader_is_asked_first_and_a_named_library_is_the_only_one() {
        check(&[], &[], &NAMES);
        check(&["usr/local/cuda/lib64/libnccl.so.2"], &[(VARIABLE, "mine/nccl.so")], &["mine/nccl.so"]);
        check(&[], &[(VARIABLE, "")], &NAMES);
    }

    #[test]
    fn libraries_of_toolkits_and_python_packages_are_found() {
        let found = |file: &str, variables: &[(&str, &str)]| {
            check(&[file], variables, &[NAMES[0], NAMES[1], file]);
        };
        found("usr/local/cuda/lib64/libnccl.so.2", &[]);
        found("tools/lib/libnccl.so", &[("CUDA_HOME", "tools")]);
        let wheel = |folder: &str| format!("{folder}/nvidia/nccl/lib/libnccl.so.2");
        found(&wheel("venv/lib/python3.12/site-packages"), &[("VIRTUAL_ENV", "venv")]);
        found(&wheel("conda/lib/python3.12/site-packages"), &[("CONDA_PREFIX", "conda")]);
        found(&wheel("home/.local/lib/python3.12/site-packages"), &[("HOME", "home")]);
        found(&wheel("some/lib/python3.13/site-packages"), &[("PATH", "other/bin:some/bin")]);
        found(&wheel("usr/lib64/python3.12/site-packages"), &[]);
        found(&wheel("packages"), &[("PYTHONPATH", "packages")]);
        found(&wheel("usr/lib/python3/dist-packages"), &[]);
    }
}
