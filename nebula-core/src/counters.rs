//! Plain numbers, one set per lane, one counter per drop reason and message kind.

// Owner: forward. One writer per lane, read by anybody: relaxed atomics.
