//! When to punch, and to whom (RFC 5128).
