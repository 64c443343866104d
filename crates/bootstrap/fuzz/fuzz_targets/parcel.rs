#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_bootstrap::fuzzing::parcel;

fuzz_target!(|bytes: &[u8]| parcel(bytes));
