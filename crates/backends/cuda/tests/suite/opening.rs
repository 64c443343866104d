//! What is said of drivers that cannot be used, and of libraries that are named.

use std::path::Path;

use warpweft_core_types::{AllocError, Backend, ErrorClass, Features, LoadError, OpenError};
use warpweft_cuda::{Compiler, CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, backend, config, garbage, kernel};

/// A driver is refused with these words, and with what it says of its version if it got that far.
fn refused(driver: &Path, version: Option<&str>, words: &[&str]) {
    let error = CudaBackend::with_config(&CudaConfig::default().with_driver(driver)).unwrap_err();
    let text = error.to_string();
    let OpenError::Unavailable { backend: "cuda", driver, .. } = error else { panic!("{error:?}") };
    assert_eq!(driver.as_deref(), version, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn a_named_driver_is_used_and_no_other() {
    let backend = backend(&StandIn::load().unwrap());
    let infos = backend.devices().unwrap();
    assert_eq!(infos.len(), 2);
    assert_eq!((infos[0].name.as_str(), backend.driver_version()), ("Stand-in GPU", (13, 0)));
    refused(Path::new("libcuda-of-nobody.so"), None, &["libcuda-of-nobody.so", "install driver 525"]);
}

#[test]
fn an_old_driver_is_refused_by_its_version() {
    let stand_in = StandIn::load().unwrap().with("version", "11080");
    refused(stand_in.path(), Some("CUDA 11.8"), &["CUDA 11.8", "525 (CUDA 12.0)"]);
    stand_in.set("version", "12000");
    assert_eq!(backend(&stand_in).driver_version(), (12, 0));
}

#[test]
fn functions_that_a_driver_lacks_are_listed() {
    let (_folder, path) = StandIn::without(&["cuMemPoolTrimTo", "cuEventQuery"]).unwrap();
    refused(
        &path,
        Some("CUDA 13.0"),
        &["cuMemPoolTrimTo", "cuEventQuery", "update the NVIDIA driver to 525"],
    );
    let (_folder, path) = StandIn::without(&["cuDriverGetVersion"]).unwrap();
    refused(&path, None, &["cuDriverGetVersion"]);
}

#[test]
fn parameters_that_a_driver_does_not_tell_are_taken_from_the_contract() -> Outcome {
    let (_folder, path) = StandIn::without(&["cuFuncGetParamInfo"])?;
    let backend = CudaBackend::with_config(&CudaConfig::default().with_driver(&path).without_cache())?;
    Lane::open(&backend, 0)?.count_to_four()
}

#[test]
fn no_device_is_said_with_a_guess_why() {
    let stand_in = StandIn::load().unwrap().with("CUDA_VISIBLE_DEVICES", "");
    refused(stand_in.path(), Some("CUDA 13.0"), &["NVIDIA GPU", "CUDA_VISIBLE_DEVICES"]);
}

#[test]
fn refused_code_comes_with_the_words_of_the_compiler() {
    let backend = backend(&StandIn::load().unwrap());
    let lane = Lane::open(&backend, 0).unwrap();
    let error = kernel(&lane.device, &garbage()).unwrap_err();
    assert!(matches!(&error, LoadError::Rejected { log } if log.contains("is no parameter")), "{error}");
    assert_eq!(error.class(), ErrorClass::Usage);
}

#[test]
fn kept_code_that_the_driver_refuses_is_made_anew() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    let run = || -> Outcome {
        let backend = CudaBackend::with_config(&config(&stand_in).with_cache(folder.path()))?;
        Lane::open(&backend, 0)?.count_to_four()
    };
    run()?;
    let made = stand_in.calls("cuLinkComplete");
    run()?;
    assert_eq!(stand_in.calls("cuLinkComplete"), made, "nothing is made twice");
    // As if another driver had made it.
    stand_in.fail("cuModuleLoadDataEx", 0, 209);
    run()?;
    assert_eq!(stand_in.calls("cuLinkComplete"), made + 1);
    Ok(())
}

#[test]
fn a_compiler_that_is_named_is_the_only_one() {
    let config = config(&StandIn::load().unwrap()).with_nvrtc("libnvrtc-of-nobody.so");
    CudaBackend::with_config(&config).unwrap();
}

#[test]
fn a_compiler_that_is_too_old_is_named_with_its_version() {
    let check = |stand_in: &StandIn, version: &str| {
        let error = Compiler::at(stand_in.path()).compile("", (9, 0)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("NVRTC {version}")) && text.contains("11.2 or newer"), "{text}");
    };
    let stand_in = StandIn::load().unwrap();
    check(&stand_in, "11.1");
    stand_in.set("nvrtc", "10.2");
    check(&stand_in, "10.2");
}

/// A fault during the trial is the device's, and not the driver's that is missing.
#[test]
fn a_probe_that_loses_the_device_says_so() {
    let stand_in = StandIn::load().unwrap();
    let backend = backend(&stand_in);
    backend.open(0, Features::empty()).unwrap();
    // Sticky: illegal address.
    stand_in.fail("cuGraphInstantiateWithFlags", 0, 700);
    let error = backend.probe_resident(0).unwrap_err();
    assert_eq!(error.class(), ErrorClass::DeviceLost, "{error:?}");
}

#[test]
fn memory_that_an_open_device_needs_is_named_when_it_is_out() {
    let stand_in = StandIn::load().unwrap();
    let backend = backend(&stand_in);
    stand_in.fail("cuMemHostAlloc", 0, 2);
    let error = backend.open(0, Features::empty()).map(drop).unwrap_err();
    assert!(matches!(&error, OpenError::Memory(AllocError::HostOutOfMemory { .. })), "{error:?}");
    assert_eq!(error.class(), ErrorClass::Exhausted);
}
