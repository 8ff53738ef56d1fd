//! One pod's data path: the tun device, the sockets and the driver that joins them, closed until there is a
//! certificate.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;
use nebula_cert::{CaPool, Identity};
use nebula_cni_contract::launch::LaunchSpec;
use nebula_cni_contract::netlink::route::answer_from;
use nebula_config::log::events;
use nebula_config::names::{self, NameWatch};
use nebula_config::{Settings, StaticHosts};
use nebula_core::firewall::Policy;
use nebula_core::io::{Driver, Handle, Options, Tun, UdpSocket};
use nebula_core::{Config, handover};
use nebula_linux::errno;
use nebula_linux::netns::{Namespace, NamespaceExecutor};
use nebula_linux::rtnetlink::MAIN_TABLE;
use nebula_linux::store::Store;

use crate::overlay::idle;
use crate::overlay::link::{self, LinkRoute, OverlayLink};
use crate::overlay::stored_tun::OpenTun;
use crate::pod::capture::{self, ClusterDirectory, Equipment, VerdictCounters};
use crate::pod::device::PodDevice;
use crate::pod::error::Error;

/// Owns the device, the sockets and the driver of a pod.
pub(crate) struct DataPath {
    place: Place,
    port: u16,
    /// The node's address, to which a renumbered pod answers from its overlay address.
    node_address: Option<IpAddr>,
    /// Networks that are routed to the device from the start; none in a captured pod.
    overlay: Vec<IpNet>,
    captured: Option<Captured>,
    state: State,
    /// `None` once it has been removed.
    device: Option<PodDevice>,
}

/// Makes the configuration of a running node what `new` says. What the node has from elsewhere stays: credentials, the
/// addresses of hosts, the cluster's directory and policies; and, if the path is closed, the rules that close it.
pub(crate) fn reload(config: &mut Config, new: &Settings, advertise: Option<Vec<SocketAddr>>, is_open: bool) {
    let rules = config.firewall.clone();
    new.apply(config);
    if !is_open {
        config.firewall = rules;
    }
    if let Some(advertise) = advertise {
        config.lighthouse.advertise = advertise;
    }
}

/// Networks of the overlay in whose family there is no own address.
fn without_address(overlay: &[IpNet], own: &[IpNet]) -> Vec<IpNet> {
    let has_family = |network: &IpNet| own.iter().any(|own| own.addr().is_ipv4() == network.addr().is_ipv4());
    overlay.iter().copied().filter(|network| !has_family(network)).collect()
}

/// Where the two ends of a data path are.
pub(crate) struct Place {
    /// Name of the tun device.
    pub(crate) device: String,
    /// The pod's namespace.
    pub(crate) pod: Namespace,
    /// Runs in that namespace with the capability to change links and routes; dropped when the data path opens.
    pub(crate) hand: Option<NamespaceExecutor>,
    /// Where the sockets are.
    pub(crate) underlay: NamespaceExecutor,
}

/// What the path of a captured pod has besides.
struct Captured {
    /// Routes to the device, which has no address.
    routes: Vec<LinkRoute>,
    /// For the driver; `None` once it has them.
    equipment: Option<Equipment>,
    /// What the cluster table says now.
    directory: Arc<ClusterDirectory>,
    /// What network policies said about its flows.
    verdicts: Arc<VerdictCounters>,
}

/// A device that this instance has, or will once the previous instance has stopped.
enum Device {
    Open(OpenTun),
    /// All queues. Until it stops, nothing is changed about the device.
    Inherited(Vec<OwnedFd>),
}

impl Device {
    /// Duplicates the descriptors.
    fn queues(&self) -> io::Result<Vec<OwnedFd>> {
        match self {
            Self::Open(open) => open.tun.queues().map(|queue| queue.try_clone_to_owned()).collect(),
            Self::Inherited(queues) => queues.iter().map(OwnedFd::try_clone).collect(),
        }
    }
}

enum State {
    /// Before the first certificate.
    Unopened { tun: Device, sockets: Vec<UdpSocket> },
    /// A driver owns both. It keeps running when the certificate expires, so that packets end here and take no other
    /// route.
    Running { handle: Handle, networks: Vec<IpNet>, names: Option<NameWatch> },
    /// Stopped, or opening it failed half-way.
    Lost,
}

