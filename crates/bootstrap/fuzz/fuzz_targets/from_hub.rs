#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_bootstrap::fuzzing::from_hub;

fuzz_target!(|bytes: &[u8]| from_hub(bytes));
