//! Starts, controls and ends the threads that run a `Node` and its `Forwarder`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::VerifiedCertificate;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::capture::OpenedBefore;
use crate::config::InvalidConfig;
use crate::counters::Direction;
use crate::diagnosis::Diagnosis;
use crate::handover::State;
use crate::io::control::mailbox::Work;
use crate::io::control::{Control, EndOfControl, Idle, RareWork, TablePeak};
use crate::io::interfaces::InterfaceWatch;
use crate::io::shared::Shared;
use crate::io::threads::inbound::Inbound;
use crate::io::threads::outbound::Outbound;
use crate::io::threads::pacing::Duty;
use crate::io::threads::{QueueThread, SocketThread};
use crate::io::tun::Queue;
use crate::io::{Bypass, Tun, TunOffloads, UdpSocket, clock};
use crate::tunnel::LocalIndex;
use crate::wire::ip::FlowKey;
use crate::{
    Config, Event, FlowTrace, GatewayStatus, NoRandomness, Node, OfferedRelay, Part, RelayStatus, Seed, TableSizes,
    TunnelStatus, Whereabouts,
};

// Address space only: just the pages that are used cost memory.
const DATA_STACK: usize = 256 << 10;
const CONTROL_STACK: usize = 1 << 20;

const MAX_EVENTS: usize = 64;
const INTERFACES_INTERVAL: Duration = Duration::from_secs(10);

/// Why the driver could not start or had to stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{what}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The operating system gave no random bytes.
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
    /// There was no underlay socket to use.
    #[error("a driver needs at least one UDP socket")]
    NoSocket,
    /// A thread panicked, which is a bug in this program.
    #[error("thread {0} ended unexpectedly; this is a bug, its message is on standard error")]
    Panicked(String),
}

impl Error {
    /// Whether somebody removed the tun device: the kernel says so of a queue, which no other error does.
    #[must_use]
    pub fn is_device_gone(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.raw_os_error() == Some(libc::EBADFD))
    }

    pub(super) fn io(what: &'static str, errno: nix::errno::Errno) -> Self {
        Self::Io { what, source: errno.into() }
    }
}

/// Settings of the driver itself. The defaults affect nothing but its own threads, memory and descriptors: whatever
/// concerns the whole process (signals, the allocator, pages of the program) is left to the program, and the threads
/// are scheduled as usual.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Read interface addresses and advertise them to lighthouses.
    pub advertise_interfaces: bool,
    /// Under load, give each direction of a tun queue a thread of its own; otherwise one serves both.
    pub two_threads: bool,
    /// While super-packets or few packets arrive, run data threads that keep up ahead of other programs (niceness -20).
    /// Needs CAP_SYS_NICE; without it, or with a niceness set from outside, this has no effect. Off by default.
    pub raise_priority: bool,
    /// Processors for the data threads: those of the first routine run on the first one, and so on, starting over after
    /// the last. Empty: any processor.
    pub processors: Vec<usize>,
    /// Called by the control thread whenever it has become idle after work that needed much memory, so that the program
    /// can release some (with `malloc_trim`, for example). It must be quick, since handshakes wait while it runs.
    /// `None`: nothing is called.
    pub on_idle: Option<fn(Idle)>,
    /// Refuse a configuration that [`Config::validate`] finds problems in. Switch it off to complete the configuration
    /// later with [`Handle::reconfigure`]: to look up the names of lighthouses while the node runs, for example.
    pub check_config: bool,
    /// Where packets go that do not belong to the overlay, see [`crate::Config::capture`]. Without that, nothing goes
    /// there.
    pub bypass: Bypass,
    /// Under capture: flows that programs opened before this start. They keep their endpoints, also if the other end
    /// speaks first.
    pub opened_before: Vec<OpenedBefore>,
}