impl DataPath {
    /// Creates the device, which nobody reads yet, and routes the overlay to it, or goes on with that of the store; or
    /// with the device whose queues are `inherited`, once the path is opened.
    pub(crate) fn new(
        place: Place,
        spec: &LaunchSpec,
        settings: &Settings,
        underlay: (Vec<UdpSocket>, u16),
        known: Option<(Arc<ClusterDirectory>, Arc<VerdictCounters>)>,
        (inherited, store): (Option<Vec<OwnedFd>>, &mut Store),
    ) -> Result<Self, Error> {
        let captured = known.map(|(directory, verdicts)| {
            // Who inherits knows the connections.
            let equipment = Some(Equipment::collect(spec, &place.pod, inherited.is_none())?);
            Ok(Captured { routes: capture::routes(spec), equipment, directory, verdicts })
        });
        let captured: Option<Captured> = captured.transpose()?;
        if captured.is_none() {
            // A captured pod reaches the same addresses on its primary network, too; the plugin has made unreachable
            // routes of another table.
            link::guard(&place.pod, &spec.overlay).map_err(link_failed)?;
        }
        // By its bare name: its directory is the current one.
        let heir = spec.device_socket().file_name().map(PathBuf::from).unwrap_or_default();
        let is_own = inherited.is_none();
        let (tun, device) = match inherited {
            None => place.open_tun(settings, heir, store)?,
            Some(queues) => place.check_tun(queues, settings, heir)?,
        };
        let routes = match &captured {
            Some(captured) => captured.routes.clone(),
            None => spec.overlay.iter().map(to_device).collect(),
        };
        let link = OverlayLink { routes, ..OverlayLink::new(&place.device, &settings.tun, Vec::new()) };
        if is_own {
            link.configure(&place.pod).map_err(link_failed)?;
        }
        let (sockets, port) = underlay;
        let node_address = spec.node_address.filter(|_| spec.renumber);
        let state = State::Unopened { tun, sockets };
        let overlay = if captured.is_some() { Vec::new() } else { spec.overlay.clone() };
        Ok(Self { place, port, node_address, overlay, captured, state, device: Some(device) })
    }

    /// The networks of the certificate that the path was opened with.
    pub(crate) fn networks(&self) -> Option<&[IpNet]> {
        match &self.state {
            State::Running { networks, .. } => Some(networks),
            State::Unopened { .. } | State::Lost => None,
        }
    }

    /// The running node.
    pub(crate) fn handle(&self) -> Option<&Handle> {
        match &self.state {
            State::Running { handle, .. } => Some(handle),
            State::Unopened { .. } | State::Lost => None,
        }
    }

