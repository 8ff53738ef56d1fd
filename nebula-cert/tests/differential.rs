//! Compares our tool with the releases of Go Nebula packaged in Debian: the same command lines, and files made by each
//! other.
//!
//! Intended differences are listed in [`DELIBERATE`]; everything else must be equal.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test ends where an unwrap fails")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template, Version, visible_json};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::Value;
use tempfile::TempDir;

/// Command lines whose outcome differs from Go on purpose, and why.
const DELIBERATE: &[(&str, &str)] = &[
    ("keygen -out-key junk -out-pub cut.crt", PRIVATE),
    ("ca -name new -out-crt n.crt -out-key n.key more words", LEFT_OVER),
    ("sign -name new -networks , ", "says which flag is at fault"),
    ("verify -ca empty -crt host.crt", "says that the file is empty, not that the certificate is untrusted"),
    ("verify -ca ca.crt -crt empty", "nothing was verified, so this is no success"),
    ("ca -name n*254 -out-crt n.crt -out-key n.key", UNREADABLE),
    ("sign -name n*254 -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key", UNREADABLE),
    ("sign -name n*256 -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key", UNREADABLE),
    (
        "sign -name new -networks 10.0.0.9/16 -version 4294967296",
        "is no version; Go looks at the lowest byte only, which is 0 for the CA's own version",
    ),
    ("verify -ca ca.crt -crt ca.crt", SUBJECT),
    ("verify -ca ca.crt -crt oldhost.crt", SUBJECT),
];

const PRIVATE: &str = "a key file that is replaced becomes private even if others could read it";
const UNREADABLE: &str = "Go writes a certificate of version 2 with such a name, which no program can read";
const LEFT_OVER: &str = "words that would be ignored, together with every flag after them, are an error";
const SUBJECT: &str = "names the certificate in one line where Go prints all of its JSON";