impl Default for Options {
    fn default() -> Self {
        // With fewer processors, a second thread takes time from the applications and wakes more often for the same
        // packets.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            advertise_interfaces: true,
            two_threads: processors > 2,
            raise_priority: false,
            processors: Vec::new(),
            on_idle: None,
            check_config: true,
            bypass: Bypass::default(),
            opened_before: Vec::new(),
        }
    }
}

/// Runs one node until it is stopped. Dropping it stops it.
///
/// It does nothing to the process beyond what [`Options`] ask for: it blocks no signal, changes no priority of the
/// program's threads, and tunes neither the allocator nor memory mappings. The one exception is registering for
/// membarrier, which has no effect on other code (see [`register_barriers`]).
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    events: Option<Receiver<Event>>,
}

/// Controls a running driver. Cheap to clone; usable from any thread.
///
/// Methods with a result wait for the control thread, which answers between two packets: within microseconds as a rule,
/// later while it works on a flood of handshakes. A thread that must not wait, such as one of an async runtime, uses
/// [`Handle::post`] and is answered through a channel of its own.
#[derive(Debug, Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Driver {
    /// Starts the threads. The control thread runs in the caller's network namespace. Without a tun device packets for
    /// this node's overlay addresses are counted and dropped.
    ///
    /// # Errors
    /// Returns an error if the configuration contradicts itself, if there is no socket, or if a thread or descriptor
    /// could not be created.
    pub fn start(config: Config, tun: Option<Tun>, sockets: Vec<UdpSocket>, options: Options) -> Result<Self, Error> {
        Self::start_with(config, tun, sockets, options, None)
    }

    /// Like [`Driver::start`], with what [`Handle::hand_over`] of an earlier driver returned, in this process or in
    /// another one. Device and sockets have to be those of that driver, or others for the same descriptors.
    ///
    /// # Errors
    /// The same as [`Driver::start`].
    pub fn take_over(
        config: Config,
        tun: Option<Tun>,
        sockets: Vec<UdpSocket>,
        options: Options,
        state: State,
    ) -> Result<Self, Error> {
        Self::start_with(config, tun, sockets, options, Some(state))
    }

    fn start_with(
        mut config: Config,
        tun: Option<Tun>,
        sockets: Vec<UdpSocket>,
        options: Options,
        state: Option<State>,
    ) -> Result<Self, Error> {
        if options.check_config {
            config.validate()?;
        }
        let first = sockets.first().ok_or(Error::NoSocket)?;
        if config.listen_port == 0 {
            let address = first.local_addr();
            config.listen_port =
                address.map_err(|source| Error::Io { what: "cannot read the port of the UDP socket", source })?.port();
        }
        for socket in &sockets {
            if let Err(error) = socket.ignore_path_errors(config.path_mtu.is_some()) {
                tracing::debug!(%error, "the kernel obeys ICMP errors about the size of paths");
            }
        }
        let advertises = options.advertise_interfaces && !config.lighthouse.am_lighthouse;
        let interval = config.lighthouse.interval.unwrap_or(INTERFACES_INTERVAL);
        let name = tun.as_ref().map(|tun| tun.name().to_owned());
        let interfaces = advertises.then(|| InterfaceWatch::new(name, interval));

        let seed = Seed::from_os()?;
        let wall = clock::wall();
        let (mut node, forwarder) = match state {
            Some(state) => Node::take_over(config, wall.at, wall, seed, state),
            None => Node::new(config, wall.at, wall, seed),
        };
        node.resume_flows(wall.at, &options.opened_before);
        // Boxed because it is large: each move of it would grow a stack for good.
        let node = Box::new(node);
        let shared = Arc::new(Shared::new(forwarder)?);
        let sockets: Vec<_> = sockets.into_iter().map(Arc::new).collect();
        let offloads = tun.as_ref().map_or(TunOffloads::None, Tun::offloads);
        let queues: Vec<_> = tun.map(Tun::take_queues).unwrap_or_default().into_iter().map(Arc::new).collect();
        let (sender, events) = sync_channel(MAX_EVENTS);
        let mut driver = Self { shared: Arc::clone(&shared), threads: Vec::new(), events: Some(events) };

        let end = EndOfControl(Arc::clone(&shared));
        let control = Control {
            shared: Arc::clone(&shared),
            node,
            socket: Arc::clone(&sockets[0]),
            queue: queues.first().map(Arc::clone),
            wall,
            events: sender,
            interfaces,
            asleep: clock::asleep(),
            rare_work: RareWork::default(),
            flows: TablePeak::default(),
            on_idle: options.on_idle,
            bypass: options.bypass.clone(),
        };
        driver.spawn("nebula-control".into(), CONTROL_STACK, move || {
            let _end = end;
            control.run()
        })?;
        driver.spawn_data_threads(&queues, offloads, &sockets, &options)?;
        Ok(driver)
    }

    fn spawn_data_threads(
        &mut self,
        queues: &[Arc<Queue>],
        offloads: TunOffloads,
        sockets: &[Arc<UdpSocket>],
        options: &Options,
    ) -> Result<(), Error> {
        let Options { two_threads, raise_priority, .. } = *options;
        let place = |index: usize| options.processors.get(index.checked_rem(options.processors.len())?).copied();
        let mut duties = Vec::with_capacity(queues.len());
        for (index, queue) in queues.iter().enumerate() {
            let socket = Arc::clone(&sockets[index % sockets.len()]);
            let outbound = Outbound::new(Arc::clone(&self.shared), Arc::clone(queue), socket, options.bypass.clone())?;
            let duty = Arc::new(Duty::new(outbound)?);
            let relieved = index < sockets.len();
            if two_threads || !relieved {
                let thread = QueueThread::new(Arc::clone(&self.shared), Arc::clone(&duty), relieved, raise_priority);
                let (processor, pass) = (place(index), self.shared.gate.admit());
                self.spawn(format!("nebula-out-{index}"), DATA_STACK, move || {
                    stay_on(processor);
                    thread.run(&pass)
                })?;
            }
            duties.push(duty);
        }
        for (index, socket) in sockets.iter().enumerate() {
            let queue = (!queues.is_empty()).then(|| Arc::clone(&queues[index % queues.len()]));
            let inbound = Inbound::new(Arc::clone(&self.shared), queue, Arc::clone(socket), offloads)?;
            let mut thread = SocketThread::new(Arc::clone(&self.shared), inbound, raise_priority);
            if let Some(duty) = duties.get(index) {
                thread.serve_also(Arc::clone(duty), two_threads);
            }
            let (processor, pass) = (place(index), self.shared.gate.admit());
            self.spawn(format!("nebula-in-{index}"), DATA_STACK, move || {
                stay_on(processor);
                thread.run(&pass)
            })?;
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        name: String,
        stack: usize,
        body: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let watch = PanicWatch { shared, name: name.clone() };
        let thread = Builder::new().name(name).stack_size(stack).spawn(move || {
            let watch = watch;
            if let Err(error) = body() {
                watch.shared.mailbox.fail(error);
            }
        });
        self.threads.push(thread.map_err(|source| Error::Io { what: "cannot start a thread", source })?);
        Ok(())
    }

    /// Returns a handle to this driver.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared) }
    }

    /// Takes the receiver of the events, of which there is one: `None` if it was taken before. The channel is bounded:
    /// while nobody reads, new events are dropped and counted.
    #[must_use]
    pub fn take_events(&mut self) -> Option<Receiver<Event>> {
        self.events.take()
    }

    /// Waits until [`Handle::stop`] or a fatal error; closes every tunnel before it returns.
    ///
    /// # Errors
    /// Returns an error if a device or socket failed for good, or a thread panicked.
    pub fn run(mut self) -> Result<(), Error> {
        self.join();
        self.shared.mailbox.take_failure().map_or(Ok(()), Err)
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A panic has been reported to the mailbox.
            let _ = thread.join();
        }
    }
}

