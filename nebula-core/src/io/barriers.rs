//! Barriers between threads that the kernel provides (membarrier).

/// Registers this process for the barriers that the tables of the data path need. To register a process that has several
/// threads the kernel waits until all processors have passed a quiet state, which takes some ten milliseconds: call it before
/// threads are started. Registering again costs nothing.
pub fn register_barriers() {
    // Whoever makes the first table registers; there is no other way to ask for it.
    drop(papaya::HashMap::<(), ()>::new());
}