/// Command lines in shell syntax: `NAME=value` before the command, `< file` after it, `''` for an empty word, `␣`
/// for a space inside a word, and `n*254` for that many letters.
const LINES: &[&str] = &[
    // Without a mode.
    "",
    "-h",
    "-help",
    "--help",
    "frobnicate",
    "-frobnicate",
    "-frobnicate ca",
    "ca -h",
    "ca -help",
    "keygen -h",
    "sign --help",
    "print -h",
    "verify -h",
    // Authorities.
    "ca",
    "ca -name ''",
    "ca -name new",
    "ca -name new -out-crt n.crt",
    "ca -name new -out-key n.key",
    "ca -name new -out-crt n.crt -out-key n.key",
    "ca --name new --out-crt n.crt --out-key n.key",
    "ca -name=new -out-crt=n.crt -out-key=n.key",
    "ca -name new -out-crt n.crt -out-key n.key -version 1",
    "ca -name new -out-crt n.crt -out-key n.key -version 2",
    "ca -name new -out-crt n.crt -out-key n.key -version 0",
    "ca -name new -out-crt n.crt -out-key n.key -version 3",
    "ca -name new -out-crt n.crt -out-key n.key -version -1",
    "ca -name new -out-crt n.crt -out-key n.key -version two",
    "ca -name new -out-crt n.crt -out-key n.key -version 0x2",
    "ca -name new -out-crt n.crt -out-key n.key -curve P256",
    "ca -name new -out-crt n.crt -out-key n.key -curve P256 -version 1",
    "ca -name new -out-crt n.crt -out-key n.key -curve X25519",
    "ca -name new -out-crt n.crt -out-key n.key -curve Curve25519",
    "ca -name new -out-crt n.crt -out-key n.key -curve CURVE25519",
    "ca -name new -out-crt n.crt -out-key n.key -curve p256",
    "ca -name new -out-crt n.crt -out-key n.key -curve ''",
    "ca -name new -out-crt n.crt -out-key n.key -duration 1h30m",
    "ca -name new -out-crt n.crt -out-key n.key -duration 1.5h",
    "ca -name new -out-crt n.crt -out-key n.key -duration 0",
    "ca -name new -out-crt n.crt -out-key n.key -duration -1h",
    "ca -name new -out-crt n.crt -out-key n.key -duration 1d",
    "ca -name new -out-crt n.crt -out-key n.key -duration 10",
    "ca -name new -out-crt n.crt -out-key n.key -duration ''",
    "ca -name new -out-crt n.crt -out-key n.key -duration 876000h",
    "ca -name new -out-crt n.crt -out-key n.key -groups a,b,c",
    "ca -name new -out-crt n.crt -out-key n.key -groups ,␣a␣,,b,a",
    "ca -name new -out-crt n.crt -out-key n.key -groups ''",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.0/8,fd00::/8",
    "ca -name new -out-crt n.crt -out-key n.key -networks ␣10.0.0.0/8,,␣fd00::/8␣",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.5/8",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.0",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.0/33",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.0/08",
    "ca -name new -out-crt n.crt -out-key n.key -networks 010.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -networks ::ffff:10.0.0.0/104",
    "ca -name new -out-crt n.crt -out-key n.key -networks 10.0.0.0/8,10.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -networks 0.0.0.0/0",
    "ca -name new -out-crt n.crt -out-key n.key -networks fe80::1%eth0/64",
    "ca -name new -out-crt n.crt -out-key n.key -ips 10.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -ips 10.0.0.0/8 -networks 11.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -unsafe-networks 10.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -subnets 10.0.0.0/8,fd00::/8",
    "ca -name new -out-crt n.crt -out-key n.key -version 1 -networks 10.0.0.0/8 -unsafe-networks 11.0.0.0/8",
    "ca -name new -out-crt n.crt -out-key n.key -version 1 -networks fd00::/8",
    "ca -name new -out-crt n.crt -out-key n.key -version 1 -unsafe-networks fd00::/8",
    "ca -name new -out-crt n.crt -out-key -",
    "ca -name new -out-crt - -out-key n.key",
    "ca -name new -out-crt - -out-key -",
    "ca -name new -out-crt n.crt -out-key ''",
    "ca -name new -out-crt '' -out-key n.key",
    "ca -name new -out-crt none/n.crt -out-key none/n.key",
    "ca -name new -out-crt n.crt -out-key n.key -out-qr n.png",
    "ca -name new -out-crt n.crt -out-key n.key -out-qr junk",
    "ca -name new -out-crt - -out-key n.key -out-qr -",
    "ca -name new -name newer -out-crt n.crt -out-key n.key",
    "ca -nmae new",
    "ca -name",
    "ca -name new -out-crt n.crt -out-key n.key more words",
    "ca -name new -out-crt n.crt -out-key n.key -encrypt",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-memory 64 -argon-parallelism 2",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt=true -argon-memory 64 -curve P256",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt=false",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt=T -argon-memory 64 -argon-iterations 2",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-memory 0",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-iterations 0",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-parallelism 0",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-parallelism 256",
    "NEBULA_CA_PASSPHRASE=open ca -name new -out-crt n.crt -out-key n.key -encrypt -argon-memory 4294967296",
    "ca -name new -out-crt n.crt -out-key n.key -encrypt=perhaps",
    "ca -name new -out-crt n.crt -out-key n.key -argon-memory many",
    "ca -name new -out-crt n.crt -out-key n.key -argon-memory 0",
    // Names at the limit of 253 bytes.
    "ca -name n*253 -out-crt n.crt -out-key n.key",
    "ca -name n*254 -out-crt n.crt -out-key n.key",
    "ca -name n*254 -version 1 -out-crt n.crt -out-key n.key",
    "sign -name n*253 -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key",
    "sign -name n*254 -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key",
    "sign -name n*254 -networks 10.0.0.9/16 -version 1 -out-crt n.crt -out-key n.key",
    "sign -name n*256 -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key",
    // Numbers and durations as Go's flag package takes them.
    "ca -name new -out-crt n.crt -out-key n.key -version 0_1",
    "ca -name new -out-crt n.crt -out-key n.key -version 0x_2",
    "ca -name new -out-crt n.crt -out-key n.key -version 0b1_0",
    "ca -name new -out-crt n.crt -out-key n.key -version 0O2",
    "ca -name new -out-crt n.crt -out-key n.key -version 02",
    "ca -name new -out-crt n.crt -out-key n.key -version +1",
    "ca -name new -out-crt n.crt -out-key n.key -version 1_",
    "ca -name new -out-crt n.crt -out-key n.key -version _1",
    "ca -name new -out-crt n.crt -out-key n.key -version 1__0",
    "ca -name new -out-crt n.crt -out-key n.key -version 1_000",
    "ca -name new -out-crt n.crt -out-key n.key -version 1e0",
    "ca -name new -out-crt n.crt -out-key n.key -version 08",
    "ca -name new -out-crt n.crt -out-key n.key -version 18446744073709551616",
    "sign -name new -networks 10.0.0.9/16 -version 4294967296",
    "ca -name new -out-crt n.crt -out-key n.key -argon-memory 1_000",
    "ca -name new -out-crt n.crt -out-key n.key -argon-iterations 0x10",
    "ca -name new -out-crt n.crt -out-key n.key -argon-parallelism +1",
    "ca -name new -out-crt n.crt -out-key n.key -duration +1h",
    "ca -name new -out-crt n.crt -out-key n.key -duration 1_000h",
    "ca -name new -out-crt n.crt -out-key n.key -duration 0x10h",
    "ca -name new -out-crt n.crt -out-key n.key -duration 1.h.5m",
    "ca -name new -out-crt n.crt -out-key n.key -duration 2562048h",
    "sign -name new -networks 10.0.0.9/+16",
    "sign -name new -networks 10.0.0.9/0x10",
    "sign -name new -networks 10.0.0.9/1_6",
    // Host keys.
    "keygen",
    "keygen -out-key n.key",
    "keygen -out-pub n.pub",
    "keygen -out-key n.key -out-pub n.pub",
    "keygen -out-key n.key -out-pub n.pub -curve P256",
    "keygen -out-key n.key -out-pub n.pub -curve 25519",
    "keygen -out-key n.key -out-pub n.pub -curve 448",
    "keygen -out-key junk -out-pub cut.crt",
    "keygen -out-key - -out-pub n.pub",
    "keygen -out-key n.key -out-pub -",
    "keygen -out-key - -out-pub -",
    "keygen -out-key folder -out-pub n.pub",
    // Hosts.
    "sign",
    "sign -name new",
    "sign -networks 10.0.0.9/16",
    "sign -name new -networks 10.0.0.9/16",
    "sign --name=new --networks=10.0.0.9/16",
    "sign -name new -ip 10.0.0.9/16",
    "sign -name new -ip 10.0.0.9/16 -networks 10.0.0.8/16",
    "sign -name new -networks 10.0.0.9/16,fd00::9/64",
    "sign -name new -networks fd00::9/64,10.0.0.9/16,10.0.0.8/16",
    "sign -name new -networks fd00::9/64",
    "sign -name new -networks 10.0.0.9",
    "sign -name new -networks 10.0.0.9/16,10.0.0.9/16",
    "sign -name new -networks 0.0.0.0/8",
    "sign -name new -networks ::/8",
    "sign -name new -networks ::ffff:10.0.0.9/112",
    "sign -name new -networks , ",
    "sign -name new -networks 10.0.0.9/16 -groups a,b",
    "sign -name new -networks 10.0.0.9/16 -groups ␣a␣,,b,",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks 192.168.0.0/24,192.168.1.0/24",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks 192.168.1.0/24,192.168.0.7/24",
    "sign -name new -networks 10.0.0.9/16 -subnets 192.168.0.0/24",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks 0.0.0.0/0",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks fd00::/64",
    "sign -name new -networks fd00::9/64 -unsafe-networks 10.0.0.0/8",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks nowhere",
    "sign -name new -networks 10.0.0.9/16 -duration 24h",
    "sign -name new -networks 10.0.0.9/16 -duration 1h5m7s",
    "sign -name new -networks 10.0.0.9/16 -duration 0",
    "sign -name new -networks 10.0.0.9/16 -duration -5h",
    "sign -name new -networks 10.0.0.9/16 -duration 9000h",
    "sign -name new -networks 10.0.0.9/16 -duration soon",
    "sign -name new -networks 10.0.0.9/16 -version 1",
    "sign -name new -networks 10.0.0.9/16 -version 2",
    "sign -name new -networks 10.0.0.9/16 -version 3",
    "sign -name new -networks 10.0.0.9/16,10.0.0.8/16 -version 1",
    "sign -name new -networks 10.0.0.9/16,fd00::9/64 -version 1",
    "sign -name new -networks fd00::9/64 -version 1",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks 192.168.1.0/24,192.168.0.7/24 -version 1",
    "sign -name new -networks 10.0.0.9/16 -unsafe-networks fd00::/64 -version 1",
    "sign -name new -networks 10.0.0.9/16 -version 1 -groups b,a,a",
    "sign -ca-crt v1.crt -ca-key v1.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt v1.crt -ca-key v1.key -name new -networks 10.0.0.9/16 -version 2",
    "sign -ca-crt p2.crt -ca-key p2.key -name new -networks 10.0.0.9/16,fd00::9/64",
    "sign -ca-crt p1.crt -ca-key p1.key -name new -networks 10.0.0.9/16 -groups x",
    "sign -ca-crt p1.crt -ca-key p2.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt ca.crt -ca-key p2.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt all.crt -ca-key ca.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt all.crt -ca-key v1.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt host.crt -ca-key host.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt ca.key -ca-key ca.crt -name new -networks 10.0.0.9/16",
    "sign -ca-crt missing.crt -name new -networks 10.0.0.9/16",
    "sign -ca-key missing.key -name new -networks 10.0.0.9/16",
    "sign -ca-key '' -name new -networks 10.0.0.9/16",
    "sign -ca-crt '' -name new -networks 10.0.0.9/16",
    "sign -ca-crt old.crt -ca-key old.key -name new -networks 10.0.0.9/16",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/16 -groups a",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/24 -groups a,b",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/15",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.2.0.9/16",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/16 -groups z",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/16 -unsafe-networks 192.168.3.0/24",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/16 -unsafe-networks 192.0.0.0/8",
    "sign -ca-crt limited.crt -ca-key limited.key -name new -networks 10.1.0.9/16 -duration 11h",
    "sign -ca-crt enc.crt -ca-key enc.key -name new -networks 10.0.0.9/16",
    "NEBULA_CA_PASSPHRASE=open sign -ca-crt enc.crt -ca-key enc.key -name new -networks 10.0.0.9/16",
    "NEBULA_CA_PASSPHRASE=shut sign -ca-crt enc.crt -ca-key enc.key -name new -networks 10.0.0.9/16",
    "NEBULA_CA_PASSPHRASE=open sign -ca-crt encp.crt -ca-key encp.key -name new -networks 10.0.0.9/16",
    "NEBULA_CA_PASSPHRASE=open sign -name new -networks 10.0.0.9/16",
    "sign -name new -networks 10.0.0.9/16 -in-pub k.pub",
    "sign -name new -networks 10.0.0.9/16 -in-pub k.pub -version 1",
    "sign -name new -networks 10.0.0.9/16 -in-pub kp.pub",
    "sign -name new -networks 10.0.0.9/16 -in-pub k.key",
    "sign -name new -networks 10.0.0.9/16 -in-pub junk",
    "sign -name new -networks 10.0.0.9/16 -in-pub missing.pub",
    "sign -name new -networks 10.0.0.9/16 -in-pub k.pub -out-key n.key",
    "sign -ca-crt p2.crt -ca-key p2.key -name new -networks 10.0.0.9/16 -in-pub kp.pub",
    "sign -name new -networks 10.0.0.9/16 -in-pub - < k.pub",
    "sign -name new -networks 10.0.0.9/16 -ca-key - < ca.key",
    "sign -name new -networks 10.0.0.9/16 -ca-crt - < ca.crt",
    "sign -name new -networks 10.0.0.9/16 -ca-key - -ca-crt - < all.crt",
    "sign -name new -networks 10.0.0.9/16 -ca-key - -in-pub - < ca.key",
    "sign -name new -networks 10.0.0.9/16 -out-crt - -out-key n.key",
    "sign -name new -networks 10.0.0.9/16 -out-crt n.crt -out-key -",
    "sign -name new -networks 10.0.0.9/16 -out-crt - -out-key -",
    "sign -name new -networks 10.0.0.9/16 -out-qr n.png",
    "sign -name new -networks 10.0.0.9/16 -out-qr - -out-crt -",
    "sign -name host -networks 10.0.0.9/16",
    "sign -name host -networks 10.0.0.9/16 -out-crt n.crt",
    "sign -name host -networks 10.0.0.9/16 -out-key n.key",
    "sign -name folder/new -networks 10.0.0.9/16",
    "sign -name none/new -networks 10.0.0.9/16",
    "sign -name new␣host -networks 10.0.0.9/16",
    "sign -name <&>\u{2028}ü\" -networks 10.0.0.9/16 -out-crt n.crt -out-key n.key",
    // Printing.
    "print",
    "print -path ''",
    "print -path missing.crt",
    "print -path ca.crt",
    "print -path v1.crt",
    "print -path p1.crt",
    "print -path p2.crt",
    "print -path host.crt",
    "print -path hostv1.crt",
    "print -path limited.crt",
    "print -path limitedv1.crt",
    "print -path both.crt",
    "print -path all.crt -json",
    "print -path ca.crt -json",
    "print -json -path host.crt",
    "print -json=true -path hostv1.crt",
    "print -json=false -path hostv1.crt",
    "print -json=1 -path p1.crt",
    "print -json=yes -path p1.crt",
    "print -json -path limitedv1.crt",
    "print -json -path escapes.crt",
    "print -path escapes.crt",
    "print -path ca.key",
    "print -path junk",
    "print -path empty",
    "print -path cut.crt",
    "print -path half.crt",
    "print -path half.crt -json",
    "print -path comment.crt -json",
    "print -path trailing.crt",
    "print -path folder",
    "print -path - < both.crt",
    "print -path - -json < hostv1.crt",
    "print -path ca.crt -out-qr n.png",
    "print -path both.crt -out-qr n.png -json",
    "print -path ca.crt -out-qr -",
    "print -path ca.crt -out-qr none/n.png",
    // Verifying.
    "verify",
    "verify -ca ca.crt",
    "verify -crt host.crt",
    "verify -ca ca.crt -crt host.crt",
    "verify -ca all.crt -crt host.crt",
    "verify -ca all.crt -crt hostv1.crt",
    "verify -ca all.crt -crt both.crt",
    "verify -ca ca.crt -crt both.crt",
    "verify -ca v1.crt -crt host.crt",
    "verify -ca p2.crt -crt host.crt",
    "verify -ca ca.crt -crt ca.crt",
    "verify -ca host.crt -crt host.crt",
    "verify -ca ca.crt -crt oldhost.crt",
    "verify -ca old.crt -crt host.crt",
    "verify -ca missing.crt -crt host.crt",
    "verify -ca ca.crt -crt missing.crt",
    "verify -ca junk -crt host.crt",
    "verify -ca empty -crt host.crt",
    "verify -ca ca.crt -crt junk",
    "verify -ca ca.crt -crt empty",
    "verify -ca ca.key -crt host.crt",
    "verify -ca ca.crt -crt host.key",
    "verify -ca comment.crt -crt host.crt",
    "verify -ca trailing.crt -crt host.crt",
    "verify -ca ca.crt -crt - < host.crt",
    "verify -ca - -crt host.crt < ca.crt",
    "verify -ca - -crt - < ca.crt",
];

