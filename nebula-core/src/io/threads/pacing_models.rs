//! Loom models: one thread at a time serves the queue, none serves it twice in a row, and neither sleeps during its
//! turn.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::*;
use crate::io::poll::any_readable;
use crate::models::check;

fn is_awake(wake: &Wake) -> bool {
    wake.in_order();
    any_readable([wake.as_fd()], Some(Duration::ZERO)).unwrap()[0]
}

fn sleep_until_awake(wake: &Wake) {
    while !is_awake(wake) {
        thread::yield_now();
    }
}

#[test]
fn the_queue_goes_to_and_fro_and_every_turn_sees_the_one_before() {
    check(3, || {
        let duty = Arc::new(Duty::new(0_u32).unwrap());
        let for_load = {
            let duty = Arc::clone(&duty);
            thread::spawn(move || {
                sleep_until_awake(&duty.needed);
                let mut turns = duty.take_over();
                assert_eq!(*turns, 1);
                *turns += 1;
                duty.give_back(turns);
            })
        };
        let mut turns = duty.take().unwrap();
        *turns += 1;
        duty.hand_over(turns);
        sleep_until_awake(&duty.returned);
        while !duty.is_free() {
            thread::yield_now();
        }
        assert_eq!(*duty.take().unwrap(), 2);
        assert!(!is_awake(&duty.returned), "nothing wakes a thread that serves already");
        for_load.join().unwrap();
        assert!(!is_awake(&duty.returned) && !is_awake(&duty.needed));
        assert!(duty.take().is_none());
    });
}
