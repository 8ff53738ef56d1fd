//! The command line of `nebula-proxy`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use nebula_config::go::flags::{self, Flag, Parsed};

use crate::target::Target;

/// What to do with the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Run until a signal.
    Run(Box<Offers>),
    /// Check the configuration; with `strict`, warnings are errors.
    Test {
        /// Whether warnings are errors.
        strict: bool,
    },
}

/// What the proxy offers to the programs of this host and to peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offers {
    /// Where SOCKS5 is spoken.
    pub socks: Vec<SocketAddr>,
    /// Where HTTP CONNECT is spoken.
    pub http: Vec<SocketAddr>,
    /// File with users of both.
    pub credentials: Option<PathBuf>,
    /// Ports of this host.
    pub forwards: Vec<Forward>,
    /// Ports of the overlay.
    pub serves: Vec<Serve>,
    /// Most connections at a time of each listener.
    pub connections: usize,
    /// Most sources of UDP at a time of each port, and most UDP associations of each SOCKS listener.
    pub udp_sessions: usize,
}

/// TCP or UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port of this host that leads to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// TCP or UDP.
    pub transport: Transport,
    /// Where to listen.
    pub local: SocketAddr,
    /// Where it leads.
    pub target: Target,
}

/// A port of the overlay that leads to a program of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Serve {
    /// TCP or UDP.
    pub transport: Transport,
    /// The port on all overlay addresses of this host.
    pub port: u16,
    /// Where it leads.
    pub local: SocketAddr,
    /// Whether each connection begins with a header of the PROXY protocol, version 2.
    pub proxy_v2: bool,
}

/// Why a value of a flag cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("-{flag} {value}: {why}")]
pub struct Invalid {
    flag: &'static str,
    value: String,
    why: String,
}

const DEFAULT_CONNECTIONS: usize = 1024;
const DEFAULT_UDP_SESSIONS: usize = 256;
const MAX_NUMBER: usize = 1 << 16;

impl Order {
    /// Reads what the flags say.
    ///
    /// # Errors
    /// Returns an error that names the flag and says what to write.
    pub fn read(parsed: &Parsed) -> Result<Self, String> {
        if let Some(word) = parsed.rest().first() {
            return Err(format!("{word}: not a flag; everything is given by flags"));
        }
        if parsed.is_set("test") {
            return Ok(Self::Test { strict: parsed.is_set("strict") });
        }
        let offers = Offers::read(parsed).map_err(|invalid| invalid.to_string())?;
        if offers.socks.is_empty() && offers.http.is_empty() && offers.forwards.is_empty() && offers.serves.is_empty() {
            return Err("nothing to do: give at least one of -socks, -http, -forward and -serve".to_owned());
        }
        Ok(Self::Run(Box::new(offers)))
    }
}

impl Offers {
    fn read(parsed: &Parsed) -> Result<Self, Invalid> {
        let credentials = parsed.value("credentials").filter(|path| !path.is_empty()).map(PathBuf::from);
        let proxy = |flag| each(parsed, flag, |value| proxy_address(value, credentials.is_some()));
        let (socks, http) = (proxy("socks")?, proxy("http")?);
        Ok(Self {
            socks,
            http,
            forwards: each(parsed, "forward", forward)?,
            serves: each(parsed, "serve", serve)?,
            connections: each(parsed, "connections", number)?.pop().unwrap_or(DEFAULT_CONNECTIONS),
            udp_sessions: each(parsed, "udp-sessions", number)?.pop().unwrap_or(DEFAULT_UDP_SESSIONS),
            credentials,
        })
    }
}

fn each<T>(parsed: &Parsed, flag: &'static str, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, Invalid> {
    let invalid = |value: &str, why| Invalid { flag, value: value.to_owned(), why };
    parsed.values(flag).map(|value| read(value).map_err(|why| invalid(value, why))).collect()
}