fn ours() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_nebula-cert"))
}

fn peer(suite: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers").join(suite).join("usr/bin/nebula-cert");
    assert!(path.exists(), "{} is missing: run .ci/go-nebula", path.display());
    path
}

fn newest() -> PathBuf {
    peer("sid")
}

fn run(program: &Path, folder: &Path, line: &str) -> Output {
    let (line, input) = match line.split_once(" < ") {
        Some((line, input)) => (line, Stdio::from(File::open(folder.join(input)).unwrap())),
        None => (line, Stdio::null()),
    };
    let mut command = Command::new(program);
    command.current_dir(folder).env_remove("NEBULA_CA_PASSPHRASE").stdin(input);
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        match word.split_once('=') {
            Some((name, value)) if name == "NEBULA_CA_PASSPHRASE" => command.env(name, value),
            _ => match word.strip_prefix("n*").and_then(|count| count.parse().ok()) {
                Some(count) => command.arg("n".repeat(count)),
                None => command.arg(word.replace("''", "").replace('␣', " ")),
            },
        };
    }
    command.output().unwrap()
}

fn succeeds(program: &Path, folder: &Path, line: &str) -> String {
    let output = run(program, folder, line);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {line}: {errors}", program.display());
    String::from_utf8(output.stdout).unwrap()
}

