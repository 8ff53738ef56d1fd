//! Handshake payload, lighthouse and relay-control messages (protobuf).
