//! Vulkan drivers that need no GPU, with the loader that opens them and the layers that watch their callers.
//!
//! What the system has is taken if it is good enough. Else the distribution's packages are unpacked below
//! `target/tools`, and nothing is installed. Either way [`Drivers::environment`] makes a program use them.

mod brought;
mod manifest;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::apt::Apt;
use crate::cmd::Cmd;
use crate::workspace::Workspace;
use brought::Brought;

/// lavapipe of Debian's Mesa 22.3.6 leaves a shader's loops after 65,535 iterations and says nothing.
const OLDEST_MESA: u32 = 24;

/// Where the loader looks for manifests, and browsers keep that of their SwiftShader.
const DRIVERS: [&str; 3] = ["/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d"];
const LAYERS: [&str; 3] = [
    "/etc/vulkan/explicit_layer.d",
    "/usr/local/share/vulkan/explicit_layer.d",
    "/usr/share/vulkan/explicit_layer.d",
];
const BROWSERS: [&str; 5] = [
    "/usr/lib/chromium",
    "/usr/lib/chromium-browser",
    "/usr/lib64/chromium-browser",
    "/opt/google/chrome",
    "/opt/microsoft/msedge",
];

const LOADER: &str = "libvulkan.so.1";
const LAVAPIPE: &str = "lvp_icd";
const SWIFTSHADER: &str = "vk_swiftshader_icd.json";
const VALIDATION: &str = "VkLayer_khronos_validation.json";
const VALIDATION_LAYER: &str = "VK_LAYER_KHRONOS_validation";
const VULKANINFO: &str = "vulkaninfo";

/// Groups of a kernel that wait for each other run only if there are as many threads.
const THREADS: &str = "8";

/// A driver that computes on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    /// Mesa's: nearly every feature that a GPU has.
    Lavapipe,
    /// Chromium's: few features, so that fallbacks are used.
    SwiftShader,
}

/// What there is on this machine.
#[derive(Debug)]
pub(crate) struct Drivers {
    found: Vec<(Part, PathBuf)>,
    brought: Brought,
    /// Where lavapipe keeps what it compiled.
    cache: PathBuf,
}

/// One of the things that tests on these drivers need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Loader,
    Lavapipe,
    SwiftShader,
    Validation,
    VulkanInfo,
}

/// The part of `setup` that is about drivers; with `only_report`, says how many parts are missing instead.
pub(crate) fn setup(workspace: &Workspace, only_report: bool) -> Result<usize> {
    let drivers = Drivers::find(workspace);
    drivers.report();
    let missing = drivers.missing().count();
    if only_report {
        return Ok(missing);
    }
    let answered = if missing > 0 { bring(workspace) } else { drivers.check() };
    match answered {
        // What was unpacked leans on what was installed then, and the system may have changed since.
        Err(error) if missing == 0 && drivers.are_brought() => {
            println!("{error:#}: brought again");
            drivers.brought.clear()?;
            bring(workspace)?;
        }
        other => other?,
    }
    Ok(0)
}

/// What tests can use, after what is missing was brought as far as that goes.
pub(crate) fn ready(workspace: &Workspace) -> Drivers {
    let drivers = Drivers::find(workspace);
    if drivers.missing().next().is_none() {
        return drivers;
    }
    if let Err(error) = bring(workspace) {
        println!("the Vulkan drivers are not complete: {error:#}");
    }
    Drivers::find(workspace)
}

/// Brings what is missing, and sees whether everything answers.
fn bring(workspace: &Workspace) -> Result<()> {
    let missing: Vec<Part> = Drivers::find(workspace).missing().collect();
    ensure!(Apt::is_here()?, by_hand(&missing));
    let brought = Brought::of(workspace).add(&missing);
    let drivers = Drivers::find(workspace);
    let missing: Vec<Part> = drivers.missing().collect();
    brought.with_context(|| by_hand(&missing))?;
    ensure!(missing.is_empty(), by_hand(&missing));
    drivers.check()
}

fn by_hand(parts: &[Part]) -> String {
    let parts: Vec<_> = parts.iter().map(|part| part.by_hand()).collect();
    format!("to be installed by hand, with this system's packages: {}", parts.join(", "))
}

impl Drivers {
    pub(crate) fn find(workspace: &Workspace) -> Self {
        let brought = Brought::of(workspace);
        let system = libraries();
        let found = Part::ALL.into_iter().filter_map(|part| {
            let path = part.on_system(&system).or_else(|| brought.find(part))?;
            Some((part, path))
        });
        let cache = workspace.root.join(&workspace.target).join("mesa-shader-cache");
        Self { found: found.collect(), brought, cache }
    }