/// Creates a directory with every kind of file that the command lines name, made by Go.
fn stock() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let go = |line: &str| drop(succeeds(&newest(), folder.path(), line));
    go("ca -name old -duration 1s -out-crt old.crt -out-key old.key");
    go("ca -name ca");
    go("sign -name oldhost -networks 10.0.0.3/16 -duration 1s");
    go("ca -name v1 -version 1 -out-crt v1.crt -out-key v1.key");
    go("ca -name p2 -curve P256 -out-crt p2.crt -out-key p2.key");
    go("ca -name p1 -curve P256 -version 1 -out-crt p1.crt -out-key p1.key");
    let limits = "-groups a,b -networks 10.1.0.0/16 -unsafe-networks 192.168.0.0/16 -duration 10h";
    go(&format!("ca -name limited {limits} -out-crt limited.crt -out-key limited.key"));
    go(&format!("ca -name limitedv1 -version 1 {limits} -out-crt limitedv1.crt -out-key limitedv1.key"));
    let encrypt = "-encrypt -argon-memory 64 -argon-iterations 1 -argon-parallelism 2";
    go(&format!("NEBULA_CA_PASSPHRASE=open ca -name enc {encrypt} -out-crt enc.crt -out-key enc.key"));
    go(&format!("NEBULA_CA_PASSPHRASE=open ca -name encp -curve P256 {encrypt} -out-crt encp.crt -out-key encp.key"));
    go("sign -name host -networks 10.0.0.1/16,fd00::1/64 -groups a,b -unsafe-networks 192.168.0.0/24,fd01::/64");
    go(
        "sign -name hostv1 -version 1 -ca-crt v1.crt -ca-key v1.key -networks 10.0.0.1/16 -unsafe-networks 192.168.0.0/24",
    );
    go("sign -name <&>\u{2028}ü\" -networks 10.0.0.2/16 -groups <b>,\\x -out-crt escapes.crt -out-key escapes.key");
    go("keygen -out-key k.key -out-pub k.pub");
    go("keygen -curve P256 -out-key kp.key -out-pub kp.pub");
    let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let write = |name: &str, text: String| fs::write(folder.path().join(name), text).unwrap();
    write("both.crt", text("host.crt") + &text("hostv1.crt"));
    write("all.crt", ["ca.crt", "v1.crt", "p2.crt", "p1.crt"].map(text).concat());
    write("comment.crt", format!("# ours\n\n{}", text("ca.crt")));
    write("trailing.crt", format!("{}the end\n", text("ca.crt")));
    write("half.crt", text("ca.crt") + &text("host.crt").replacen('\n', "\n!", 1));
    write("cut.crt", text("ca.crt").chars().take(80).collect());
    write("junk", "junk\n".into());
    write("empty", String::new());
    fs::create_dir(folder.path().join("folder")).unwrap();
    // Wait until the short-lived certificates have expired.
    std::thread::sleep(Duration::from_millis(2_100));
    folder
}

