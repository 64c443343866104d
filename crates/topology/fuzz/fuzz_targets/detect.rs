#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_topology::import::import;
use warpweft_topology_fuzz::check;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(imported) = import(bytes) {
        check(imported.report.format, bytes);
    }
});