    /// The variables that make a program use these drivers and no other.
    ///
    /// # Errors
    /// Names what is missing.
    pub(crate) fn environment(&self, drivers: &[Driver]) -> Result<Vec<(String, String)>> {
        self.at(Part::Loader)?;
        let manifests: Vec<&Path> =
            drivers.iter().map(|driver| self.at(driver.part())).collect::<Result<_>>()?;
        let manifests = joined(manifests)?;
        let layers = self.at(Part::Validation)?.parent().context("a manifest lies in a folder")?;
        let mut variables = vec![
            ("VK_DRIVER_FILES", manifests.clone()),
            // The same for a loader before 1.3.207.
            ("VK_ICD_FILENAMES", manifests),
            ("VK_LAYER_PATH", layers.display().to_string()),
            ("LP_NUM_THREADS", THREADS.into()),
            ("MESA_SHADER_CACHE_DIR", self.cache.display().to_string()),
        ];
        let ours = self.brought.libraries();
        if !ours.is_empty() {
            let inherited = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            // An empty path would be the current folder.
            let inherited: Vec<_> =
                env::split_paths(&inherited).filter(|path| !path.as_os_str().is_empty()).collect();
            variables.push(("LD_LIBRARY_PATH", joined(ours.iter().chain(&inherited))?));
        }
        Ok(variables.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }

    /// As if these drivers were found, with all that goes with them.
    #[cfg(test)]
    pub(crate) fn pretended(drivers: &[Driver]) -> Self {
        let mut parts = vec![Part::Loader, Part::Validation, Part::VulkanInfo];
        parts.extend(drivers.iter().map(|driver| driver.part()));
        Self::of_parts(&parts)
    }

    #[cfg(test)]
    fn of_parts(parts: &[Part]) -> Self {
        Self {
            found: parts.iter().map(|&part| (part, Path::new("/found").join(part.name()))).collect(),
            brought: Brought::below("no-such-folder".into()),
            cache: "/cache".into(),
        }
    }

    fn missing(&self) -> impl Iterator<Item = Part> {
        Part::ALL.into_iter().filter(|part| self.at(*part).is_err())
    }

    /// The library that opens drivers.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(crate) fn loader(&self) -> Result<&Path> {
        self.at(Part::Loader)
    }

    fn at(&self, part: Part) -> Result<&Path> {
        let found = self.found.iter().find(|(found, _)| *found == part);
        let (_, path) = found.with_context(|| format!("{} is missing: cargo xtask setup", part.name()))?;
        Ok(path)
    }

    /// Whether any of it was brought.
    fn are_brought(&self) -> bool {
        self.found.iter().any(|(_, path)| self.brought.holds(path))
    }

    fn report(&self) {
        for part in Part::ALL {
            let name = part.name();
            match self.at(part) {
                Ok(path) => println!("found    {name:17}  {}", path.display()),
                Err(_) => {
                    let (purpose, by_hand) = (part.purpose(), part.by_hand());
                    println!(
                        "missing  {name:17}  {purpose}; to get it: cargo xtask setup, or install {by_hand}"
                    );
                }
            }
        }
    }

    /// Opens each driver, and the layers, through the loader.
    fn check(&self) -> Result<()> {
        for driver in [Driver::Lavapipe, Driver::SwiftShader] {
            let name = driver.part().name();
            let summary = self.summary(driver)?.all_output()?;
            let answer = answer(driver, &summary).with_context(|| format!("{name} does not answer"))?;
            println!("answers  {name:17}  {answer}");
        }
        // A layer that cannot be opened is left out without a word, unless one asks.
        let watched = self.summary(Driver::Lavapipe)?.variable("VK_INSTANCE_LAYERS", VALIDATION_LAYER);
        let said = watched.variable("VK_LOADER_DEBUG", "layer").all_output()?;
        ensure!(
            said.contains(&format!("Insert instance layer \"{VALIDATION_LAYER}\"")),
            "the loader does not open {}",
            self.at(Part::Validation)?.display()
        );
        println!("answers  {}", Part::Validation.name());
        self.tell_how_to_use()
    }

    /// What a program's surroundings need to find both drivers; the legs of `test` set it themselves.
    fn tell_how_to_use(&self) -> Result<()> {
        println!("to use them:");
        let wanted = ["VK_DRIVER_FILES", "VK_LAYER_PATH", "LD_LIBRARY_PATH"];
        for (name, value) in self.environment(&[Driver::Lavapipe, Driver::SwiftShader])? {
            if wanted.contains(&name.as_str()) {
                println!("  export {name}={value}");
            }
        }
        Ok(())
    }

    fn summary(&self, driver: Driver) -> Result<Cmd> {
        let vulkaninfo = Cmd::program(self.at(Part::VulkanInfo)?).arg("--summary");
        Ok(vulkaninfo.variables(self.environment(&[driver])?))
    }
}

