//! The passphrase of a CA key.

use std::os::unix::ffi::OsStringExt as _;

use zeroize::Zeroizing;

/// From the environment; nothing if it is unset or empty.
pub(crate) fn from_environment() -> Option<Zeroizing<Vec<u8>>> {
    let passphrase = Zeroizing::new(std::env::var_os(VARIABLE)?.into_vec());
    (!passphrase.is_empty()).then_some(passphrase)
}

pub(crate) const VARIABLE: &str = "NEBULA_CA_PASSPHRASE";