    /// Duplicates the descriptors of the device and of the sockets, before the path is opened.
    ///
    /// # Errors
    /// Returns an error if there are no descriptors left.
    pub(crate) fn descriptors(&self) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
        let State::Unopened { tun, sockets } = &self.state else { return Ok((Vec::new(), Vec::new())) };
        let sockets = sockets.iter().map(|socket| socket.as_fd().try_clone_to_owned());
        Ok((tun.queues()?, sockets.collect::<io::Result<_>>()?))
    }

    /// Opens the path with the first certificate, and with what the previous instance handed over, if it did.
    /// `ended` receives the driver's result.
    pub(crate) fn open(
        &mut self,
        identity: &Identity,
        trust: &CaPool,
        settings: &Settings,
        handed_over: Option<handover::State>,
        ended: impl FnOnce(Result<(), nebula_core::io::Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let State::Unopened { tun, sockets } = std::mem::replace(&mut self.state, State::Lost) else {
            return Err(Error::Broken("it was lost while opening".into()));
        };
        let networks = identity.networks().to_vec();
        let hand = self.place.hand.take().ok_or_else(|| Error::Broken("it was opened before".into()))?;
        // Of a captured pod the address stays on its primary interface, and the networks are reached there, too.
        let on_device = if self.captured.is_some() { Vec::new() } else { networks.clone() };
        let mut link = OverlayLink::new(&self.place.device, &settings.tun, on_device.clone());
        let bare = without_address(&self.overlay, &networks);
        for network in &bare {
            tracing::warn!(%network, "the pod has no address in this overlay network, which it cannot reach");
        }
        link.routes.extend(self.captured.iter().flat_map(|captured| captured.routes.iter().cloned()));
        // What the device of a former instance may have. Routes to networks without an own address are withdrawn below.
        let mut complete = link.clone();
        complete.routes.extend(self.overlay.iter().map(to_device));
        let node = self.node_address;
        let (wanted, routines, offloads) = (self.place.device.clone(), settings.routines, settings.tun.offloads);
        let configured = hand.run("overlay-link", {
            move || {
                let (has_leftovers, tun) = match tun {
                    Device::Open(open) => (open.has_leftovers(), open.tun),
                    Device::Inherited(queues) => {
                        let tun = Tun::adopt(queues, &wanted, routines, offloads);
                        let refused = |source| link::Error::Refused {
                            device: wanted.clone(),
                            what: "go on with its queues".to_owned(),
                            source,
                        };
                        (false, tun.map_err(refused)?)
                    }
                };
                link::guard_here(&on_device)?;
                if has_leftovers {
                    complete.remove_leftovers_here()?;
                }
                link.configure_here()?;
                // Without an address there the kernel would send packets with one that no peer accepts.
                link.withdraw_here(&bare)?;
                answer_the_node(node, &on_device);
                Ok(tun)
            }
        });
        let tun = configured.map_err(|error| link_failed(error.into()))?.map_err(link_failed)?;
        // From here on no thread has any capability.
        drop(hand);
        let advertise = names::resolve_once(&settings.advertise);
        let mut config = settings.to_config(identity.clone(), trust.clone(), self.port, advertise);
        let what = "cannot start the tunnel";
        // The node's threads list the interfaces of the namespace in which they are started. All pods of a node have an
        // equal claim to its processors, so no priority is raised.
        let mut options = Options::default();
        options.on_idle = Some(idle::release);
        // The file was checked when it was read, and names in it are looked up later.
        options.check_config = false;
        if let Some(captured) = &mut self.captured
            && let Some(equipment) = captured.equipment.take()
        {
            let known = (Arc::clone(&captured.directory), Arc::clone(&captured.verdicts));
            equipment.hand_over(&mut config, &mut options, known);
        }
        let start = move || match handed_over {
            Some(state) => Driver::take_over(config, Some(tun), sockets, options, state),
            None => Driver::start(config, Some(tun), sockets, options),
        };
        // Starting needs a deep stack, which is freed when its thread ends.
        let start = move || Namespace::Own.run("driver-start", start);
        let started = self.place.underlay.run("driver-start", start).and_then(|started| started);
        let started = started.map_err(|error| Error::set_up(what, error))?;
        let mut driver = started.map_err(|error| Error::set_up(what, error))?;
        let handle = driver.handle();
        let received = driver.take_events();
        spawn("driver", move || {
            // Returns when the node's own thread ends, which is the first to do so.
            events::log(received, |_| {});
            ended(driver.run());
        })?;
        let names = settings.static_hosts.has_names().then(|| watch_names(&settings.static_hosts, &handle));
        let names = names.transpose().map_err(thread_failed)?;
        self.state = State::Running { handle, networks, names };
        Ok(())
    }

    /// Switches to another certificate: new handshakes use it at once, and live tunnels migrate to it.
    pub(crate) fn swap(&self, identity: Identity, trust: CaPool) {
        if let Some(handle) = self.handle() {
            handle.reconfigure(move |config| {
                config.trust = trust;
                config.identity = identity;
            });
        }
    }

    /// Replaces the trust; tunnels to peers that are no longer trusted are closed.
    pub(crate) fn set_trust(&self, trust: CaPool) {
        if let Some(handle) = self.handle() {
            handle.reconfigure(move |config| config.trust = trust);
        }
    }

    /// Switches to another version of the cluster table, at once or when the path opens.
    pub(crate) fn set_directory(&mut self, directory: Arc<ClusterDirectory>) {
        let Some(captured) = &mut self.captured else { return };
        captured.directory = Arc::clone(&directory);
        let verdicts = Arc::clone(&captured.verdicts);
        if let Some(handle) = self.handle() {
            handle.reconfigure(move |config| capture::replace(config, directory, verdicts));
        }
    }

    /// Switches to the lighthouses and static hosts in `settings`. Tunnels stay as they are.
    pub(crate) fn set_lighthouses(&mut self, settings: &Settings) {
        let State::Running { handle, names, .. } = &mut self.state else { return };
        let (hosts, lighthouses) = (&settings.static_hosts, settings.lighthouses.clone());
        let endpoints =
            names.as_ref().map_or_else(|| hosts.endpoints(&Default::default()), |names| names.endpoints(hosts));
        handle.reconfigure(move |config| {
            config.static_hosts = endpoints;
            config.lighthouse.hosts = lighthouses;
        });
        match names {
            Some(names) => names.replace(hosts.clone()),
            None if hosts.has_names() => match watch_names(hosts, handle) {
                Ok(watch) => *names = Some(watch),
                Err(error) => tracing::error!(%error, "Names of lighthouses cannot be looked up"),
            },
            None => {}
        }
    }

    /// Goes on with `new` in place of `old`, but for what needs another start and for the device, which this process
    /// may no longer change. Live flows are judged again by the new rules. A path that is closed stays so.
    pub(crate) fn reconfigure(&mut self, new: &Settings, old: &Settings, is_open: bool) {
        self.set_lighthouses(new);
        let Some(handle) = self.handle() else { return };
        let advertise = (old.advertise != new.advertise).then(|| names::resolve_once(&new.advertise));
        let new = new.clone();
        handle.reconfigure(move |config| reload(config, &new, advertise, is_open));
    }

    /// Blocks all traffic. The device and its routes stay, so that nothing meant for the overlay leaves in the clear.
    pub(crate) fn close(&self) {
        if let Some(handle) = self.handle() {
            handle.reconfigure(|config| {
                config.firewall = Policy::default();
                config.trust = CaPool::new();
            });
        }
    }

    /// Restores the firewall rules after [`DataPath::close`]; [`DataPath::swap`] restores the trust.
    pub(crate) fn reopen(&self, settings: &Settings) {
        if let Some(handle) = self.handle() {
            let firewall = settings.firewall.clone();
            handle.reconfigure(move |config| config.firewall = firewall);
        }
    }

    /// Stops the driver; `false` if none was running.
    pub(crate) fn stop(&mut self) -> bool {
        let State::Running { handle, names, .. } = std::mem::replace(&mut self.state, State::Lost) else {
            return false;
        };
        drop(names);
        handle.stop();
        true
    }

    /// Removes the device from the pod, once everything has ended.
    pub(crate) fn remove_device(&mut self) {
        if let Some(Err(error)) = self.device.take().map(PodDevice::remove) {
            tracing::debug!(%error, "The tun device may still be there");
        }
    }
}

