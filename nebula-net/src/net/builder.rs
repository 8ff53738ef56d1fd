//! How a node is made.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use nebula_cert::VerifiedCertificate;
use nebula_core::config::InvalidConfig;
use nebula_core::lighthouse::LocalAddress;
use nebula_core::{Config, Engine, NoRandomness, Seed};
use tokio::sync::mpsc;

use super::dial::{self, Unreached};
use super::driver::{Allow, Driver, OnIdle, Shared};
use super::socket::Socket;
use super::{BlockingNet, Net, clock, driver};
use crate::stack::{Limits, Stack, StackOptions};
use crate::tcp::TcpOptions;

/// Where the DNS of a lighthouse listens.
const DNS_PORT: u16 = 53;

/// Settings of a node that is about to start.
///
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use nebula_net::nebula_core::firewall::Rule;
/// use nebula_net::{CaPool, Config, Identity, Net};
///
/// let identity = Identity::read("server.crt", "server.key")?;
/// let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read("ca.crt")?)?);
/// config.firewall.inbound.push(Rule::any());
/// let builder = Net::builder(config).bind("0.0.0.0:4242".parse()?);
/// let net = builder.allow(|peer| peer.groups().iter().any(|group| group == "ops")).start()?;
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct Builder {
    config: Config,
    bind: SocketAddr,
    socket: Option<std::net::UdpSocket>,
    stack: StackOptions,
    allow: Option<Allow>,
    ends_with_tunnel: bool,
    local_addresses: Option<Vec<LocalAddress>>,
    dns_port: u16,
    on_idle: Option<OnIdle>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("config", &self.config).field("bind", &self.bind).finish_non_exhaustive()
    }
}

/// Why a node could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    /// No certificate of the identity is valid now.
    #[error(transparent)]
    Identity(Unreached),
    /// The socket on the underlay cannot be opened.
    #[error("cannot open the UDP socket")]
    Socket(#[from] io::Error),
}

