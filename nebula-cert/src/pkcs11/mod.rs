//! CA keys in hardware tokens, used through the vendor's PKCS#11 module (feature `pkcs11`).
//!
//! A module is a shared library, so this works in dynamically linked programs only; a static one gets
//! [`TokenError::StaticProgram`]. PINs are zeroized and never part of an error or of `Debug` output.
//!
//! ```no_run
//! use nebula_cert::pkcs11::{TokenKey, Uri};
//! use nebula_cert::{Certificate, Signer as _, Template};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let uri = "pkcs11:token=ca;object=network?pin-source=file:/etc/ca.pin&module-path=/usr/lib/softhsm/libsofthsm2.so";
//! let key = TokenKey::open(&uri.parse::<Uri>()?)?;
//! let ca = Template {
//!     curve: key.curve(),
//!     ..Template::new("my network", 1_800_000_000..=1_900_000_000)
//! }
//! .self_sign(&key)?;
//! # Ok(())
//! # }
//! ```

mod error;
mod point;
#[cfg(feature = "pkcs11")]
mod token;
mod uri;

pub use error::TokenError;
#[cfg(feature = "pkcs11")]
pub use token::TokenKey;
pub use uri::Uri;
