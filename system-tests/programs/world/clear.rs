//! Pods that send to overlay addresses all the time, and a capture of what of it leaves them in clear.
//!
//! A packet is *in clear* if it is seen on any link of the node, and so on the host's end of every pod's link, and
//! either goes to or comes from an overlay address, or contains a datagram of the speaker. The overlay's own packets
//! go between addresses of the primary network and hide what they carry.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::{TimeSpec, TimeValLike};

use super::cluster::{LIGHTHOUSE, answer_at};

/// Nanoseconds since 1970, as the kernel stamps packets.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// How often something was seen, and when for the last time. A datagram counts with the time at which it was sent, any
/// other packet with the time at which the kernel received it.
#[derive(Debug, Default, Clone, Copy)]
pub struct Heard {
    pub count: usize,
    pub last: u64,
}

impl Heard {
    fn add(&mut self, at: u64) {
        self.count += 1;
        self.last = self.last.max(at);
    }
}

/// What was seen in clear.
#[derive(Debug, Default, Clone)]
pub struct Clear {
    /// Packets from or to overlay addresses, by their source.
    pub sources: BTreeMap<Ipv4Addr, Heard>,
    /// Datagrams of the speaker, by the number of the pod.
    pub speakers: BTreeMap<u32, Heard>,
}

/// Captures all packets on all links of a namespace until it is dropped.
pub struct Listener {
    clear: Arc<Mutex<Clear>>,
    stop: Arc<AtomicBool>,
}

