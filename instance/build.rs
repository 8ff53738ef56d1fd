//! Link options of the programs of which one runs per pod.
//!
//! - Packed relocations (RELR): 10 KB instead of 400 KB to store and to read at start.
//! - In a release, no tables for unwinding (0.5 MB) and one copy of functions with the same code. A panic aborts, and
//!   without symbols a backtrace would say nothing.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=release.ld");
    if knows_packed_relocations() {
        link("-z,pack-relative-relocs");
    }
    // The script is written for the linker that comes with Rust for this target.
    let built_for = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
    if built_for("PROFILE", "release") && built_for("TARGET", "x86_64-unknown-linux-gnu") {
        let script = Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("release.ld");
        link("--icf=all");
        link("--no-eh-frame-hdr");
        link(&format!("-T,{}", script.display()));
    }
}

fn link(option: &str) {
    println!("cargo:rustc-link-arg-bins=-Wl,{option}");
}

/// The start-up code of a static program must know them, which glibc's does since 2.36.
fn knows_packed_relocations() -> bool {
    Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok().is_some_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers =
            text.trim().trim_start_matches("glibc ").split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (2, 36)
    })
}