impl Driver {
    fn part(self) -> Part {
        match self {
            Self::Lavapipe => Part::Lavapipe,
            Self::SwiftShader => Part::SwiftShader,
        }
    }

    /// What Vulkan calls it.
    fn id(self) -> &'static str {
        match self {
            Self::Lavapipe => "DRIVER_ID_MESA_LLVMPIPE",
            Self::SwiftShader => "DRIVER_ID_GOOGLE_SWIFTSHADER",
        }
    }
}

impl Part {
    const ALL: [Self; 5] =
        [Self::Loader, Self::Lavapipe, Self::SwiftShader, Self::Validation, Self::VulkanInfo];

    fn name(self) -> &'static str {
        match self {
            Self::Loader => "Vulkan loader",
            Self::Lavapipe => "lavapipe",
            Self::SwiftShader => "SwiftShader",
            Self::Validation => "validation layers",
            Self::VulkanInfo => VULKANINFO,
        }
    }

    fn purpose(self) -> &'static str {
        match self {
            Self::Loader => "opens Vulkan drivers, run by `test`",
            Self::Lavapipe => "a Vulkan device on the CPU with most features, run by `test`",
            Self::SwiftShader => "a Vulkan device on the CPU with few features, run by `test`",
            Self::Validation => "finds wrong uses of Vulkan, run by `test`",
            Self::VulkanInfo => "shows that drivers answer, run by `setup`",
        }
    }

    /// What to look for where apt is not.
    fn by_hand(self) -> &'static str {
        match self {
            Self::Loader => "the Vulkan loader",
            Self::Lavapipe => "Mesa 24 or newer with lavapipe",
            Self::SwiftShader => "Chromium or Chrome, which hold SwiftShader",
            Self::Validation => "the Khronos validation layers",
            Self::VulkanInfo => "vulkaninfo (Vulkan tools)",
        }
    }

    /// Where the system has it, if it does and it is good enough.
    fn on_system(self, libraries: &[PathBuf]) -> Option<PathBuf> {
        let opens = |manifest: &PathBuf| manifest::library(manifest, libraries).is_some();
        match self {
            Self::Loader => libraries.iter().map(|folder| folder.join(LOADER)).find(|path| path.is_file()),
            Self::Lavapipe => {
                let manifests = DRIVERS.iter().flat_map(|folder| manifests(Path::new(folder), LAVAPIPE));
                manifests.into_iter().find(|manifest| is_new_enough(manifest, libraries))
            }
            Self::SwiftShader => {
                let folders = DRIVERS.iter().chain(&BROWSERS);
                folders.map(|folder| Path::new(folder).join(SWIFTSHADER)).find(opens)
            }
            Self::Validation => LAYERS.iter().map(|folder| Path::new(folder).join(VALIDATION)).find(opens),
            Self::VulkanInfo => {
                let path = env::var_os("PATH").unwrap_or_default();
                env::split_paths(&path).map(|folder| folder.join(VULKANINFO)).find(|path| path.is_file())
            }
        }
    }
}

/// The folders of libraries that every program looks into.
fn libraries() -> Vec<PathBuf> {
    let folders = ["/usr/local/lib", "/usr/lib", "/lib", "/usr/lib64"].map(Path::new);
    folders.into_iter().flat_map(|folder| [folder.join(triplet()), folder.to_owned()]).collect()
}

/// The name of the folder where Debian keeps the libraries of one kind of machine.
fn triplet() -> String {
    format!("{}-linux-gnu", env::consts::ARCH)
}

/// The manifests in `folder` whose names begin with `prefix`: some systems add the processor to it.
fn manifests(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect();
    found.sort();
    found
}

/// Asks the library and not the package: not every system's packages can be asked.
fn is_new_enough(manifest: &Path, libraries: &[PathBuf]) -> bool {
    let library = manifest::library(manifest, libraries);
    let bytes = library.and_then(|library| fs::read(library).ok()).unwrap_or_default();
    mesa_in(&bytes).is_some_and(|major| major >= OLDEST_MESA)
}

/// The version in the text by which lavapipe's library names itself, such as `Mesa 25.0.7 (LLVM 15.0.6)`.
fn mesa_in(library: &[u8]) -> Option<u32> {
    let mark = b"Mesa ";
    let mut marks = library.windows(mark.len()).enumerate().filter(|(_, bytes)| bytes == mark);
    marks.find_map(|(at, _)| {
        let behind = library[at + mark.len()..].iter().take(16);
        major(&String::from_utf8_lossy(&behind.copied().collect::<Vec<_>>()))
    })
}

