//! Machines that lack something, as processes of their own: the loader reads its environment once.

use std::process::{Command, ExitCode};

use warpweft_core_types::OpenError;
use warpweft_vulkan::{VulkanBackend, VulkanConfig};

use crate::support::{Test, Verdict, open_backend};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "opening::a_missing_loader_is_named", body: a_missing_loader_is_named },
    Test { name: "opening::a_missing_driver_is_named", body: a_missing_driver_is_named },
    Test { name: "opening::a_missing_layer_is_named", body: a_missing_layer_is_named },
    Test { name: "opening::there_is_a_copy_at_least", body: there_is_a_copy_at_least },
];

/// Says which of the two to open, in a process that was started for it.
const ASKED: &str = "WARPWEFT_TEST_OPEN";

fn a_missing_loader_is_named() -> Verdict {
    let config = VulkanConfig::default().with_loader("no-such-folder/libvulkan.so.1");
    let error = VulkanBackend::with_config(&config).err().ok_or("it opened")?;
    let text = error.to_string();
    assert!(matches!(error, OpenError::Unavailable { .. }), "{text}");
    assert!(text.contains("no-such-folder") && text.contains("libvulkan1"), "{text}");
    Ok(())
}

fn there_is_a_copy_at_least() -> Verdict {
    let error =
        VulkanBackend::with_config(&VulkanConfig::default().with_copies(0)).err().ok_or("it opened")?;
    assert!(matches!(error, OpenError::InvalidConfig { .. }), "{error}");
    Ok(())
}

fn a_missing_driver_is_named() -> Verdict {
    open_backend(&VulkanConfig::default())?;
    let text = ask(
        "plain",
        &[("VK_DRIVER_FILES", "no-such-driver.json"), ("VK_ICD_FILENAMES", "no-such-driver.json")],
    )?;
    assert!(text.contains("driver") && text.contains("mesa-vulkan-drivers"), "{text}");
    Ok(())
}

fn a_missing_layer_is_named() -> Verdict {
    open_backend(&VulkanConfig::default())?;
    let empty = std::env::temp_dir();
    let nowhere = empty.join("warpweft-no-such-folder");
    let nowhere = nowhere.to_str().ok_or("the folder's name is text")?;
    let vars = [("VK_LAYER_PATH", nowhere), ("XDG_DATA_DIRS", nowhere), ("XDG_DATA_HOME", nowhere)];
    let text = ask("validated", &vars)?;
    // Where the layer is found all the same, there is nothing to say.
    assert!(text.is_empty() || text.contains("vulkan-validationlayers"), "{text}");
    Ok(())
}

/// What another process says when it opens the backend with these variables; nothing if it can.
fn ask(what: &str, variables: &[(&str, &str)]) -> Result<String, crate::support::Need> {
    let output =
        Command::new(std::env::current_exe()?).env(ASKED, what).envs(variables.iter().copied()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Answers the process that asked, if one did.
pub(crate) fn answer() -> Option<ExitCode> {
    let asked = std::env::var(ASKED).ok()?;
    let config = VulkanConfig::default();
    let config = if asked == "validated" { config.with_validation() } else { config };
    let text = VulkanBackend::with_config(&config).err().map(|error| error.to_string()).unwrap_or_default();
    let written = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
    Some(if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
