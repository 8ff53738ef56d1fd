//! Lanes that take turns on one tunnel, traced by `benches/shared-lines`, which counts the cache lines that more than
//! one lane writes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use nebula_benches::{Host, Stream, network, tcp_super_packet, udp};
use nebula_core::forward::{Offload, Received};
use nebula_core::{Lane, Verdict};

const LANES: usize = 4;
/// Untraced turns that fill caches and buffers.
const WARM_UP: usize = 3;
const TURNS: usize = WARM_UP + 4;

/// A write to one of these tells the tracer that the turn of the lane with this index begins; a write to the last one,
/// that it ends.
static MARKS: [AtomicU64; LANES + 1] = [const { AtomicU64::new(0) }; LANES + 1];

/// Runs `work` on one thread per lane. The threads take turns, so that the trace of a turn contains one lane only.
fn take_turns<T: Send>(states: Vec<T>, work: impl Fn(&mut T, usize) + Sync) {
    let (order, work) = (&Barrier::new(LANES), &work);
    std::thread::scope(|scope| {
        for (lane, mut state) in states.into_iter().enumerate() {
            scope.spawn(move || {
                for turn in 0..TURNS {
                    for other in 0..LANES {
                        order.wait();
                        if other != lane {
                            continue;
                        }
                        // Let the other threads block on the barrier first, because their writes would be attributed to
                        // this lane.
                        std::thread::sleep(Duration::from_millis(20));
                        if turn >= WARM_UP {
                            MARKS[lane].store(1, Ordering::SeqCst);
                        }
                        work(&mut state, turn);
                        MARKS[LANES].store(1, Ordering::SeqCst);
                    }
                }
            });
        }
    });
}

fn outbound(a: &Host, packet: &[u8], offload: Offload) {
    let lanes = (0..LANES).map(|_| (a.forwarder.lane(), packet.to_vec())).collect();
    take_turns(lanes, |(lane, packet): &mut (Lane, Vec<u8>), _| {
        lane.clear();
        assert_eq!(a.forwarder.outbound(lane, a.now, packet, offload), Verdict::Transmit);
    });
}

fn inbound(a: &mut Host, b: &Host, packet: &mut [u8], offload: Offload) {
    let mut sealed: Vec<Vec<(Vec<u8>, Vec<Received>)>> = (0..LANES).map(|_| Vec::new()).collect();
    for _ in 0..TURNS {
        for lane in &mut sealed {
            assert_eq!(a.send(packet, offload), Verdict::Transmit);
            lane.push(a.sent());
        }
    }
    let lanes = sealed.into_iter().map(|sealed| (b.forwarder.lane(), Mutex::new(sealed))).collect();
    take_turns(lanes, |(lane, sealed): &mut (Lane, Mutex<Vec<_>>), turn| {
        let sealed = sealed.get_mut().expect("nobody panicked");
        let (buffer, slots) = &mut sealed[turn];
        lane.clear();
        b.forwarder.inbound(lane, b.now, buffer, slots);
        assert!(!lane.deliveries().is_empty());
    });
}

fn main() {
    let (mut a, b) = network(|_| {});
    eprintln!("marks {:x} {LANES}", (&raw const MARKS).addr());
    let what = std::env::args().nth(1).unwrap_or_default();
    let stream = Stream { port: 40_000, sequence: 1, acknowledgement: 1 };
    let (mut packet, offload) = match what.split_once('-').map(|(_, size)| size) {
        Some("run") => tcp_super_packet(stream, 1248, 48),
        _ => (udp(40_000, 53, 64), Offload::default()),
    };
    if what.starts_with("in") {
        inbound(&mut a, &b, &mut packet, offload);
    } else {
        outbound(&a, &packet, offload);
    }
}
