//! Packs the relocations of the position-independent programs (RELR): 10 KB instead of 400 KB to store and to read at start.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The start-up code of a static program must know them, which glibc's does since 2.36.
    let known = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok().is_some_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers =
            text.trim().trim_start_matches("glibc ").split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (2, 36)
    });
    if known {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
