//! A cable between two hosts whose delay a test sets, and which it cuts: a device on each end, and threads that carry
//! packets from one to the other. Not every kernel has netem.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nebula_core::io::Tun;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{World, enter, run};

/// The cable; its devices disappear when it is dropped.
pub struct Wire {
    settings: Arc<Settings>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Settings {
    /// Each way, in microseconds.
    delay: AtomicU64,
    is_cut: AtomicBool,
    stop: AtomicBool,
}

impl Wire {
    /// Connects two hosts by a device called `name` on each, which gets the address of that end with its prefix length.
    pub fn lay(world: &World, name: &str, ends: [(&str, &str); 2], delay: Duration) -> Self {
        let mut wire = Self { settings: Arc::default(), threads: Vec::new() };
        wire.set_delay(delay);
        let [a, b] = ends.map(|(host, address)| device(&world.namespace_of(host), name, address));
        let twice = |file: &File| file.try_clone().expect("a second descriptor");
        for (from, to) in [(twice(&a), twice(&b)), (b, a)] {
            let settings = Arc::clone(&wire.settings);
            wire.threads.push(thread::spawn(move || carry(from, to, &settings)));
        }
        wire
    }

    /// How long a packet takes from now on, each way. Packets stay in order.
    pub fn set_delay(&self, delay: Duration) {
        self.settings.delay.store(delay.as_micros() as u64, Ordering::Relaxed);
    }

    /// Loses every packet from now on, or no longer.
    pub fn cut(&self, is_cut: bool) {
        self.settings.is_cut.store(is_cut, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.settings.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn device(namespace: &str, name: &str, address: &str) -> File {
    let (place, device) = (namespace.to_owned(), name.to_owned());
    let open = thread::spawn(move || {
        enter(&place);
        Tun::create(&device, 1, false).expect("a tun device").into_queues().remove(0)
    });
    let queue = open.join().expect("a tun device");
    // Nothing else has this address, so it need not be checked for duplicates.
    let (add, no_check) = (["-n", namespace, "addr", "add", address, "dev", name], ["nodad"]);
    let add = if address.contains(':') { [&add[..], &no_check].concat() } else { add.to_vec() };
    run("ip", &add);
    run("ip", &["-n", namespace, "link", "set", name, "up"]);
    File::from(queue)
}

/// Carries packets one way, with the header of the device before each.
fn carry(mut from: File, mut to: File, settings: &Settings) {
    let (mut waiting, mut buffer) = (VecDeque::<(Instant, Vec<u8>)>::new(), vec![0; 1 << 16]);
    while !settings.stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        while waiting.front().is_some_and(|(due, _)| *due <= now) {
            // A full device loses packets, as a real one does.
            let _ = waiting.pop_front().map(|(_, packet)| to.write(&packet));
        }
        let pause = waiting.front().map_or(IDLE, |(due, _)| due.saturating_duration_since(now).min(IDLE));
        let timeout = PollTimeout::from(pause.as_micros().div_ceil(1000) as u16);
        let _ = poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout);
        loop {
            let len = match from.read(&mut buffer) {
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The namespace is gone.
                Err(_) => return,
            };
            let due = Instant::now() + Duration::from_micros(settings.delay.load(Ordering::Relaxed));
            if !settings.is_cut.load(Ordering::Relaxed) && waiting.len() < MAX_WAITING {
                waiting.push_back((due, buffer[..len].to_vec()));
            }
        }
    }
}

/// How often a thread looks whether to stop.
const IDLE: Duration = Duration::from_millis(200);
const MAX_WAITING: usize = 10_000;
