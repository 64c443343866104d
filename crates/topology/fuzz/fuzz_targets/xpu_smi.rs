#![no_main]

use libfuzzer_sys::fuzz_target;
use warpweft_topology::import::Format;
use warpweft_topology_fuzz::check;

fuzz_target!(|bytes: &[u8]| check(Format::XpuSmi, bytes));
