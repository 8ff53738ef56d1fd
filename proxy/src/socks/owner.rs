//! Whose the datagrams of an association are: on a machine with several users, the first to send is not always the
//! client.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nebula_cert::listener::Source;
use nebula_config::log;
use tokio::net::TcpStream;
use tracing::Level;

/// The client that opened an association.
#[derive(Debug)]
pub(crate) struct Owner {
    /// Where its connection comes from.
    address: IpAddr,
    /// Whose that is: the user of a program of this host, or else the address.
    user: Source,
    /// The port that it said it will send from.
    port: Option<u16>,
    /// Whether clients must show who they are.
    has_credentials: bool,
    /// Where the first datagram came from, and when it was checked last whose that is. Others are not heard any more.
    source: Option<(SocketAddr, Instant)>,
}

/// Whose a datagram is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// The client's; the first one.
    First,
    /// The client's.
    Known,
    /// Somebody else's.
    Stranger,
}

/// How often it is checked whose socket the client's port is: the client may close it, and another user may open it.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Datagrams of others, of all associations.
static STRANGERS: AtomicU64 = AtomicU64::new(0);

impl Owner {
    pub(super) fn of(stream: &TcpStream, port: u16, has_credentials: bool) -> io::Result<Self> {
        let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
        Ok(Self::new(peer.ip(), Source::of_tcp(local, peer), port, has_credentials))
    }

    /// `port` is 0 if the client does not say where it will send from.
    pub(crate) fn new(address: IpAddr, source: Source, port: u16, has_credentials: bool) -> Self {
        Self { address, user: source, port: Some(port).filter(|port| *port != 0), has_credentials, source: None }
    }

    /// Where its datagrams come from.
    pub(super) fn source(&self) -> Option<SocketAddr> {
        self.source.map(|(source, _)| source)
    }

    /// Where its datagrams will come from, if that is known.
    pub(super) fn named(&self) -> Option<SocketAddr> {
        self.port.map(|port| SocketAddr::new(self.address, port))
    }

    /// Judges a datagram from this address. `whose` finds out who has that socket.
    pub(crate) fn judge(&mut self, now: Instant, from: SocketAddr, whose: impl FnOnce() -> Source) -> Judgement {
        let known = match self.source {
            Some((source, _)) if source != from => return Judgement::Stranger,
            Some((_, checked)) if now < checked + CHECK_INTERVAL => return Judgement::Known,
            known => known.is_some(),
        };
        if !self.may_be(from, whose) {
            return Judgement::Stranger;
        }
        self.source = Some((from, now));
        if known { Judgement::Known } else { Judgement::First }
    }

    fn may_be(&self, from: SocketAddr, whose: impl FnOnce() -> Source) -> bool {
        if from.ip() != self.address || self.port.is_some_and(|port| port != from.port()) {
            return false;
        }
        match self.user {
            Source::User(_) => whose() == self.user,
            // The kernel does not say who that is. On this host it may be anybody.
            Source::Network(address) if address.is_loopback() => self.port.is_some() || !self.has_credentials,
            Source::Network(_) => true,
        }
    }

    pub(super) fn log_stranger(&self, from: SocketAddr) {
        const STRANGER: &str = "Dropped a datagram to a UDP association that is not of the client that opened it";
        let dropped = STRANGERS.fetch_add(1, Ordering::Relaxed) + 1;
        if log::admits(Level::WARN, STRANGER, &self.address.to_string()) {
            let named = self.port.unwrap_or_default();
            tracing::warn!(by = "SOCKS (UDP)", client = %self.address, port = named, %from, dropped, "{STRANGER}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(source: Source, port: u16, has_credentials: bool) -> Owner {
        Owner::new(IpAddr::from([127, 0, 0, 1]), source, port, has_credentials)
    }

    fn from(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn only_datagrams_of_the_user_who_opened_it_belong_to_an_association() {
        let (mut client, now) = (owner(Source::User(1000), 0, false), start());
        for other in [Source::User(1001), Source::User(0), Source::of_address(from(5).ip())] {
            assert_eq!(client.judge(now, from(5), || other), Judgement::Stranger, "{other:?}");
        }
        let elsewhere = SocketAddr::from(([127, 0, 0, 2], 5));
        assert_eq!(client.judge(now, elsewhere, || Source::User(1000)), Judgement::Stranger);
        assert_eq!(client.judge(now, from(5), || Source::User(1000)), Judgement::First);
        assert_eq!(client.judge(now, from(5), || panic!("it was checked just now")), Judgement::Known);
        assert_eq!(client.judge(now, from(6), || Source::User(1000)), Judgement::Stranger, "another port");
        // The client closed its socket, and another user opened the port.
        let later = now + CHECK_INTERVAL;
        assert_eq!(client.judge(later, from(5), || Source::User(1001)), Judgement::Stranger);
        assert_eq!(client.judge(later, from(5), || Source::User(1000)), Judgement::Known);
    }

    #[test]
    fn a_client_that_names_its_port_is_heard_from_there_only() {
        let mut client = owner(Source::User(1000), 5, false);
        assert_eq!((client.named(), owner(Source::User(1000), 0, true).named()), (Some(from(5)), None));
        assert_eq!(client.judge(start(), from(6), || Source::User(1000)), Judgement::Stranger);
        assert_eq!(client.judge(start(), from(5), || Source::User(1000)), Judgement::First);
    }

    #[test]
    fn if_the_kernel_does_not_tell_users_a_password_or_a_named_port_decides() {
        let unknown = Source::of_address(from(5).ip());
        let judge = |mut client: Owner, from: SocketAddr| client.judge(start(), from, || unknown);
        assert_eq!(judge(owner(unknown, 0, false), from(5)), Judgement::First, "everybody may use the proxy");
        assert_eq!(judge(owner(unknown, 0, true), from(5)), Judgement::Stranger);
        assert_eq!(judge(owner(unknown, 5, true), from(5)), Judgement::First);
        let far = IpAddr::from([192, 0, 2, 1]);
        let client = Owner::new(far, Source::of_address(far), 0, true);
        assert_eq!(judge(client, SocketAddr::new(far, 5)), Judgement::First, "another host");
    }
}
