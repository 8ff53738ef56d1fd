//! Random operations on a simulated network, as used by [`super::Exercise`].

use std::time::Duration;

use super::Link;

/// One operation. Hosts and NATs are numbered in the order in which the exercise created them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Lets time pass and sends packets all the while.
    Run(Duration),
    /// The first host sends the second a UDP packet; `true`: to the port that [`Operation::Guard`] closes.
    Send(usize, usize, bool),
    /// The host starts if it is down.
    Join(usize),
    /// The host closes its tunnels and stops.
    Leave(usize),
    /// The host stops without closing its tunnels.
    Kill(usize),
    /// The host loses all state and starts at once.
    Restart(usize),
    /// The host closes its tunnels and keeps running.
    CloseAll(usize),
    /// The host gets a new public endpoint.
    MoveOut(usize),
    /// The host gets a private endpoint behind a NAT.
    MoveBehind(usize, usize),
    /// A NAT forgets its mappings.
    Rebind(usize),
    /// Nothing passes between the two.
    Cut(usize, usize),
    /// Nothing passes between the host and all others.
    Isolate(usize),
    /// Undoes every cut.
    Heal,
    /// Changes how every path behaves.
    Link(Link),
    /// The host reloads a new certificate and key.
    Renew(usize),
    /// The first host reloads a blocklist with the certificates of the second.
    Block(usize, usize),
    /// The host reloads an empty blocklist.
    Unblock(usize),
    /// The host reloads its firewall; `true`: the guarded port is closed.
    Guard(usize, bool),
    /// A stranger sends the second host a datagram in the name of the first; the byte selects its content.
    Forge(usize, usize, u8),
    /// A stranger sends a copy of one of the last datagrams, from its original source or from elsewhere.
    Replay(u8),
    /// A stranger sends the second host a first handshake message of the first one, with a changed ephemeral key.
    Impersonate(usize, usize),
    /// The host reloads its relay setting; `true`: it is a relay.
    Serve(usize, bool),
}

impl Operation {
    /// Decodes an operation on one of `hosts` hosts and `nats` NATs; every pair of bytes is valid.
    #[must_use]
    pub fn decode([kind, argument]: [u8; 2], hosts: usize, nats: usize) -> Self {
        let x = usize::from(argument & 7) % hosts;
        let y = (x + 1 + usize::from(argument >> 3 & 7) % (hosts - 1)) % hosts;
        let amount = u32::from(argument >> 4);
        match kind % 34 {
            // Mostly short, sometimes longer than any timer of a tunnel.
            0..=3 => Self::Run(Duration::from_millis(8) * u32::from(argument)),
            4 | 5 => Self::Run(Duration::from_millis(80) * u32::from(argument)),
            6..=9 => Self::Send(x, y, argument & 0x80 != 0),
            10 | 11 => Self::Join(x),
            12 => Self::Leave(x),
            13 => Self::Kill(x),
            14 => Self::Restart(x),
            15 => Self::CloseAll(x),
            16 => Self::MoveOut(x),
            17 | 18 => Self::MoveBehind(x, usize::from(argument >> 3) % nats),
            19 => Self::Rebind(usize::from(argument) % nats),
            20 => Self::Cut(x, y),
            21 => Self::Isolate(x),
            22 | 23 => Self::Heal,
            24 => Self::Link(Link { loss: amount * 4, ..Link::default() }),
            25 => Self::Link(Link {
                jitter: Duration::from_millis(20) * amount,
                duplicate: amount * 4,
                ..Link::default()
            }),
            26 => Self::Renew(x),
            27 => Self::Block(x, y),
            28 => Self::Unblock(x),
            29 => Self::Guard(x, argument & 8 != 0),
            30 => Self::Forge(x, y, argument),
            31 => Self::Replay(argument),
            32 => Self::Impersonate(x, y),
            _ => Self::Serve(x, argument & 0x80 != 0),
        }
    }
}
