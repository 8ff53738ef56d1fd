//! `-pkcs11`: keys in hardware tokens, in builds that can load a token's module.

use nebula_cert::Signer;
use zeroize::Zeroizing;

/// Every build knows the flag: a build that ignored it would put a key where nobody expects it.
#[derive(clap::Args)]
pub(crate) struct Hardware {
    /// PKCS#11 URI of an existing key in a token, such as
    /// pkcs11:token=ca;object=key?pin-source=file:/etc/ca.pin&module-path=/usr/lib/module.so; nothing is written to a
    /// key file then. Others on this machine can see a pin-value. Needs a build with the feature pkcs11.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "URI")]
    pkcs11: Zeroizing<String>,
}

impl Hardware {
    /// Whether the key is in a token; fails if this build cannot use one.
    pub(crate) fn is_wanted(&self) -> anyhow::Result<bool> {
        if !self.pkcs11.is_empty() && !CAN_LOAD_MODULES {
            anyhow::bail!("{WITHOUT}");
        }
        Ok(!self.pkcs11.is_empty())
    }

    /// Opens the key as a signer.
    #[cfg(feature = "pkcs11")]
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn Signer>> {
        use anyhow::Context as _;
        use nebula_cert::pkcs11::{TokenKey, Uri};

        let open = || TokenKey::open(&self.pkcs11.parse::<Uri>()?);
        Ok(Box::new(open().context("error while creating PKCS#11 client")?))
    }

    /// Never reached, because [`Hardware::is_wanted`] refuses.
    #[cfg(not(feature = "pkcs11"))]
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn Signer>> {
        anyhow::bail!("{WITHOUT}")
    }
}

/// A command line argument for an error message, without any PIN.
pub(crate) fn shown(word: &str) -> String {
    match word.find("pin-value") {
        Some(at) => format!("{}pin-value=...", &word[..at]),
        None => word.to_owned(),
    }
}

const CAN_LOAD_MODULES: bool = cfg!(all(feature = "pkcs11", not(target_feature = "crt-static")));
const WITHOUT: &str = "-pkcs11 is not supported by this static build, which cannot load the module of a token; the build \
                       that can is made from the source with: RUSTFLAGS=-Ctarget-feature=-crt-static cargo build \
                       --release -p nebula-cert --features cli,pkcs11 --target-dir target/dynamic";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_in_a_misplaced_word_is_not_shown() {
        assert_eq!(shown("pkcs11:token=a?pin-value=1234&module-path=/m"), "pkcs11:token=a?pin-value=...");
        assert_eq!(shown("words"), "words");
    }
}
