//! The randomness of one node.

use zeroize::Zeroizing;

/// Seeds the random generator of one node.
///
/// Everything random of the node derives from it, its ephemeral handshake keys included: whoever knows the seed can
/// read the traffic of the node, and two nodes (or two runs of one node) with the same seed give their secrets away.
/// So it comes from the operating system, is used once, is erased when dropped, and is never shown.
pub struct Seed(Zeroizing<[u8; 32]>);

impl Seed {
    /// A fresh seed from the operating system. Blocks only while the system has no randomness yet, early at boot.
    ///
    /// # Errors
    /// Returns an error if the operating system gives no random bytes.
    pub fn from_os() -> Result<Self, NoRandomness> {
        let mut bytes = Zeroizing::new([0; 32]);
        // Not from the generator of the cryptographic library: that one gathers entropy of its own first, which takes
        // longer than the rest of a node's start and leaves memory behind.
        getrandom::fill(&mut *bytes).map_err(|error| NoRandomness(std::io::Error::other(error.to_string())))?;
        Ok(Self(bytes))
    }

    /// A known seed, for tests that must repeat. A node that has it keeps no secrets.
    #[cfg(any(test, feature = "simulator"))]
    #[must_use]
    pub fn predictable(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seed(redacted)")
    }
}

/// The operating system gave no random bytes.
#[derive(Debug, thiserror::Error)]
#[error("cannot get random bytes from the operating system (getrandom)")]
pub struct NoRandomness(#[source] std::io::Error);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_the_system_differ_and_are_not_shown() {
        let (a, b) = (Seed::from_os().unwrap(), Seed::from_os().unwrap());
        assert_ne!(a.bytes(), b.bytes());
        assert_ne!(a.bytes(), &[0; 32]);
        assert_eq!(format!("{a:?}"), "Seed(redacted)");
    }
}
