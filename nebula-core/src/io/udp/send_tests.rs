//! How runs are cut, and what happens to them when the kernel refuses.

use super::*;

#[test]
fn kernel_releases_of_distributions_are_understood() {
    for (release, version) in
        [("6.18.44-fc-v657", (6, 18)), ("5.15.0-91-generic", (5, 15)), ("6.9", (6, 9)), ("", (0, 0)), ("x.y", (0, 0))]
    {
        assert_eq!(kernel_version(release.as_bytes()), version, "{release}");
    }
}

#[test]
fn a_run_is_cut_into_messages_that_keep_datagrams_whole() {
    let to = SocketAddr::from(([127, 0, 0, 1], 1));
    let mut messages = Vec::new();
    cut(&mut messages, to, 100..1150, 100, 4);
    let ranges: Vec<_> = messages.iter().map(|message| message.range.clone()).collect();
    assert_eq!(ranges, [100..500, 500..900, 900..1150]);
    assert_eq!(messages.iter().map(Message::datagrams).sum::<u64>(), 11);
}

/// Stands in for the kernel and the devices below it.
#[derive(Default)]
struct FakeKernel {
    /// Errors for messages of several datagrams and for single ones. The first that matches is returned, and used up
    /// unless it is permanent.
    refusals: Vec<Refusal>,
    sent: Vec<(usize, usize)>,
}

struct Refusal {
    of_runs: bool,
    errno: i32,
    for_good: bool,
}

impl FakeKernel {
    fn refusing(refusals: &[(bool, i32, bool)]) -> Self {
        let refusals = refusals.iter().map(|(of_runs, errno, for_good)| Refusal {
            of_runs: *of_runs,
            errno: *errno,
            for_good: *for_good,
        });
        Self { refusals: refusals.collect(), sent: Vec::new() }
    }
    fn send(&mut self, messages: &[Message]) -> io::Result<usize> {
        let first = &messages[0];
        if let Some(at) = self.refusals.iter().position(|refusal| refusal.of_runs == first.is_run()) {
            let errno = self.refusals[at].errno;
            if !self.refusals[at].for_good {
                self.refusals.remove(at);
            }
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.sent.push((first.range.start, first.range.len()));
        Ok(1)
    }
    /// Sends two runs of three datagrams each.
    fn take(&mut self) -> (Lost, bool) {
        let options = crate::io::udp::SocketOptions::default();
        let sockets = UdpSocket::bind(SocketAddr::from(([127, 0, 0, 1], 0)), 1, &options).unwrap();
        let to = sockets[0].local_addr().unwrap();
        let runs = [0..300, 300..600].map(|range| Run { to, range, segment_size: 100 });
        let mut sender = Sender::with_max_segments(63);
        let lost = sender.send_by(&sockets[0], &[0; 600], &runs, |messages| self.send(messages));
        (lost, sockets[0].sends_runs())
    }
}

const ALL: [(usize, usize); 6] = [(0, 100), (100, 100), (200, 100), (300, 100), (400, 100), (500, 100)];

#[test]
fn a_device_without_checksums_for_runs_gets_every_datagram_singly_from_then_on() {
    let mut kernel = FakeKernel::refusing(&[(true, libc::EIO, true)]);
    assert_eq!(kernel.take(), (Lost::default(), false));
    assert_eq!(kernel.sent, ALL);
}

#[test]
fn a_run_above_the_path_mtu_is_sent_singly_and_the_next_one_whole() {
    for errno in [libc::EMSGSIZE, libc::EINVAL] {
        let mut kernel = FakeKernel::refusing(&[(true, errno, false)]);
        assert_eq!(kernel.take(), (Lost::default(), true));
        assert_eq!(kernel.sent, [(0, 100), (100, 100), (200, 100), (300, 300)]);
    }
}

#[test]
fn a_single_datagram_that_is_refused_is_lost_alone() {
    for errno in [libc::EIO, libc::EMSGSIZE, libc::EPERM, libc::ENETUNREACH] {
        let mut kernel = FakeKernel::refusing(&[(true, libc::EIO, true), (false, errno, false)]);
        assert_eq!(kernel.take(), (Lost { full: 0, refused: 1 }, false));
        assert_eq!(kernel.sent, ALL[1..]);
    }
}

#[test]
fn a_full_queue_costs_one_message_and_an_interruption_nothing() {
    let mut kernel = FakeKernel::refusing(&[(true, libc::EINTR, false), (true, libc::ENOBUFS, false)]);
    assert_eq!(kernel.take(), (Lost { full: 3, refused: 0 }, true));
    assert_eq!(kernel.sent, [(300, 300)]);
    // The send buffer had room again after the wait.
    let mut kernel = FakeKernel::refusing(&[(true, libc::EAGAIN, false)]);
    assert_eq!(kernel.take(), (Lost::default(), true));
    assert_eq!(kernel.sent, [(0, 300), (300, 300)]);
}
