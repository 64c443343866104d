//! What is said of drivers that cannot be used, and of libraries that are named.

use std::path::Path;

use warpweft_core_types::{Backend, ErrorClass, LoadError, OpenError};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, backend, config, garbage, kernel};

fn refused(driver: &Path, words: &[&str]) {
    let error = CudaBackend::with_config(&CudaConfig::default().with_driver(driver)).unwrap_err();
    assert!(matches!(error, OpenError::Unavailable { backend: "cuda", .. }), "{error:?}");
    let text = error.to_string();
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
    refused(Path::new("libcuda-of-nobody.so"), &["libcuda-of-nobody.so", "install driver 525"]);
}

#[test]
fn an_old_driver_is_refused_by_its_version() {
    let stand_in = StandIn::load().unwrap().with("version", "11080");
    refused(stand_in.path(), &["CUDA 11.8", "525 (CUDA 12.0)"]);
    stand_in.set("version", "12000");
    assert_eq!(backend(&stand_in).driver_version(), (12, 0));
}

#[test]
fn functions_that_a_driver_lacks_are_listed() {
    let (_folder, path) = StandIn::without(&["cuMemPoolTrimTo", "cuEventQuery"]).unwrap();
    refused(&path, &["cuMemPoolTrimTo", "cuEventQuery", "update the NVIDIA driver to 525"]);
    let (_folder, path) = StandIn::without(&["cuDriverGetVersion"]).unwrap();
    refused(&path, &["cuDriverGetVersion"]);
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
    refused(stand_in.path(), &["NVIDIA GPU", "CUDA_VISIBLE_DEVICES"]);
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
