//! Sliding bitmap against replays (RFC 6479): checked and committed by run.

/// Accepted counters of one tunnel.
#[derive(Debug)]
pub struct ReplayWindow {}

impl ReplayWindow {
    /// Counters this wide below the highest are still accepted once.
    pub const LEN: u64 = 8192;
    /// A window that has seen counters 0, 1 and 2 (the handshake).
    #[must_use]
    pub fn new() -> Self {
        Self {}
    }
    /// Whether `counter` could be new. Before decryption.
    #[must_use]
    pub fn check(&self, _counter: u64) -> bool {
        unimplemented!()
    }
    /// Records `counter`; false if another lane was first or it is too old. After authentication.
    pub fn commit(&mut self, _counter: u64) -> bool {
        unimplemented!()
    }
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}