impl Place {
    fn open_tun(&self, settings: &Settings, heir: PathBuf, store: &mut Store) -> Result<(Device, PodDevice), Error> {
        let what = || format!("cannot create the tun device {} in the pod", self.device);
        let opened = self.pod.run("tun", || {
            let open = OpenTun::new(store, &self.device, settings.routines, settings.tun.offloads)?;
            let device = PodDevice::hold(open.tun.name(), open.tun.hold()?, heir)?;
            Ok((Device::Open(open), device))
        });
        opened.map_err(|error| Error::set_up(what(), error))?.map_err(|error| Error::set_up_io(what(), error))
    }

    fn check_tun(
        &self,
        queues: Vec<OwnedFd>,
        settings: &Settings,
        heir: PathBuf,
    ) -> Result<(Device, PodDevice), Error> {
        let what = || format!("cannot go on with the tun device {} in the pod", self.device);
        let checked = self.pod.run("tun", || {
            let name = Tun::check_kept(&queues, &self.device, settings.routines)?;
            let first = queues.first().ok_or(io::ErrorKind::NotFound)?.try_clone()?;
            Ok((Device::Inherited(queues), PodDevice::hold(&name, first, heir)?))
        });
        checked.map_err(|error| Error::set_up(what(), error))?.map_err(|error| Error::set_up_io(what(), error))
    }
}

fn to_device(network: &IpNet) -> LinkRoute {
    LinkRoute { network: *network, mtu: None, metric: 0, source: None, table: MAIN_TABLE }
}

fn answer_the_node(node: Option<IpAddr>, networks: &[IpNet]) {
    let own = networks.iter().map(IpNet::addr).find(|own| node.is_some_and(|node| node.is_ipv4() == own.is_ipv4()));
    if let (Some(node), Some(own)) = (node, own)
        && let Err(error) = answer_from(node, own)
    {
        tracing::warn!(%node, error = errno::text(&error), "UDP answers to the node will come from the pod's other address");
    }
}

fn watch_names(hosts: &StaticHosts, handle: &Handle) -> io::Result<NameWatch> {
    let handle = handle.clone();
    NameWatch::start(hosts.clone(), move |endpoints| {
        handle.reconfigure(move |config| config.static_hosts = endpoints);
    })
}

pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(thread_failed)
}

fn thread_failed(error: io::Error) -> Error {
    Error::set_up_io("cannot start a thread (clone3(2) must be allowed, or answered with ENOSYS)", error)
}

fn link_failed(error: link::Error) -> Error {
    Error::set_up("cannot configure the tun device in the pod", error)
}
