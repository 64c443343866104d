//! Whether there is such a program, asked once instead of by every rank.

use std::{
    ffi::{OsStr, OsString},
    io::{self, ErrorKind, Write as _},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Why there is nothing to run, with the exit code that shells give for it.
#[derive(Debug)]
pub(crate) struct Missing {
    text: String,
    code: u8,
}

impl Missing {
    pub(crate) fn new(program: &OsStr, error: &io::Error) -> Self {
        let code = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
        Self { text: format!("{}: {error}", program.display()), code }
    }

    pub(crate) fn report(&self) -> ExitCode {
        // Where standard error is closed, the exit code has to do.
        let _closed = writeln!(anstream::stderr(), "error: {}", self.text);
        ExitCode::from(self.code)
    }
}

/// Finds a program as a shell does: by its path, or in the folders of `PATH`.
pub(crate) fn find(program: &OsStr) -> Result<PathBuf, Missing> {
    if program.as_bytes().contains(&b'/') {
        return runnable(Path::new(program)).map_err(|error| Missing::new(program, &error));
    }
    let folders: OsString = std::env::var_os("PATH").unwrap_or_default();
    let mut problem = io::Error::from(ErrorKind::NotFound);
    for folder in std::env::split_paths(&folders) {
        match runnable(&folder.join(program)) {
            Ok(found) => return Ok(found),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => problem = error,
            Err(_) => {}
        }
    }
    Err(Missing::new(program, &problem))
}

fn runnable(path: &Path) -> io::Result<PathBuf> {
    let meta = path.metadata()?;
    if meta.is_dir() || meta.permissions().mode() & 0o111 == 0 {
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let code = |program: &str| find(OsStr::new(program)).map_err(|missing| missing.code);
        assert!(code("sh").is_ok());
        assert!(code("/bin/sh").is_ok());
        assert_eq!(code("no-such-program-at-all"), Err(127));
        assert_eq!(code("/no/such/program"), Err(127));
        assert_eq!(code("/"), Err(126));
    }
}
