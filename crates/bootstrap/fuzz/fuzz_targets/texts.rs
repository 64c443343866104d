#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_bootstrap::fuzzing::texts;

fuzz_target!(|text: &str| texts(text));