/// Copies the stock, to run one command line in.
fn twin(stock: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(stock).unwrap().map(Result::unwrap) {
        let to = folder.path().join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => fs::create_dir(to).unwrap(),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
    folder
}

/// What a command line did, without random parts.
#[derive(Debug)]
struct Outcome {
    /// First line of standard error, if it failed.
    message: String,
    effect: Effect,
}

#[derive(Debug, PartialEq)]
struct Effect {
    code: Option<i32>,
    /// Whether the help of the mode was printed.
    help: bool,
    output: Contents,
    /// Files created or changed, with their modes.
    files: BTreeMap<PathBuf, (u32, Contents)>,
}

#[derive(Debug, PartialEq)]
enum Contents {
    Certificates(Vec<Shape>),
    /// Label and length of a key.
    Key(String, usize),
    Image,
    Text(String),
}

impl Contents {
    fn read(bytes: &[u8]) -> Self {
        if let Ok(certificates) = Certificate::bundle_from_pem(bytes) {
            return Self::Certificates(certificates.iter().map(Shape::of).collect());
        }
        if bytes.starts_with(b"\x89PNG") {
            return Self::Image;
        }
        let text = String::from_utf8_lossy(bytes).into_owned();
        match text.lines().next() {
            Some(label) if label.starts_with("-----BEGIN") => Self::Key(label.to_owned(), text.len()),
            _ => Self::Text(text),
        }
    }
}

/// A certificate without the parts that differ in every run.
#[derive(Debug)]
struct Shape {
    json: Value,
    not_before: i64,
    not_after: i64,
}

impl Shape {
    fn of(certificate: &Certificate) -> Self {
        let mut json = certificate.to_json();
        for random in ["fingerprint", "publicKey", "signature"] {
            json.as_object_mut().unwrap().remove(random);
        }
        let details = json["details"].as_object_mut().unwrap();
        for random in ["publicKey", "notBefore", "notAfter"] {
            details.remove(random);
        }
        Self { json, not_before: certificate.not_before(), not_after: certificate.not_after() }
    }
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        // The two runs follow each other, on a machine that may be busy.
        let near = |one: i64, other: i64| one.abs_diff(other) <= 60;
        self.json == other.json && near(self.not_before, other.not_before) && near(self.not_after, other.not_after)
    }
}