/// Pins the calling thread to one processor, if one is configured. A failure is only logged.
fn stay_on(processor: Option<usize>) {
    let Some(processor) = processor else { return };
    let mut only = CpuSet::new();
    let set = only.set(processor).and_then(|()| sched_setaffinity(Pid::from_raw(0), &only));
    if let Err(errno) = set {
        tracing::warn!(processor, %errno, "a data thread runs wherever there is room");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.mailbox.stop();
        self.join();
    }
}

/// Ends the driver when a thread panics.
#[derive(Debug)]
struct PanicWatch {
    shared: Arc<Shared>,
    name: String,
}

impl Drop for PanicWatch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.mailbox.fail(Error::Panicked(std::mem::take(&mut self.name)));
        }
    }
}

impl Handle {
    /// Asks the driver to close all tunnels and end.
    pub fn stop(&self) {
        self.shared.mailbox.stop();
    }

    /// Has the control thread edit the node's configuration before it handles another packet: a packet sees either the
    /// whole change or nothing of it. Returns the parts that changed, all of them in force; `None` if the driver has
    /// ended. See [`crate::Node::reconfigure`].
    pub fn reconfigure(&self, change: impl FnOnce(&mut Config) + Send + 'static) -> Option<Vec<Part>> {
        self.with_node(move |node, now| node.reconfigure(now, change))
    }

