//! Flows already allowed: sharded, with expiry and a hard cap.