impl Listener {
    pub fn start(namespace: &str) -> Self {
        let listener = Self { clear: Arc::default(), stop: Arc::default() };
        let (clear, stop) = (Arc::clone(&listener.clear), Arc::clone(&listener.stop));
        let namespace = namespace.to_owned();
        let (ready, started) = std::sync::mpsc::channel();
        thread::spawn(move || {
            super::enter(&namespace);
            let packets = super::capture::packet_socket();
            setsockopt(&packets, sockopt::ReceiveTimestampns, &true).expect("time stamps");
            ready.send(()).expect("the test waits");
            let mut packet = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                let Some((len, at)) = receive(packets.as_raw_fd(), &mut packet) else { continue };
                locked(&clear).see(&packet[..len], at);
            }
        });
        started.recv().expect("the capture runs");
        listener
    }

    /// What was seen up to now. Waits a moment for what is still in the queue.
    pub fn clear(&self) -> Clear {
        thread::sleep(Duration::from_millis(200));
        locked(&self.clear).clone()
    }

    /// Forgets everything, so that addresses can be used again.
    pub fn forget(&self) {
        *locked(&self.clear) = Clear::default();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn receive(socket: i32, packet: &mut [u8]) -> Option<(usize, u64)> {
    let mut space = nix::cmsg_space!(TimeSpec);
    let mut parts = [std::io::IoSliceMut::new(packet)];
    let got = recvmsg::<()>(socket, &mut parts, Some(&mut space), MsgFlags::empty()).ok()?;
    let stamp = got.cmsgs().ok()?.find_map(|message| match message {
        ControlMessageOwned::ScmTimestampns(at) => Some(at.num_nanoseconds() as u64),
        _ => None,
    });
    Some((got.bytes, stamp.unwrap_or_else(now)))
}

impl Clear {
    fn see(&mut self, packet: &[u8], at: u64) {
        // The marker may be anywhere: in the packet itself, or quoted by an error message.
        if let Some(place) = packet.windows(MARKER.len()).position(|window| window == MARKER)
            && let Some((pod, sent)) = read(&packet[place..])
        {
            self.speakers.entry(pod).or_default().add(sent);
        }
        if let [0x45..0x50, .., s1, s2, s3, s4, d1, d2, _, _] = packet[..packet.len().min(20)]
            && packet.len() >= 20
            && ((d1, d2) == OVERLAY || (s1, s2) == OVERLAY)
        {
            self.sources.entry(Ipv4Addr::new(s1, s2, s3, s4)).or_default().add(at);
        }
    }
}

/// A pod that speaks.
#[derive(Debug, Clone)]
pub struct Voice {
    pub number: u32,
    /// Path of its network namespace.
    pub netns: PathBuf,
    /// Where its instance says how it is.
    pub launch: PathBuf,
    /// Since when it has had a tunnel, if it was seen to have one.
    pub attached: Option<u64>,
    /// Its address in the overlay.
    pub overlay: Option<Ipv4Addr>,
    /// When each pod sent the last datagram that arrived here.
    pub heard: BTreeMap<u32, u64>,
}

/// Sends a marked datagram from each pod to the overlay address of each other pod and of the lighthouse, twenty times a
/// second, whether or not it has a tunnel; also notes when each got its tunnel.
pub struct Speaker {
    voices: Arc<Mutex<BTreeMap<u32, (UdpSocket, Voice)>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Speaker {
    pub fn start() -> Self {
        let (voices, stop) = (Arc::<Mutex<BTreeMap<u32, (UdpSocket, Voice)>>>::default(), Arc::<AtomicBool>::default());
        let (shared, stopped) = (Arc::clone(&voices), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                speak(&mut locked(&shared));
                thread::sleep(EVERY);
            }
        });
        Self { voices, stop, thread: Some(thread) }
    }

    pub fn join(&self, number: u32, netns: PathBuf, launch: PathBuf) {
        // The socket stays in the namespace in which it was made.
        let path = netns.clone();
        let made = thread::spawn(move || {
            setns(File::open(path).expect("the pod's namespace"), CloneFlags::CLONE_NEWNET).expect("enter it");
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).expect("a socket in the pod");
            socket.set_nonblocking(true).expect("a socket that does not block");
            socket
        });
        let socket = made.join().expect("a socket in the pod");
        let voice = Voice { number, netns, launch, attached: None, overlay: None, heard: BTreeMap::new() };
        locked(&self.voices).insert(number, (socket, voice));
    }

    /// Ends what keeps the pod's namespace alive.
    pub fn leave(&self, number: u32) {
        locked(&self.voices).remove(&number);
    }

    pub fn voice(&self, number: u32) -> Voice {
        locked(&self.voices).get(&number).map(|(_, voice)| voice.clone()).expect("a pod that speaks")
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn speak(voices: &mut BTreeMap<u32, (UdpSocket, Voice)>) {
    let lighthouse = LIGHTHOUSE.parse().expect("an address");
    let all: Vec<Ipv4Addr> = voices.values().filter_map(|(_, voice)| voice.overlay).chain([lighthouse]).collect();
    for (socket, voice) in voices.values_mut() {
        for to in all.iter().filter(|to| Some(**to) != voice.overlay) {
            let mut text = MARKER.to_vec();
            text.extend(voice.number.to_be_bytes());
            text.extend(now().to_be_bytes());
            // Without a route there is an error, and a report of an earlier packet may be one too.
            let _ = socket.send_to(&text, SocketAddr::from((*to, PORT)));
        }
        let mut text = [0; 64];
        for _ in 0..100 {
            match socket.recv(&mut text) {
                Ok(len) => {
                    let Some((from, sent)) = read(&text[..len]) else { continue };
                    voice.heard.insert(from, sent);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(_) => {}
            }
        }
        if voice.attached.is_none()
            && let Some(overlay) = overlay(voice)
        {
            (voice.overlay, voice.attached) = (Some(overlay), Some(now()));
        }
    }
}

/// The overlay address of a pod whose instance runs.
fn overlay(voice: &Voice) -> Option<Ipv4Addr> {
    let launch: serde_json::Value = serde_json::from_slice(&std::fs::read(&voice.launch).ok()?).ok()?;
    let status = answer_at(launch["status_socket"].as_str()?.as_ref()).ok()?;
    (status["state"] == "running").then_some(())?;
    status["overlay"][0].as_str()?.split('/').next()?.parse().ok()
}

fn read(text: &[u8]) -> Option<(u32, u64)> {
    let rest = text.strip_prefix(MARKER)?;
    let (pod, rest) = rest.split_first_chunk()?;
    Some((u32::from_be_bytes(*pod), u64::from_be_bytes(*rest.first_chunk()?)))
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

const MARKER: &[u8] = b"nebula pod in clear: ";
const PORT: u16 = 7000;
const EVERY: Duration = Duration::from_millis(50);
/// The first half of the overlay's prefix, 10.42.0.0/16.
const OVERLAY: (u8, u8) = (10, 42);
