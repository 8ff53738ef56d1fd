//! Loom models: no thread is in a turn while the gate is held, and none sleeps through its opening or its end.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::*;
use crate::models::check;
use crate::sync::atomic::AtomicBool;

fn thread_of(gate: &Arc<Gate>, is_in_turn: &Arc<AtomicBool>, turns: usize) -> thread::JoinHandle<()> {
    let (pass, is_in_turn) = (gate.admit(), Arc::clone(is_in_turn));
    thread::spawn(move || {
        for _ in 0..turns {
            if !pass.wait_until_open() {
                return;
            }
            is_in_turn.store(true, Ordering::Relaxed);
            is_in_turn.store(false, Ordering::Relaxed);
        }
    })
}

#[test]
fn nothing_moves_while_the_gate_is_held_and_all_go_on_when_it_opens() {
    check(3, || {
        let gate = Arc::new(Gate::new().unwrap());
        let in_turn = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let threads = [0, 1].map(|nth| thread_of(&gate, &in_turn[nth], 1));
        assert!(gate.hold(Duration::from_secs(600)));
        assert!(in_turn.iter().all(|turn| !turn.load(Ordering::Relaxed)));
        gate.open();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn held_threads_end_with_the_gate() {
    check(3, || {
        let gate = Arc::new(Gate::new().unwrap());
        let in_turn = Arc::new(AtomicBool::new(false));
        let thread = thread_of(&gate, &in_turn, 2);
        assert!(gate.hold(Duration::from_secs(600)));
        gate.end();
        thread.join().unwrap();
    });
}