/// `PORT` on loopback, or `ADDRESS:PORT`.
fn local_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.strip_prefix("localhost:").unwrap_or(text).parse() {
        return Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
    }
    text.parse().map_err(|_| format!("{text:?} is not ADDRESS:PORT, nor a PORT of 127.0.0.1"))
}

fn proxy_address(text: &str, has_credentials: bool) -> Result<SocketAddr, String> {
    let address = local_address(text)?;
    if is_loopback(address.ip()) || has_credentials {
        return Ok(address);
    }
    Err("everybody who reaches this address could use the overlay as this host: listen on 127.0.0.1 or [::1], or name users in a file \
         with -credentials"
        .to_owned())
}

/// Whether only programs of this host can reach an address.
pub(crate) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

fn transport(text: &str) -> (Transport, &str) {
    match text.strip_prefix("udp:") {
        Some(rest) => (Transport::Udp, rest),
        None => (Transport::Tcp, text.strip_prefix("tcp:").unwrap_or(text)),
    }
}

fn forward(text: &str) -> Result<Forward, String> {
    let (transport, rest) = transport(text);
    let (local, target) = rest.split_once('=').ok_or("not [udp:]LOCAL=PEER:PORT")?;
    let target: Target = target.parse().map_err(|error| format!("{target:?} is {error}"))?;
    if target.port == 0 {
        return Err("no port of a peer is 0".to_owned());
    }
    Ok(Forward { transport, local: local_address(local)?, target })
}

fn serve(text: &str) -> Result<Serve, String> {
    let (transport, rest) = transport(text);
    let (port, rest) = rest.split_once('=').ok_or("not [udp:]PORT=LOCAL[,proxy-v2]")?;
    let (local, option) = rest.split_once(',').map_or((rest, None), |(local, option)| (local, Some(option)));
    let proxy_v2 = match (option, transport) {
        (None, _) => false,
        (Some("proxy-v2"), Transport::Tcp) => true,
        (Some("proxy-v2"), Transport::Udp) => return Err("proxy-v2 is for TCP: datagrams have no beginning".to_owned()),
        (Some(other), _) => return Err(format!("unknown option {other:?}; there is proxy-v2")),
    };
    let port = port.parse().ok().filter(|port| *port != 0).ok_or("the port is not a number from 1 to 65535")?;
    let local = local_address(local)?;
    if local.port() == 0 {
        return Err("no program listens on port 0".to_owned());
    }
    Ok(Serve { transport, port, local, proxy_v2 })
}

fn number(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_NUMBER).contains(number));
    number.ok_or_else(|| format!("not a number from 1 to {MAX_NUMBER}"))
}

/// The text of `-help`.
#[must_use]
pub fn help() -> String {
    format!("{ABOUT}\n{}\n{EXAMPLES}", flags::usage("nebula-proxy", FLAGS))
}

const ABOUT: &str = "\
nebula-proxy joins a Nebula overlay without root and without a tun device. Programs
of this host use the overlay by SOCKS5, HTTP CONNECT and forwarded ports; peers reach
programs of this host by served ports. The configuration is that of nebula; its
firewall decides which peers may connect. Addresses outside of the overlay are refused.
To make this host a member of a network first, as this user: nebula-proxy up
";

const EXAMPLES: &str = "\
LOCAL is ADDRESS:PORT, or a PORT of 127.0.0.1. PEER is an overlay address, the name in
the certificate of a peer with a tunnel, or a name that the DNS of a lighthouse knows.

  nebula-proxy -config config.yml -socks 1080 -http 8118
  curl --proxy socks5h://127.0.0.1:1080 http://10.42.0.9/

  nebula-proxy -config config.yml -forward 5432=10.42.0.7:5432
  psql -h 127.0.0.1 mydb

  nebula-proxy -config config.yml -serve 443=8443,proxy-v2

docs/proxy.md has more.
";

