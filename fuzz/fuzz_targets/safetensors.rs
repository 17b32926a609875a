#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| burn_fsdp_fuzz::safetensors(bytes));