    /// See [`crate::Node::connect`].
    pub fn connect(&self, peer: IpAddr) {
        self.shared.mailbox.command(Work::new(move |node, now| node.connect(now, peer)));
    }

    /// Live tunnels; empty if the driver has ended.
    #[must_use]
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        self.with_node(|node, _| node.tunnels()).unwrap_or_default()
    }

    /// See [`crate::Node::table_sizes`]; all 0 if the driver has ended.
    #[must_use]
    pub fn table_sizes(&self) -> TableSizes {
        self.with_node(|node, _| node.table_sizes()).unwrap_or_default()
    }

    /// See [`crate::Node::gateways`]; empty if the driver has ended.
    #[must_use]
    pub fn gateways(&self, limit: usize) -> Vec<GatewayStatus> {
        self.with_node(move |node, _| node.gateways(limit)).unwrap_or_default()
    }

    /// See [`crate::Forwarder::flows_by_gateway`].
    #[must_use]
    pub fn flows_by_gateway(&self) -> BTreeMap<(IpNet, IpAddr), usize> {
        self.shared.forwarder.flows_by_gateway()
    }

    /// See [`crate::Forwarder::moved_flows`].
    #[must_use]
    pub fn moved_flows(&self) -> usize {
        self.shared.forwarder.moved_flows()
    }

    /// See [`crate::Node::handshaking`].
    #[must_use]
    pub fn handshaking(&self) -> Vec<IpAddr> {
        self.with_node(|node, _| node.handshaking()).unwrap_or_default()
    }

    /// See [`crate::Node::close`].
    #[must_use]
    pub fn close(&self, peer: IpAddr, quietly: bool) -> usize {
        self.with_node(move |node, now| node.close(now, peer, quietly)).unwrap_or_default()
    }

    /// See [`crate::Node::inquire`].
    pub fn inquire(&self, peer: IpAddr) {
        self.shared.mailbox.command(Work::new(move |node, now| node.inquire(now, peer)));
    }

    /// See [`crate::Node::named`].
    #[must_use]
    pub fn named(&self, name: String) -> Option<IpAddr> {
        self.with_node(move |node, _| node.named(&name)).flatten()
    }

    /// See [`crate::Node::probe`].
    pub fn probe(&self, peer: IpAddr) {
        self.shared.mailbox.command(Work::new(move |node, now| node.probe(now, peer)));
    }

    /// See [`crate::Node::whereabouts`].
    #[must_use]
    pub fn whereabouts(&self, peer: IpAddr) -> Whereabouts {
        self.with_node(move |node, _| node.whereabouts(peer)).unwrap_or_default()
    }

    /// See [`crate::Node::diagnosis`]; returned with the time at which it was taken. `None` if the driver has ended.
    #[must_use]
    pub fn diagnosis(&self) -> Option<(Instant, Diagnosis)> {
        self.with_node(|node, now| (now, node.diagnosis(now)))
    }

    /// See [`crate::Node::relays`]; empty if the driver has ended.
    #[must_use]
    pub fn relays(&self) -> Vec<RelayStatus> {
        self.with_node(|node, _| node.relays()).unwrap_or_default()
    }

    /// See [`crate::Node::offered_relays`]; empty if the driver has ended.
    #[must_use]
    pub fn offered_relays(&self) -> Vec<OfferedRelay> {
        self.with_node(|node, _| node.offered_relays()).unwrap_or_default()
    }

    /// See [`crate::Node::trace`]; `None` if the driver has ended.
    #[must_use]
    pub fn trace(&self, direction: Direction, flow: FlowKey) -> Option<FlowTrace> {
        self.with_node(move |node, now| node.trace(now, direction, &flow))
    }

    /// Has the control thread run `work` with the node, and waits for the result. `None` if the driver has ended, or if
    /// called within such work, where waiting would never end.
    pub fn with_node<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Node, Instant) -> T + Send + 'static,
    ) -> Option<T> {
        if self.shared.mailbox.is_read_here() {
            return None;
        }
        let (reply, answer) = sync_channel(1);
        // The caller may have given up.
        self.shared.mailbox.command(Work::new(move |node, now| drop(reply.try_send(work(node, now)))));
        answer.recv().ok()
    }

    /// Has the control thread run `work` with the node, and never waits: `work` sends its result wherever the caller
    /// wants it, for example into a oneshot channel of an async runtime. Returns `false`, and drops `work`, if the
    /// driver has ended or too much work waits already.
    pub fn post(&self, work: impl FnOnce(&mut Node, Instant) + Send + 'static) -> bool {
        self.shared.mailbox.try_command(Work::new(work))
    }

    /// What [`Handle::hand_over`] would return, but without keys; the driver goes on. `None` if it has ended.
    #[must_use]
    pub fn offer(&self) -> Option<State> {
        self.with_node(|node, now| node.offer(now))
    }

    /// Ends the driver without a word to its peers, for another process to go on with its device, its sockets and this:
    /// see [`crate::handover`] and [`Driver::take_over`]. Once this returns, nothing is sent or received any more, and
    /// what arrives waits in the queues of the device and the sockets.
    ///
    /// `None` if the driver has ended or is to stop, or goes on because a data thread did not pause within a second.
    #[must_use]
    pub fn hand_over(&self) -> Option<State> {
        if self.shared.mailbox.is_read_here() {
            return None;
        }
        let (reply, handed_over) = sync_channel(1);
        self.shared.mailbox.hand_over(reply);
        handed_over.recv().ok()
    }

    /// Certificate of the peer of a live tunnel.
    #[must_use]
    pub fn certificate(&self, tunnel: LocalIndex) -> Option<VerifiedCertificate> {
        Some(self.shared.forwarder.tunnels().by_index(tunnel)?.peer.as_ref().clone())
    }

    /// Number of flows the firewall tracks.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.shared.forwarder.flows()
    }

    /// Sum of all lanes' counters by name, for metrics.
    #[must_use]
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        let mut sum = self.shared.forwarder.counters();
        self.shared.counters.add_to(&mut sum);
        sum
    }
}

/// Registers this process for the memory barriers (membarrier) that the tables of the data path need. In a process with
/// several threads the kernel waits until all processors have passed a quiescent state, which takes some ten
/// milliseconds: call it before threads are started. Registering again costs nothing.
pub fn register_barriers() {
    // Creating the first table registers; there is no other way to ask for it.
    drop(papaya::HashMap::<(), ()>::new());
}