/// Normalizes a message: removes text that comes from the standard libraries, and a typing error in Go.
fn plain(message: &str) -> String {
    let words = ["Error: ", "Enter passphrase: ", "open ", "read ", "\"", " (os error 2)", " (os error 21)"];
    let message = words.iter().fold(message.to_owned(), |message, word| message.replace(word, ""));
    message.replace("must be be", "must be").replace("No such", "no such").replace("Is a", "is a")
}

fn files(folder: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for folder in [folder.to_owned(), folder.join("folder")] {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let metadata = entry.metadata().unwrap();
            let contents = if metadata.is_dir() { Vec::new() } else { fs::read(entry.path()).unwrap() };
            let name = entry.path().strip_prefix(&folder).unwrap().to_owned();
            found.insert(name, (metadata.permissions().mode() & 0o7777, contents));
        }
    }
    found
}

fn outcome(program: &Path, folder: &Path, line: &str) -> Outcome {
    let before = files(folder);
    let output = run(program, folder, line);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code();
    let is_new = |name: &PathBuf, file: &(u32, Vec<u8>)| before.get(name) != Some(file);
    let files = files(folder).into_iter().filter(|(name, file)| is_new(name, file));
    Outcome {
        message: if code == Some(0) { String::new() } else { plain(errors.lines().next().unwrap_or_default()) },
        effect: Effect {
            code,
            help: errors.contains("Usage"),
            output: Contents::read(&output.stdout),
            files: files.map(|(name, (mode, bytes))| (name, (mode, Contents::read(&bytes)))).collect(),
        },
    }
}

