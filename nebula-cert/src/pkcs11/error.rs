//! One variant per reason why a key in a token cannot be used.

use std::path::PathBuf;

/// Why the key that a `pkcs11:` URI names cannot be used. Messages begin with the part of the URI that is at fault, if
/// one is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    // The text of the URI.
    /// The URI has another scheme.
    #[error("a PKCS#11 URI begins with pkcs11:, for example pkcs11:token=ca;object=key?module-path=/usr/lib/module.so")]
    Scheme,
    /// The text is longer than any real URI.
    #[error("the PKCS#11 URI is longer than {limit} bytes")]
    TooLong {
        /// Maximum length in bytes.
        limit: usize,
    },
    /// A part is misspelt or not supported by this program.
    #[error(
        "{}: no such part of a PKCS#11 URI is known here; before the question mark: token, manufacturer, model, \
         serial, slot-id, object, id, type; after it: module-path, pin-source, pin-value", .name.escape_debug()
    )]
    UnknownPart {
        /// Name of the part.
        name: String,
    },
    /// A part occurs twice.
    #[error("{name}: given twice in the PKCS#11 URI")]
    RepeatedPart {
        /// Name of the part.
        name: &'static str,
    },
    /// The value of a part is invalid.
    #[error("{name}: {what}")]
    BadPart {
        /// Name of the part.
        name: &'static str,
        /// What is wrong.
        what: &'static str,
    },

    // What the URI refers to.
    /// The file with the PIN cannot be read.
    #[error("pin-source: unable to read {}: {reason}", path.display())]
    PinFile {
        /// Which file.
        path: PathBuf,
        /// The system's error message.
        reason: String,
    },
    /// Modules are shared libraries, which a static program cannot load.
    #[error("module-path: this program is linked statically and cannot load PKCS#11 modules")]
    StaticProgram,
    /// The module is missing or is not a PKCS#11 module.
    #[error("module-path: unable to use {}: {reason}", path.display())]
    Module {
        /// Which file.
        path: PathBuf,
        /// The error message of the system or the module.
        reason: String,
    },
    /// No token of the module matches this part.
    #[error("{part}: no token matches {}; the module has {present}", .value.escape_debug())]
    NoToken {
        /// The part that ruled out the last token.
        part: &'static str,
        /// Value of the part.
        value: String,
        /// The tokens that the module has.
        present: String,
    },
    /// The module shows no initialized token.
    #[error("module-path: the module shows no initialized token")]
    NoTokens,
    /// More than one token matches.
    #[error("token: several tokens match, name one by token, serial or slot-id; the module has {present}")]
    SeveralTokens {
        /// The tokens that the module has.
        present: String,
    },
    /// The PIN is wrong.
    #[error("{part}: the token refused the PIN; too many wrong ones lock it")]
    PinRefused {
        /// Where the PIN came from.
        part: &'static str,
    },
    /// The token is locked and accepts no PIN.
    #[error("{part}: the PIN of the token is locked after too many wrong ones; its security officer can set a new one")]
    PinLocked {
        /// Where the PIN came from.
        part: &'static str,
    },
    /// No private key matches this name or id.
    #[error("{part}: the token shows no private key with {part}={}{}", .value.escape_debug(), hint(*.logged_in))]
    NoKey {
        /// The part that ruled out the last key.
        part: &'static str,
        /// Value of the part, an id as hexadecimal digits.
        value: String,
        /// Whether a PIN was given.
        logged_in: bool,
    },
    /// The token shows no private key at all.
    #[error("object: the token shows no private key{}", hint(*.logged_in))]
    NoKeys {
        /// Whether a PIN was given.
        logged_in: bool,
    },
    /// More than one private key matches.
    #[error("object: {count} private keys of the token match, name one by object or id")]
    SeveralKeys {
        /// Number of matches.
        count: usize,
    },
    /// The key is RSA, on another curve, or damaged.
    #[error("object: the key in the token is neither a P-256 nor an Ed25519 key")]
    KeyKind,
    /// There is a private key, but its public key cannot be found.
    #[error("object: the token holds no public key that belongs to the private key (same id)")]
    NoPublicKey,

    // Using the key.
    /// The token failed or refused.
    #[error("the token refused to {action}: {reason}")]
    Refused {
        /// What the token was asked to do.
        action: &'static str,
        /// PKCS#11 function and return code.
        reason: String,
    },
}

fn hint(logged_in: bool) -> &'static str {
    if logged_in { "" } else { "; without pin-source or pin-value it may show public objects only" }
}
