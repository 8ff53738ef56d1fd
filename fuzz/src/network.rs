//! Runs a list of operations on a simulated network.

use nebula_core::simulator::Exercise;

/// Each pair of bytes is an operation. Nothing may panic, and the invariants of the random-operations test must hold.
pub fn node(data: &[u8]) {
    let mut exercise = Exercise::new(7);
    let outcome = data.chunks_exact(2).take(64).try_for_each(|pair| {
        let operation = exercise.decode([pair[0], pair[1]]);
        exercise.apply(operation)
    });
    if let Err(error) = outcome.and_then(|()| exercise.finish()) {
        panic!("{error}\n{}", exercise.net().diagram());
    }
}
