//! The JSON files by which the Vulkan loader finds drivers and layers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The library of a driver's or a layer's manifest, as the loader would find it.
///
/// A bare name is looked up in `folders`, a relative path starts at the manifest.
pub(super) fn library(manifest: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
    let text = fs::read_to_string(manifest).ok()?;
    let mut value = serde_json::from_str(&text).ok()?;
    let named = Path::new(library_path(&mut value)?.as_str()?).to_owned();
    candidates(&named, manifest, folders).find(|path| path.is_file())
}

/// The manifest with another library: one that the loader finds wherever it starts from.
pub(super) fn with_library(text: &str, library: &Path) -> Result<String> {
    let mut value = serde_json::from_str(text).context("not a manifest")?;
    *library_path(&mut value).context("a manifest without a library")? = library.display().to_string().into();
    Ok(format!("{value:#}\n"))
}

fn library_path(manifest: &mut Value) -> Option<&mut Value> {
    let key = if manifest.get("ICD").is_some() { "ICD" } else { "layer" };
    manifest.get_mut(key)?.get_mut("library_path")
}

fn candidates(named: &Path, manifest: &Path, folders: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    let bare = named.parent().is_some_and(|parent| parent.as_os_str().is_empty());
    let beside = manifest.parent().map(Path::to_owned);
    let folders = if bare { folders.to_vec() } else { beside.into_iter().collect() };
    let named = named.to_owned();
    // Without the `.` of `./libvk_swiftshader.so`.
    folders.into_iter().map(move |folder| folder.join(&named).components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for_as_the_loader_does() {
        let check = |named: &str, expected: &[&str]| {
            let folders = ["/usr/lib".into(), "/lib".into()];
            let found: Vec<_> = candidates(Path::new(named), Path::new("/icd.d/a.json"), &folders).collect();
            assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>());
        };
        check("libvulkan_lvp.so", &["/usr/lib/libvulkan_lvp.so", "/lib/libvulkan_lvp.so"]);
        check("./libvk_swiftshader.so", &["/icd.d/libvk_swiftshader.so"]);
        check("/opt/libvulkan_lvp.so", &["/opt/libvulkan_lvp.so"]);
    }

    #[test]
    fn drivers_and_layers_get_another_library() {
        let check = |key: &str| {
            let text = format!(r#"{{"{key}": {{"library_path": "./a.so", "api_version": "1.0.5"}}}}"#);
            let changed: Value =
                serde_json::from_str(&with_library(&text, Path::new("/b/a.so")).unwrap()).unwrap();
            assert_eq!(changed[key]["library_path"], "/b/a.so");
            assert_eq!(changed[key]["api_version"], "1.0.5");
        };
        check("ICD");
        check("layer");
        for bad in ["", "{}", r#"{"ICD": {}}"#, r#"{"ICD": 3}"#] {
            assert!(with_library(bad, Path::new("/b/a.so")).is_err(), "{bad}");
        }
    }
}
