//! Libraries that are there under other names, too old, or broken (C14).

use std::fs;

use nccl_rs::{Error, Nccl, Version};
use warpweft_stand_in_nccl::StandIn;

fn reason(error: Error) -> String {
    let Error::NotFound { tried } = &error else { panic!("{error}") };
    assert_eq!(tried.len(), 1);
    assert!(error.to_string().contains("nvidia-nccl-cu12"), "{error}");
    tried[0].reason.clone()
}

#[test]
fn a_library_is_loaded_by_any_path() {
    let library = StandIn::load().unwrap().with("version", "22703");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("another-name.so");
    fs::copy(library.path(), &path).unwrap();
    let nccl = Nccl::load_from(&path).unwrap();
    assert_eq!((nccl.path(), nccl.version()), (path.as_path(), Version::new(2, 32, 3)));
    assert_eq!(Nccl::load_from(library.path()).unwrap().version(), Version::new(2, 27, 3));
    assert!(nccl.newer_functions().iter().all(|(.., is_there)| *is_there));
}

#[test]
fn what_is_wrong_with_a_library_is_said() {
    let nowhere = reason(Nccl::load_from("/nowhere/libnccl.so.2").unwrap_err());
    assert!(nowhere.contains("/nowhere/libnccl.so.2"), "{nowhere}");
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libnccl.so.2");
    fs::write(&text, "no library").unwrap();
    assert!(!reason(Nccl::load_from(&text).unwrap_err()).is_empty());
    let old = StandIn::load().unwrap().with("version", "21602");
    let said = reason(Nccl::load_from(old.path()).unwrap_err());
    assert_eq!(said, "it is NCCL 2.16.2, and 2.18.0 is the oldest that works");
    let lacking = StandIn::lacking(&["ncclCommSplit"]).unwrap();
    assert_eq!(reason(Nccl::load_from(lacking.path()).unwrap_err()), "it has no ncclCommSplit");
    let silent = StandIn::load().unwrap();
    silent.fail("ncclGetVersion", 0, 2);
    assert_eq!(reason(Nccl::load_from(silent.path()).unwrap_err()), "ncclGetVersion returned 2");
}
