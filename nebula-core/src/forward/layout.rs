//! Where the parts of a packet are, as far as cutting and joining need it.