impl Builder {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::UNSPECIFIED, config.listen_port)),
            config,
            socket: None,
            stack: StackOptions::default(),
            allow: None,
            ends_with_tunnel: false,
            local_addresses: None,
            dns_port: DNS_PORT,
            on_idle: None,
        }
    }

    /// Address and port on the underlay. Default: port [`Config::listen_port`] (0: any free one) of all IPv4 addresses.
    pub fn bind(mut self, address: SocketAddr) -> Self {
        self.bind = address;
        self
    }

    /// A UDP socket that was opened elsewhere, instead of [`Builder::bind`].
    pub fn socket(mut self, socket: std::net::UdpSocket) -> Self {
        self.socket = Some(socket);
        self
    }

    /// Decides which peers may connect, by their certificates, before their SYN is answered. Hosts in networks behind
    /// another node are refused then. The firewall of the configuration comes first. It runs between packets, so it
    /// must be quick.
    pub fn allow(mut self, allow: impl Fn(&VerifiedCertificate) -> bool + Send + Sync + 'static) -> Self {
        self.allow = Some(Arc::new(allow));
        self
    }

    /// Ends a connection with [`TimedOut`](io::ErrorKind::TimedOut) as soon as the node gives the tunnel to its peer
    /// up: the peer stopped answering, or its certificate is no longer valid. Otherwise the connection waits for the
    /// peer to return, as TCP does. The node asks a silent peer only while packets are sent to it: who only reads
    /// needs [`TcpOptions::keepalive`], too. Default: false.
    pub fn end_with_tunnel(mut self, ends: bool) -> Self {
        self.ends_with_tunnel = ends;
        self
    }

    /// Longest overlay packet in bytes. Default: 1300.
    pub fn mtu(mut self, mtu: u16) -> Self {
        self.stack.mtu = mtu;
        self
    }

    /// Settings of connections.
    pub fn tcp(mut self, options: TcpOptions) -> Self {
        self.stack.tcp = options;
        self
    }

    /// Bounds on what peers can make the node keep.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.stack.limits = limits;
        self
    }

    /// Addresses on the underlay to advertise to lighthouses, beside the one that they see. Default: those that the
    /// interfaces have at the start, or none if the socket is bound to one address. Later ones are told by
    /// [`Node::set_local_addresses`](nebula_core::Node::set_local_addresses).
    pub fn local_addresses(mut self, addresses: Vec<LocalAddress>) -> Self {
        self.local_addresses = Some(addresses);
        self
    }

    /// Overlay port at which lighthouses answer DNS queries. Default: 53.
    pub fn dns_port(mut self, port: u16) -> Self {
        self.dns_port = port;
        self
    }

    /// Called a second after most of at least 64 connections have ended. The node has freed what they needed by then,
    /// but the allocator may keep it: that of glibc does, unless the program calls `malloc_trim` here. It must be
    /// quick, since packets wait while it runs.
    pub fn on_idle(mut self, release: impl Fn() + Send + 'static) -> Self {
        self.on_idle = Some(Box::new(release));
        self
    }

    /// Starts the node as a task of the tokio runtime that this is called in.
    ///
    /// # Errors
    /// Returns an error if the configuration contradicts itself, no certificate of the identity is valid now, or the
    /// socket cannot be opened.
    ///
    /// # Panics
    /// Panics outside of a tokio runtime with time and IO enabled.
    pub fn start(self) -> Result<Net, StartError> {
        let (net, driver) = self.build()?;
        tokio::spawn(driver.run());
        Ok(net)
    }

    /// Starts the node on a thread of its own, for programs without an async runtime.
    ///
    /// # Errors
    /// As [`Builder::start`], or if the thread cannot be started.
    pub fn start_blocking(self) -> Result<BlockingNet, StartError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (net, driver) = {
            let _inside = runtime.enter();
            self.build()?
        };
        let handle = runtime.handle().clone();
        let work = move || runtime.block_on(driver.run());
        std::thread::Builder::new().name("nebula-net".into()).spawn(work)?;
        Ok(BlockingNet::new(net, handle))
    }

    fn build(self) -> Result<(Net, Driver), StartError> {
        let Self { mut config, bind, socket, stack, allow, ends_with_tunnel, local_addresses, dns_port, on_idle } =
            self;
        check(&config)?;
        let socket = match socket {
            Some(socket) => socket,
            None => driver::bind(bind)?,
        };
        let socket = Socket::new(socket)?;
        config.listen_port = socket.port()?;
        let lighthouses = config.lighthouse.hosts.clone();
        let addresses = config.identity.networks().iter().map(|network| network.addr()).collect();
        let wall = clock::wall();
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| io::Error::other(error.to_string()))?;
        let stack = Stack::new(wall.at, addresses, stack, secret);
        let mut engine = Engine::new(config, wall, Seed::from_os()?)?;
        engine.set_coalesce(true, false);
        let local_addresses = local_addresses.unwrap_or_else(|| socket.interface_addresses());
        if !local_addresses.is_empty() {
            // What it has to send comes with the first timeout of the node.
            let _ = engine.control(wall.at, |node| node.set_local_addresses(local_addresses)).1;
        }
        let shared = Arc::new(Shared::new(stack, Arc::clone(engine.forwarder()), allow, ends_with_tunnel));
        let (sender, receiver) = mpsc::unbounded_channel();
        let driver = Driver::new(engine, socket, Arc::clone(&shared), receiver, on_idle);
        Ok((Net::new(shared, sender, lighthouses, dns_port), driver))
    }
}

/// Whether a node can run with a configuration.
pub(crate) fn check(config: &Config) -> Result<(), StartError> {
    config.validate()?;
    let causes: Vec<_> = config.identity.certificates().filter_map(dial::own_certificate).collect();
    if causes.len() < config.identity.certificates().count() {
        return Ok(());
    }
    causes.into_iter().next().map_or(Ok(()), |cause| Err(StartError::Identity(cause)))
}