#[test]
#[ignore = "needs the Go peers in target/peers"]
fn the_same_command_line_does_what_the_go_tool_does() {
    let stock = stock();
    let mut failures = Vec::new();
    for line in LINES {
        let (mine, theirs) = (twin(stock.path()), twin(stock.path()));
        let (ours, go) = (outcome(&ours(), mine.path(), line), outcome(&newest(), theirs.path(), line));
        // Our messages begin like Go's and add details.
        let same_message = ours.message.starts_with(&go.message) && ours.message.is_empty() == go.message.is_empty();
        let same = same_message && ours.effect == go.effect;
        if same == DELIBERATE.iter().any(|(deliberate, _)| deliberate == line) {
            failures.push(format!("== {line}\n ours {ours:?}\n go   {go:?}"));
        }
    }
    assert!(failures.is_empty(), "{} of {}\n{}", failures.len(), LINES.len(), failures.join("\n"));
}

/// A tool and the kinds of certificates that it supports.
struct Tool {
    name: &'static str,
    program: PathBuf,
    kinds: &'static [(Version, Curve)],
}

const KINDS: &[(Version, Curve)] = &[
    (Version::V1, Curve::Curve25519),
    (Version::V1, Curve::P256),
    (Version::V2, Curve::Curve25519),
    (Version::V2, Curve::P256),
];

fn tools() -> Vec<Tool> {
    vec![
        Tool { name: "ours", program: ours(), kinds: KINDS },
        Tool { name: "1.6.1", program: peer("bookworm"), kinds: &KINDS[..1] },
        Tool { name: "1.9.3", program: peer("trixie"), kinds: &KINDS[..2] },
        Tool { name: "1.11.0", program: newest(), kinds: KINDS },
    ]
}

#[test]
#[ignore = "needs the Go peers in target/peers"]
fn what_any_tool_makes_every_other_signs_with_and_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for (at, kind @ (version, curve)) in KINDS.iter().enumerate() {
        let tools: Vec<Tool> = tools().into_iter().filter(|tool| tool.kinds.contains(kind)).collect();
        for maker in &tools {
            let ca = format!("{}-{at}", maker.name);
            // Old releases know neither flag and support only one curve or version.
            let curve = if *curve == Curve::P256 { "-curve P256" } else { "" };
            let version = if KINDS.iter().all(|kind| maker.kinds.contains(kind)) { version.number() } else { 0 };
            let version = if version == 0 { String::new() } else { format!("-version {version}") };
            let limits = "-ips 10.0.0.0/8 -subnets 192.168.0.0/16 -groups a,b";
            let files = format!("-out-crt {ca}.crt -out-key {ca}.key");
            succeeds(&maker.program, path, &format!("ca -name {ca} {limits} {curve} {version} {files}"));
            for signer in &tools {
                let host = format!("{}-by-{ca}", signer.name);
                let files = format!("-ca-crt {ca}.crt -ca-key {ca}.key -out-crt {host}.crt -out-key {host}.key");
                let claims = "-ip 10.1.2.3/16 -subnets 192.168.1.0/24 -groups b";
                succeeds(&signer.program, path, &format!("sign -name {host} {claims} {files}"));
                for verifier in &tools {
                    succeeds(&verifier.program, path, &format!("verify -ca {ca}.crt -crt {host}.crt"));
                }
                let go = succeeds(&newest(), path, &format!("print -json -path {host}.crt"));
                assert_eq!(succeeds(&ours(), path, &format!("print -json -path {host}.crt")), go);
            }
        }
    }
}

