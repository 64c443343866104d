//! What was unpacked below `target/tools/vulkan`:
//!
//! ```text
//! root/             the packages, as they would lie on the system
//! swiftshader/      SwiftShader alone: its package is a browser
//! lavapipe.json     manifests that name their libraries by absolute paths
//! swiftshader.json
//! layers/           the same for the validation layers
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{LAVAPIPE, LOADER, OLDEST_MESA, Part, SWIFTSHADER, VALIDATION, VULKANINFO, major, manifest};
use crate::apt::Apt;
use crate::workspace::Workspace;

/// Debian's packages; Ubuntu's have the same names, but for the browser's.
const MESA: &str = "mesa-vulkan-drivers";
const CHROMIUM: &str = "chromium-common";
/// Where the browser's package has its manifest.
const IN_CHROMIUM: &str = "usr/lib/chromium";

/// The folder, absolute, whether it is there or not.
#[derive(Debug)]
pub(super) struct Brought {
    folder: PathBuf,
}

impl Brought {
    pub(super) fn of(workspace: &Workspace) -> Self {
        Self::below(workspace.root.join(&workspace.target).join("tools/vulkan"))
    }

    pub(super) fn below(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub(super) fn find(&self, part: Part) -> Option<PathBuf> {
        let libraries = self.libraries();
        let opens = |manifest: &PathBuf| manifest::library(manifest, &[]).is_some();
        match part {
            Part::Loader => libraries.iter().map(|folder| folder.join(LOADER)).find(|path| path.is_file()),
            Part::Lavapipe | Part::SwiftShader | Part::Validation => self.manifest(part).filter(opens),
            Part::VulkanInfo => {
                Some(self.root().join("usr/bin").join(VULKANINFO)).filter(|path| path.is_file())
            }
        }
    }

    /// The folders of libraries that programs have to be told of.
    pub(super) fn libraries(&self) -> Vec<PathBuf> {
        let folders = ["usr/lib", "lib"].map(|folder| self.root().join(folder).join(super::triplet()));
        folders.into_iter().filter(|folder| folder.is_dir()).collect()
    }

    pub(super) fn holds(&self, path: &Path) -> bool {
        path.starts_with(&self.folder)
    }

    pub(super) fn clear(&self) -> Result<()> {
        remove(&self.folder)
    }

    /// Adds these parts to what was brought before.
    pub(super) fn add(&self, parts: &[Part]) -> Result<()> {
        let state = self.folder.join("apt");
        remove(&state)?;
        let apt = Apt::open(&state)?;
        // What can be had is kept, whatever else cannot.
        let outcomes: Vec<_> = parts.iter().map(|part| self.unpack(&apt, *part)).collect();
        self.write_manifests()?;
        remove(&state)?;
        outcomes.into_iter().collect()
    }

    fn unpack(&self, apt: &Apt, part: Part) -> Result<()> {
        let package = match part {
            Part::Loader => "libvulkan1",
            Part::Lavapipe => &mesa(apt)?,
            Part::SwiftShader => return self.unpack_swiftshader(apt),
            Part::Validation => "vulkan-validationlayers",
            Part::VulkanInfo => "vulkan-tools",
        };
        apt.unpack(package, &self.root())
    }

    /// Takes the driver out of the browser, which needs a lot that the driver does not.
    fn unpack_swiftshader(&self, apt: &Apt) -> Result<()> {
        let browser = self.folder.join("apt/browser");
        apt.unpack_alone(CHROMIUM, &browser)?;
        let manifest = browser.join(IN_CHROMIUM).join(SWIFTSHADER);
        let library = manifest::library(&manifest, &[]).context("the browser holds no SwiftShader")?;
        let folder = self.folder.join("swiftshader");
        fs::create_dir_all(&folder)?;
        for file in [manifest, library] {
            let name = file.file_name().context("a file has a name")?;
            fs::rename(&file, folder.join(name))?;
        }
        Ok(())
    }

    /// Writes manifests that hold wherever the loader starts from.
    fn write_manifests(&self) -> Result<()> {
        for part in [Part::Lavapipe, Part::SwiftShader, Part::Validation] {
            let (Some(from), Some(to)) = (self.unpacked_manifest(part), self.manifest(part)) else {
                continue;
            };
            let library = manifest::library(&from, &self.libraries());
            let library = library.with_context(|| format!("{} names no library", from.display()))?;
            fs::create_dir_all(to.parent().context("a manifest lies in a folder")?)?;
            fs::write(to, manifest::with_library(&fs::read_to_string(from)?, &library)?)?;
        }
        Ok(())
    }

    /// Where our manifest of a part is, if it has one.
    fn manifest(&self, part: Part) -> Option<PathBuf> {
        match part {
            Part::Lavapipe => Some(self.folder.join("lavapipe.json")),
            Part::SwiftShader => Some(self.folder.join("swiftshader.json")),
            Part::Validation => Some(self.folder.join("layers").join(VALIDATION)),
            Part::Loader | Part::VulkanInfo => None,
        }
    }

    /// The manifest as it was packed.
    fn unpacked_manifest(&self, part: Part) -> Option<PathBuf> {
        let vulkan = self.root().join("usr/share/vulkan");
        let manifest = match part {
            Part::Lavapipe => super::manifests(&vulkan.join("icd.d"), LAVAPIPE).into_iter().next(),
            Part::SwiftShader => Some(self.folder.join("swiftshader").join(SWIFTSHADER)),
            Part::Validation => Some(vulkan.join("explicit_layer.d").join(VALIDATION)),
            Part::Loader | Part::VulkanInfo => None,
        };
        manifest.filter(|path| path.is_file())
    }

    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }
}

/// Mesa of the release itself if it computes right, else of its backports.
fn mesa(apt: &Apt) -> Result<String> {
    if is_new_enough(apt.candidate(MESA)?.as_deref()) {
        return Ok(MESA.into());
    }
    let suite = apt.add_backports()?;
    Ok(format!("{MESA}/{suite}"))
}

fn is_new_enough(version: Option<&str>) -> bool {
    version.and_then(major).is_some_and(|major| major >= OLDEST_MESA)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| folder.display().to_string())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mesa_that_computes_right_is_taken() {
        for good in ["24.0.5-1ubuntu1", "25.0.7-2~bpo12+1", "1:26.1.0-1"] {
            assert!(is_new_enough(Some(good)), "{good}");
        }
        for bad in [None, Some("22.3.6-1+deb12u2"), Some("23.2.1-1ubuntu3"), Some("unknown")] {
            assert!(!is_new_enough(bad), "{bad:?}");
        }
    }

    #[test]
    fn nothing_is_found_where_nothing_was_brought() {
        let brought = Brought::below("no-such-folder".into());
        assert!(Part::ALL.into_iter().all(|part| brought.find(part).is_none()));
        assert!(brought.libraries().is_empty());
    }
}