/// The flags of the program.
pub const FLAGS: &[Flag] = &[
    Flag { name: "config", takes_value: true, help: "Path to either a file or directory to load configuration from" },
    Flag {
        name: "socks",
        takes_value: true,
        help: "LOCAL: speak SOCKS5 there (CONNECT and UDP ASSOCIATE). May be given several times, as the next three",
    },
    Flag { name: "http", takes_value: true, help: "LOCAL: speak HTTP CONNECT there" },
    Flag { name: "forward", takes_value: true, help: "[udp:]LOCAL=PEER:PORT: a port of this host leads to a peer" },
    Flag {
        name: "serve",
        takes_value: true,
        help: "[udp:]PORT=LOCAL[,proxy-v2]: a port of the overlay leads to a program of this host; proxy-v2 sends it a header that identifies the peer",
    },
    Flag {
        name: "credentials",
        takes_value: true,
        help: "File with lines USER:PASSWORD: clients of -socks and -http must be one of them. Needed for addresses beyond loopback",
    },
    Flag { name: "connections", takes_value: true, help: "Most connections at a time of each listener (1024)" },
    Flag {
        name: "udp-sessions",
        takes_value: true,
        help: "Most sources of UDP at a time of each port, and UDP associations of each SOCKS listener (256)",
    },
    Flag {
        name: "test",
        takes_value: false,
        help: "Test the config and print the end result. Non zero exit indicates a faulty config",
    },
    Flag { name: "strict", takes_value: false, help: "With -test: whatever is worth a warning is an error" },
    Flag { name: "version", takes_value: false, help: "Print version" },
    Flag { name: "help", takes_value: false, help: "Print command line usage" },
];

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Order, String> {
        Order::read(&flags::parse(line.split_whitespace().map(str::to_owned), FLAGS).unwrap())
    }

    fn offers(line: &str) -> Offers {
        match read(line).unwrap() {
            Order::Run(offers) => *offers,
            test => panic!("{test:?}"),
        }
    }

    #[test]
    fn a_port_alone_is_one_of_loopback() {
        let offers = offers(
            "-socks 1080 -socks [::1]:1080 -http localhost:8118 -forward udp:53=dns:53 -serve 443=8443,proxy-v2",
        );
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        assert_eq!(offers.socks, [loopback(1080), "[::1]:1080".parse().unwrap()]);
        assert_eq!(offers.http, [loopback(8118)]);
        let target = "dns:53".parse().unwrap();
        assert_eq!(offers.forwards, [Forward { transport: Transport::Udp, local: loopback(53), target }]);
        let serve = Serve { transport: Transport::Tcp, port: 443, local: loopback(8443), proxy_v2: true };
        assert_eq!(offers.serves, [serve]);
        assert_eq!((offers.connections, offers.udp_sessions), (1024, 256));
    }

    #[test]
    fn an_open_address_needs_credentials() {
        for flag in ["-socks", "-http"] {
            for address in ["0.0.0.0:1080", "[::]:1080", "192.0.2.1:1080", "[::ffff:192.0.2.1]:1080"] {
                let refused = read(&format!("{flag} {address}")).unwrap_err();
                assert!(refused.contains("with -credentials"), "{refused}");
                assert!(read(&format!("{flag} {address} -credentials users")).is_ok());
            }
        }
    }

    #[test]
    fn errors_say_what_to_write() {
        for (line, error) in [
            ("", "at least one of -socks"),
            ("-socks 1080 extra", "extra: not a flag"),
            ("-socks here", "ADDRESS:PORT"),
            ("-forward 80", "LOCAL=PEER:PORT"),
            ("-forward 80=peer", "HOST:PORT"),
            ("-forward 80=peer:0", "0"),
            ("-serve 0=80", "1 to 65535"),
            ("-serve 80=80,proxy-v1", "there is proxy-v2"),
            ("-serve udp:80=80,proxy-v2", "for TCP"),
            ("-socks 1080 -connections 0", "1 to 65536"),
        ] {
            let refused = read(line).unwrap_err();
            assert!(refused.contains(error), "{line}: {refused}");
        }
    }

    #[test]
    fn a_test_needs_nothing_to_offer() {
        assert_eq!(read("-test -strict"), Ok(Order::Test { strict: true }));
    }
}