/// The first number of a version with a second one, without Debian's epoch.
fn major(version: &str) -> Option<u32> {
    let version = version.split_once(':').map_or(version, |(_, version)| version);
    let (major, rest) = version.split_once('.')?;
    if rest.starts_with(|c: char| c.is_ascii_digit()) { major.parse().ok() } else { None }
}

/// What a driver says of itself in the output of `vulkaninfo --summary`.
fn answer(driver: Driver, summary: &str) -> Result<String> {
    let value = |key: &str| {
        let mut pairs = summary.lines().filter_map(|line| line.split_once('='));
        pairs.find(|(name, _)| name.trim() == key).map_or("", |(_, value)| value.trim())
    };
    ensure!(value("driverID") == driver.id(), "vulkaninfo lists no device of {}", driver.id());
    let info = value("driverInfo");
    if driver == Driver::Lavapipe {
        let mesa = info.strip_prefix("Mesa ").and_then(major);
        ensure!(mesa.is_some_and(|mesa| mesa >= OLDEST_MESA), "{info} is older than Mesa {OLDEST_MESA}");
    }
    Ok(format!("{}  {info}", value("deviceName")).trim_end().into())
}

fn joined<'a, P: AsRef<std::ffi::OsStr> + 'a>(paths: impl IntoIterator<Item = P>) -> Result<String> {
    let joined = env::join_paths(paths).context("a path with a separator in it cannot be searched")?;
    Ok(joined.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_tells_its_mesa() {
        let check = |library: &str, expected| assert_eq!(mesa_in(library.as_bytes()), expected, "{library}");
        check("\0\x01Mesa 25.0.7-2~bpo12+1 (LLVM 15.0.6)\0", Some(25));
        check("\0Mesa 22.3.6 (LLV\x03\x04 more code", Some(22));
        check("\0Mesa Overlay layer\0\0\0\0Mesa 24.2.1-1ubuntu\0", Some(24));
        for nothing in ["", "Mesa ", "Mesa 25", "Mesa is a library of many", "llvmpipe of 25.0.7 and so on"] {
            check(nothing, None);
        }
    }

    #[test]
    fn versions_begin_with_a_number() {
        let check = |version: &str, expected| assert_eq!(major(version), expected, "{version}");
        check("22.3.6-1+deb12u2", Some(22));
        check("1:25.0.7", Some(25));
        for bad in ["", "25", "25.x", "new.1"] {
            check(bad, None);
        }
    }

    #[test]
    fn an_answer_names_the_driver_and_a_mesa_that_computes_right() {
        let lavapipe = |info: &str| {
            format!(
                "Devices:\n\tdeviceName = llvmpipe\n\tdriverID = DRIVER_ID_MESA_LLVMPIPE\n\tdriverInfo = {info}\n"
            )
        };
        let swiftshader = "\tdeviceName = SwiftShader Device\n\tdriverID = DRIVER_ID_GOOGLE_SWIFTSHADER\n\
                           \tdriverInfo = \n";
        let check = |driver, summary: &str, expected: Result<&str, &str>| {
            let got = answer(driver, summary).map_err(|error| error.to_string());
            assert_eq!(got.as_deref().map_err(String::as_str), expected);
        };
        check(Driver::Lavapipe, &lavapipe("Mesa 25.0.7 (LLVM 15)"), Ok("llvmpipe  Mesa 25.0.7 (LLVM 15)"));
        check(Driver::Lavapipe, &lavapipe("Mesa 22.3.6"), Err("Mesa 22.3.6 is older than Mesa 24"));
        check(Driver::Lavapipe, "", Err("vulkaninfo lists no device of DRIVER_ID_MESA_LLVMPIPE"));
        check(Driver::SwiftShader, swiftshader, Ok("SwiftShader Device"));
    }

    #[test]
    fn a_driver_needs_the_loader_and_the_layers_too() {
        let some = Drivers::of_parts(&[Part::Loader, Part::Validation, Part::SwiftShader]);
        let variables = some.environment(&[Driver::SwiftShader]).unwrap();
        let expected = [
            ("VK_DRIVER_FILES", "/found/SwiftShader"),
            ("VK_ICD_FILENAMES", "/found/SwiftShader"),
            ("VK_LAYER_PATH", "/found"),
            ("LP_NUM_THREADS", "8"),
            ("MESA_SHADER_CACHE_DIR", "/cache"),
        ];
        assert_eq!(variables, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let error = some.environment(&[Driver::SwiftShader, Driver::Lavapipe]).unwrap_err();
        assert_eq!(error.to_string(), "lavapipe is missing: cargo xtask setup");
        assert!(
            Drivers::of_parts(&[Part::SwiftShader, Part::Validation])
                .environment(&[Driver::SwiftShader])
                .is_err()
        );
    }
}
