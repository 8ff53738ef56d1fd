//! Handshakes under way: retries, packets that wait.
