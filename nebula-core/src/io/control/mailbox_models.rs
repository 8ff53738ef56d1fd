//! Loom models: nothing in the mailbox is forgotten, and the reader is awake as long as something is in it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::*;
use crate::io::poll::readable;
use crate::models::check;

fn is_awake(mailbox: &Mailbox) -> bool {
    mailbox.wake.in_order();
    readable(mailbox, mailbox, Some(Duration::ZERO)).unwrap().first
}

fn punt() -> Punt {
    Punt::RecvError { from: SocketAddr::from(([127, 0, 0, 1], 1)).into(), index: crate::tunnel::RemoteIndex(1) }
}

#[test]
fn the_reader_stays_awake_until_it_has_taken_every_punt() {
    check(3, || {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let lanes = [(); 2].map(|()| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || assert!(mailbox.punt(punt())))
        });
        let early = if is_awake(&mailbox) { mailbox.take().punts.len() } else { 0 };
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        assert_eq!(is_awake(&mailbox), early < 2);
        assert_eq!(early + mailbox.take().punts.len(), 2);
        assert!(!is_awake(&mailbox));
    });
}

#[test]
fn a_writer_that_waits_for_room_goes_on_when_the_reader_takes_or_ends() {
    for ends in [false, true] {
        check(3, move || {
            let mailbox = Arc::new(Mailbox::new().unwrap());
            let writer = {
                let mailbox = Arc::clone(&mailbox);
                // One more than there is room for.
                thread::spawn(move || (0..2).for_each(|_| mailbox.command(Work::new(|_, _| ()))))
            };
            let mut taken = 0;
            while taken < 1 {
                taken += mailbox.take().commands.len();
                thread::yield_now();
            }
            if ends {
                mailbox.close();
                writer.join().unwrap();
            } else {
                writer.join().unwrap();
                taken += mailbox.take().commands.len();
                assert_eq!(taken, 2);
            }
        });
    }
}

#[test]
fn the_wish_to_stop_wakes_the_reader_also_when_a_punt_comes_at_the_same_time() {
    check(3, || {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let lane = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || assert!(mailbox.punt(punt())))
        };
        let other = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.stop())
        };
        let mut stopped = is_awake(&mailbox) && mailbox.take().stop;
        lane.join().unwrap();
        other.join().unwrap();
        stopped |= is_awake(&mailbox) && mailbox.take().stop;
        assert!(stopped);
    });
}
