//! The fuzzer: one binary for all targets, so that the sanitized build links only once. `FUZZ_TARGET` selects the
//! target.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<nebula_fuzz::Run> = OnceLock::new();

fuzz_target!(|data: &[u8]| {
    let run = TARGET.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names the target");
        nebula_fuzz::target(&name).unwrap_or_else(|| panic!("no target {name}"))
    });
    run(data);
});
