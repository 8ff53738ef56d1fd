//! One variant per reason that a key in a token cannot be used.

use std::path::PathBuf;

/// Why a `pkcs11:` URI does not lead to a key. Each message begins with the part of the URI that is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    // The text of the URI.
    /// Another scheme.
    #[error("a PKCS#11 URI begins with pkcs11:, for example pkcs11:token=ca;object=key?module-path=/usr/lib/module.so")]
    Scheme,
    /// More text than any real URI has.
    #[error("the PKCS#11 URI is longer than {limit} bytes")]
    TooLong {
        /// Bytes allowed.
        limit: usize,
    },
    /// A part that is misspelt, or that selects by something this program does not look at.
    #[error(
        "{}: no such part of a PKCS#11 URI is known here; before the question mark: token, manufacturer, model, \
         serial, slot-id, object, id, type; after it: module-path, pin-source, pin-value", .name.escape_debug()
    )]
    UnknownPart {
        /// Its name.
        name: String,
    },
    /// The same part twice.
    #[error("{name}: given twice in the PKCS#11 URI")]
    RepeatedPart {
        /// Its name.
        name: &'static str,
    },
    /// A part whose value cannot be read.
    #[error("{name}: {what}")]
    BadPart {
        /// Its name.
        name: &'static str,
        /// The fault.
        what: &'static str,
    },

    // What the URI leads to.
    /// The file with the PIN cannot be read.
    #[error("pin-source: unable to read {}: {reason}", path.display())]
    PinFile {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Modules are shared libraries, which a static program cannot load.
    #[error("module-path: this program is linked statically and cannot load PKCS#11 modules")]
    StaticProgram,
    /// The module is missing or is no PKCS#11 module.
    #[error("module-path: unable to use {}: {reason}", path.display())]
    Module {
        /// Which file.
        path: PathBuf,
        /// What the system or the module said.
        reason: String,
    },
    /// No token of the module has this property.
    #[error("{part}: no token matches {}; the module has {present}", .value.escape_debug())]
    NoToken {
        /// The part that rules out the last token.
        part: &'static str,
        /// Its value.
        value: String,
        /// The tokens there are.
        present: String,
    },
    /// The module shows no initialized token.
    #[error("module-path: the module shows no initialized token")]
    NoTokens,
    /// More than one token fits.
    #[error("token: several tokens match, name one by token, serial or slot-id; the module has {present}")]
    SeveralTokens {
        /// The tokens there are.
        present: String,
    },
    /// The PIN is wrong.
    #[error("{part}: the token refused the PIN; too many wrong ones lock it")]
    PinRefused {
        /// Where the PIN came from.
        part: &'static str,
    },
    /// The token takes no PIN any more.
    #[error("{part}: the PIN of the token is locked after too many wrong ones; its security officer can set a new one")]
    PinLocked {
        /// Where the PIN came from.
        part: &'static str,
    },
    /// No private key has this name or id.
    #[error("{part}: the token shows no private key with {part}={}{}", .value.escape_debug(), hint(*.logged_in))]
    NoKey {
        /// The part that rules out the last key.
        part: &'static str,
        /// Its value, ids as hexadecimal digits.
        value: String,
        /// Whether a PIN was given.
        logged_in: bool,
    },
    /// No private key at all.
    #[error("object: the token shows no private key{}", hint(*.logged_in))]
    NoKeys {
        /// Whether a PIN was given.
        logged_in: bool,
    },
    /// More than one private key fits.
    #[error("object: {count} private keys of the token match, name one by object or id")]
    SeveralKeys {
        /// How many.
        count: usize,
    },
    /// RSA, another curve, or a damaged object.
    #[error("object: the key in the token is neither a P-256 nor an Ed25519 key")]
    KeyKind,
    /// The private key is there, but nothing says what its public half is.
    #[error("object: the token holds no public key that belongs to the private key (same id)")]
    NoPublicKey,

    // While it is used.
    /// The token failed or refused.
    #[error("the token refused to {action}: {reason}")]
    Refused {
        /// What it should have done.
        action: &'static str,
        /// PKCS#11 function and return code.
        reason: String,
    },
}

fn hint(logged_in: bool) -> &'static str {
    if logged_in { "" } else { "; without pin-source or pin-value it may show public objects only" }
}
