#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_k2k_router::fuzzing::lane;

fuzz_target!(|bytes: &[u8]| lane(bytes));