#[test]
#[ignore = "needs the Go peers in target/peers"]
fn an_encrypted_key_of_ours_opens_in_go() {
    let folder = tempfile::tempdir().unwrap();
    for curve in ["25519", "P256"] {
        let files = format!("-out-crt {curve}.crt -out-key {curve}.key");
        let cost = "-argon-memory 128 -argon-iterations 2 -argon-parallelism 3";
        let ca = format!("NEBULA_CA_PASSPHRASE=open ca -name e -encrypt {cost} -curve {curve} {files}");
        succeeds(&ours(), folder.path(), &ca);
        let files = format!("-ca-crt {curve}.crt -ca-key {curve}.key");
        let sign = format!("NEBULA_CA_PASSPHRASE=open sign -name h{curve} -networks 10.0.0.1/8 {files}");
        succeeds(&newest(), folder.path(), &sign);
        succeeds(&ours(), folder.path(), &format!("verify -ca {curve}.crt -crt h{curve}.crt"));
    }
}

#[test]
#[ignore = "needs the Go peers in target/peers"]
fn whatever_we_sign_go_accepts_and_prints_alike() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = TestRunner::deterministic();
    let mut signed = 0;
    for &(version, curve) in KINDS {
        let key = SigningKey::generate(curve).unwrap();
        let ca = template(version, curve, vec![]).self_sign(&key).unwrap();
        let mut bundle = String::new();
        while bundle.matches("BEGIN").count() < CERTIFICATES {
            let template = templates(curve).new_tree(&mut runner).unwrap().current();
            // Not every template can be signed; ours must refuse those that cannot.
            if let Ok(certificate) = template.sign(&ca, &key) {
                bundle += &certificate.to_pem();
                signed += 1;
            }
        }
        fs::write(folder.path().join("ca"), ca.to_pem()).unwrap();
        fs::write(folder.path().join("bundle"), bundle).unwrap();
        succeeds(&newest(), folder.path(), "verify -ca ca -crt bundle");
        let go = succeeds(&newest(), folder.path(), "print -json -path bundle");
        // The same document: ours escapes what Go prints as it is, such as controls and bidirectional characters.
        assert_eq!(succeeds(&ours(), folder.path(), "print -json -path bundle"), visible_json(&go));
    }
    assert_eq!(signed, KINDS.len() * CERTIFICATES);
}

const CERTIFICATES: usize = 40;
// Valid from 2001 to 2099, so at any time when the test runs.
const VALID: (i64, i64) = (1_000_000_000, 4_100_000_000);

fn template(version: Version, curve: Curve, public_key: Vec<u8>) -> Template {
    Template { version, curve, public_key, ..Template::new("ca", VALID.0..=VALID.1) }
}

fn templates(curve: Curve) -> impl Strategy<Value = Template> {
    let network = prop_oneof![
        (any::<[u8; 4]>(), 0..=32_u8).prop_map(|(address, length)| IpNet::new(address.into(), length).unwrap()),
        (any::<[u8; 16]>(), 0..=128_u8).prop_map(|(address, length)| IpNet::new(address.into(), length).unwrap()),
    ];
    let networks = |count| proptest::collection::vec(network.clone(), count);
    let text = || "\\PC{1,20}|[a-z0-9.-]{1,60}|[<>&\"\\\\/\u{2028}\u{2029}\u{7f}\u{fffd}]{1,8}";
    let groups = proptest::collection::vec(text(), 0..5);
    let version = prop_oneof![Just(Version::V1), Just(Version::V2)];
    (version, text(), networks(1..4), networks(0..4), groups, 0..1_000_i64).prop_map(
        move |(version, name, networks, unsafe_networks, groups, later)| Template {
            name,
            networks,
            unsafe_networks,
            groups,
            not_before: VALID.0 + later,
            not_after: VALID.1 - later,
            ..template(version, curve, PrivateKey::generate(curve).unwrap().public_key())
        },
    )
}
