#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_bootstrap::fuzzing::to_hub;

fuzz_target!(|bytes: &[u8]| to_hub(bytes));
