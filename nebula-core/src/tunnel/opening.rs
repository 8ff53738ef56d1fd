//! The half of a session that opens what the peer sends, as a value.

use zeroize::Zeroizing;

use super::ReplayRecord;
use super::cipher::Cipher;

/// What another process needs to open what the peer sends in a session. Opening uses up no nonce, so two processes may
/// have it; they must not deliver the same datagram twice, hence the replay record. It holds nothing to seal with.
pub(crate) struct Opening {
    /// AEAD.
    pub(crate) cipher: Cipher,
    /// Key of what the peer sends.
    pub(crate) key: Zeroizing<[u8; 32]>,
    /// Which counters of the peer were accepted.
    pub(crate) replay: ReplayRecord,
}

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opening(redacted)")
    }
}
