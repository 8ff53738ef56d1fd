//! Many nodes on one virtual clock.
