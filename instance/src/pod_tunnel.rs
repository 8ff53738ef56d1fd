//! One pod's tunnel: the tun in the pod's namespace, the underlay socket in the host's, the certificate from the CA.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{CaPool, UnixTime, issuance};
use nebula_cni_plugin::launch::{LaunchSpec, Mode};
use nebula_core::firewall::Policy;
use nebula_core::io::{Driver, Handle, Options, Tun, UdpSocket, release_program_pages};

use crate::admin::{Shared, Status, StatusSocket};
use crate::ca_client::{self, CaClient, Issued};
use crate::config_file::{Settings, Value};
use crate::daemon::{chain, socket_options};
use crate::metrics::Handshakes;
use crate::names::{self, NameWatch};
use crate::netns::Namespace;
use crate::overlay_link::{LinkRoute, OverlayLink};
use crate::life_cycle::{GiveUp, Install, LifeCycle, Moment, Step};
use crate::signals::{Signal, Signals, go_name};
use crate::{errno, events, log, notify};

/// Why an instance ended other than by being told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The launch file is no use.
    #[error("launch file {file}: {cause}")]
    Launch {
        /// Path.
        file: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Something on this node could not be set up.
    #[error("{what}: {cause}")]
    SetUp {
        /// What was tried.
        what: String,
        /// Why not.
        cause: String,
    },
    /// The CA refused a certificate.
    #[error("ca-denied: {0}")]
    Denied(String),
    /// The CA could not be asked in time.
    #[error("ca-unavailable: {0}")]
    Unavailable(String),
    /// The data path broke.
    #[error("the tunnel failed: {0}")]
    Broken(String),
}

/// Reads the launch contract.
///
/// # Errors
/// Unreadable, not of the form, or of another version.
pub fn read_launch(path: &Path) -> Result<LaunchSpec, Error> {
    let refuse = |cause: String| Error::Launch { file: path.display().to_string(), cause };
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| refuse(errno::text(&error)))?;
    file.take(MAX_LAUNCH + 1).read_to_end(&mut text).map_err(|error| refuse(errno::text(&error)))?;
    if text.len() as u64 > MAX_LAUNCH {
        return Err(refuse(format!("longer than {} KiB", MAX_LAUNCH >> 10)));
    }
    let tree: serde_json::Value = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
    // Before the rest: another version may have other fields.
    if tree["version"] != LaunchSpec::VERSION {
        return Err(refuse(format!(
            "version {} is not {}, the one this instance knows; install plugin and instance from one release",
            tree["version"],
            LaunchSpec::VERSION
        )));
    }
    serde_json::from_value(tree).map_err(|error| refuse(error.to_string()))
}

/// Serves the pod until it is gone, a signal asks to stop, or something fails.
///
/// # Errors
/// See [`Error`]; everything made is removed again.
pub fn serve(spec: LaunchSpec) -> Result<(), Error> {
    let set_up = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| Error::SetUp { what, cause: errno::text(&error) }
    };
    let signals = Signals::block().map_err(set_up("cannot set up signal handling"))?;
    // Fails if we lead a session already, which is as good.
    let _ = nix::unistd::setsid();
    let settings = Settings::read_without_pki(&Value::from(&spec.nebula))
        .map_err(|error| Error::SetUp { what: "tunnel configuration".to_owned(), cause: error.to_string() })?;
    log::start(settings.logging, log::Output::Stderr);
    settings.remarks.iter().for_each(|remark| tracing::warn!("{remark}"));

    let namespace = Namespace::At { path: spec.netns.clone(), id: spec.netns_id };
    let tun = create_tun(&spec, &settings, &namespace)?;
    let (sockets, port) = bind_in_range(&spec, &settings)?;
    let status = Arc::new(Mutex::new(Status {
        pod: format!("{}/{}", spec.pod.namespace, spec.pod.name),
        uid: spec.pod.uid.clone(),
        device: spec.device.clone(),
        port,
        open: false,
        identity: None,
        handle: None,
        last_error: None,
    }));
    let _status_socket = StatusSocket::serve(&spec.status_socket, Arc::clone(&status))
        .map_err(set_up(&format!("cannot make the status socket {}", spec.status_socket.display())))?;

    let (sender, inputs) = channel();
    watch_signals(signals, sender.clone()).map_err(set_up("cannot start a thread"))?;
    let client = CaClient::new(
        spec.ca.clone(),
        issuance::Pod {
            namespace: spec.pod.namespace.clone(),
            name: spec.pod.name.clone(),
            uid: spec.pod.uid.clone(),
            address: spec.pod_address,
        },
    );
    let mut pod = PodTunnel {
        life: LifeCycle::new(spec.mode, Duration::from_secs(spec.budget_seconds), wall_clock(), random()),
        path: DataPath::Unopened { tun, sockets },
        spec,
        settings,
        namespace,
        status,
        sender,
        client,
        port,
    };
    if pod.spec.mode == Mode::Lazy {
        // Up but without a reader: what is routed to it goes nowhere.
        let to_device = |network: &IpNet| LinkRoute { network: *network, mtu: None, metric: 0, source: None };
        let routes = pod.spec.overlay.iter().map(to_device).collect();
        OverlayLink { routes, ..pod.link(Vec::new()) }
            .configure(&pod.namespace)
            .map_err(|error| link_failed(&error))?;
        notify::ready();
    }
    pod.run(&inputs)
}

struct PodTunnel {
    spec: LaunchSpec,
    settings: Settings,
    namespace: Namespace,
    status: Shared,
    sender: Sender<Input>,
    client: CaClient,
    life: LifeCycle,
    path: DataPath,
    port: u16,
}

/// What the threads around the owner report.
enum Input {
    Signal(Signal),
    Answer(Box<Result<Issued, ca_client::Error>>),
    DriverEnded(Result<(), nebula_core::io::Error>),
}

enum DataPath {
    /// Before the first certificate.
    Unopened { tun: Tun, sockets: Vec<UdpSocket> },
    /// A driver owns both. It stays when the certificate expires, so that packets end here and do not go around.
    Running { handle: Handle, networks: Vec<IpNet>, names: Option<NameWatch> },
    /// An opening failed half-way.
    Lost,
}

impl PodTunnel {
    fn run(&mut self, inputs: &Receiver<Input>) -> Result<(), Error> {
        let mut gone_since = None;
        loop {
            let now = wall_clock();
            while let Some(step) = self.life.poll(now) {
                match step {
                    Step::Ask { within } => self.ask(within)?,
                    Step::Close => self.close(),
                    Step::GiveUp(GiveUp::Denied(cause)) => return Err(Error::Denied(cause)),
                    Step::GiveUp(GiveUp::Unavailable(cause)) => return Err(Error::Unavailable(cause)),
                }
            }
            let wait = self.life.deadline().map_or(NETNS_INTERVAL, |at| at.saturating_sub(now));
            match inputs.recv_timeout(wait.min(NETNS_INTERVAL)) {
                Ok(Input::Signal(Signal::SIGHUP)) => {
                    tracing::info!("Caught HUP; a pod's configuration does not change")
                }
                Ok(Input::Signal(signal)) => {
                    tracing::info!(signal = go_name(signal), "Caught signal, shutting down");
                    self.stop(inputs);
                    return Ok(());
                }
                Ok(Input::Answer(answer)) => self.answered(*answer)?,
                Ok(Input::DriverEnded(result)) => {
                    let cause = result.err().map_or_else(|| "it ended by itself".to_owned(), |error| chain(&error));
                    return Err(Error::Broken(cause));
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if self.namespace.still_exists() {
                gone_since = None;
            } else if wall_clock().saturating_sub(*gone_since.get_or_insert_with(wall_clock)) >= GONE_FOR {
                // The open tun would keep the namespace, its links and the pod's address alive.
                tracing::info!(netns = %self.spec.netns.display(), "The pod's network namespace is gone, ending");
                self.stop(inputs);
                return Ok(());
            }
        }
    }

    fn ask(&self, within: Duration) -> Result<(), Error> {
        let (client, sender) = (self.client.clone(), self.sender.clone());
        let work = move || {
            let answer = client.request(within, unix_seconds(wall_clock()));
            // Nobody listens any more when the pod ends meanwhile.
            let _ = sender.send(Input::Answer(Box::new(answer)));
        };
        std::thread::Builder::new().name("ca-client".to_owned()).spawn(work).map(|_| ()).map_err(thread_failed)
    }

    fn answered(&mut self, answer: Result<Issued, ca_client::Error>) -> Result<(), Error> {
        match answer.map_err(|error| (error.is_denied(), error.to_string())).and_then(|issued| self.check(issued)) {
            Ok(issued) => self.install(issued),
            Err((denied, cause)) => {
                tracing::warn!(error = cause, denied, "No certificate from the CA");
                notify::status(&format!("no certificate yet: {cause}"));
                self.update(|status| status.last_error = Some(cause.clone()));
                self.life.failed(wall_clock(), denied, cause);
                Ok(())
            }
        }
    }

    /// Peers and the pod itself know the addresses of the first certificate.
    fn check(&self, issued: Issued) -> Result<Issued, (bool, String)> {
        match &self.path {
            DataPath::Running { networks, .. } if networks != issued.identity.networks() => Err((
                true,
                format!("the CA changed the overlay address from {networks:?} to {:?}", issued.identity.networks()),
            )),
            _ => Ok(issued),
        }
    }

    fn install(&mut self, issued: Issued) -> Result<(), Error> {
        let certificate = issued.identity.primary().clone();
        let (now, expires) = (wall_clock(), moment(certificate.not_after()));
        if let DataPath::Running { handle, .. } = &self.path {
            handle.set_trust(issued.trust);
            handle.set_identity(issued.identity.clone());
            if self.life.issued(now, expires) == Install::Open {
                handle.set_firewall(self.settings.firewall.clone());
            }
        } else {
            self.open(&issued)?;
            let _ = self.life.issued(now, expires);
        }
        tracing::info!(cert = certificate.name(), networks = ?certificate.networks(), groups = ?certificate.groups(),
            notAfter = certificate.not_after(), fingerprint = %certificate.fingerprint(), "Certificate in use");
        let first = self.status.lock().unwrap_or_else(PoisonError::into_inner).identity.is_none();
        self.update(|status| {
            status.identity = Some(issued.identity);
            status.open = true;
            status.last_error = None;
        });
        if first && self.spec.mode == Mode::Strict {
            notify::ready();
        }
        notify::status("running");
        Ok(())
    }

    fn open(&mut self, issued: &Issued) -> Result<(), Error> {
        let DataPath::Unopened { tun, sockets } = std::mem::replace(&mut self.path, DataPath::Lost) else {
            return Err(Error::Broken("it was lost while opening".to_owned()));
        };
        let networks = issued.identity.networks().to_vec();
        self.link(networks.clone()).configure(&self.namespace).map_err(|error| link_failed(&error))?;
        let advertise = names::resolve_once(&self.settings.advertise);
        let config = self.settings.to_config(issued.identity.clone(), issued.trust.clone(), self.port, advertise);
        let mut driver = Driver::start(config, Some(tun), sockets, Options::default())
            .map_err(|error| Error::SetUp { what: "cannot start the tunnel".to_owned(), cause: chain(&error) })?;
        // The launch, and asking the CA, are not needed again for long.
        release_program_pages();
        let handle = driver.handle();
        let received = driver.events();
        let sender = self.sender.clone();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map(|_| ()).map_err(thread_failed)
        };
        spawn("events", Box::new(move || events::log(&received, &Handshakes::default())))?;
        spawn(
            "driver",
            Box::new(move || {
                // After a stop nobody listens any more.
                let _ = sender.send(Input::DriverEnded(driver.run()));
            }),
        )?;
        let hosts = self.settings.static_hosts.clone();
        let names = hosts.has_names().then(|| {
            let handle = handle.clone();
            NameWatch::start(hosts, move |endpoints| handle.set_static_hosts(endpoints))
        });
        let names = names.transpose().map_err(thread_failed)?;
        self.update(|status| status.handle = Some(handle.clone()));
        self.path = DataPath::Running { handle, networks, names };
        Ok(())
    }

    /// The device and its routes stay, so that nothing meant for the overlay leaves in the clear.
    fn close(&mut self) {
        tracing::error!("The certificate expired and could not be renewed, the tunnel is closed");
        notify::status("closed: the certificate expired and could not be renewed");
        if let DataPath::Running { handle, .. } = &self.path {
            handle.set_firewall(Policy::default());
            handle.set_trust(CaPool::new());
        }
        self.update(|status| status.open = false);
    }

    fn stop(&mut self, inputs: &Receiver<Input>) {
        let DataPath::Running { handle, names, .. } = std::mem::replace(&mut self.path, DataPath::Lost) else { return };
        drop(names);
        handle.stop();
        loop {
            match inputs.recv_timeout(STOP_WITHIN) {
                Ok(Input::DriverEnded(_)) => break,
                Ok(_) => {}
                Err(_) => {
                    tracing::warn!("The tunnel did not close in time");
                    break;
                }
            }
        }
        tracing::info!("Goodbye");
    }

    fn link(&self, addresses: Vec<IpNet>) -> OverlayLink {
        OverlayLink::new(&self.spec.device, &self.settings.tun, addresses)
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn create_tun(spec: &LaunchSpec, settings: &Settings, namespace: &Namespace) -> Result<Tun, Error> {
    let what = || format!("cannot create the tun device {} in the pod", spec.device);
    let created = namespace.run("tun", || Tun::create(&spec.device, settings.routines, settings.tun.offloads));
    created
        .map_err(|error| Error::SetUp { what: what(), cause: chain(&error) })?
        .map_err(|error| Error::SetUp { what: what(), cause: errno::text(&error) })
}

/// One port per pod, in the host's namespace. The start is random so that instances rarely meet.
fn bind_in_range(spec: &LaunchSpec, settings: &Settings) -> Result<(Vec<UdpSocket>, u16), Error> {
    let (first, last) = spec.port_range;
    let what = || format!("cannot bind a UDP port in {first}-{last} on {}", settings.listen.host);
    let refuse = |cause: String| Error::SetUp { what: what(), cause };
    let host: IpAddr =
        settings.listen.host.parse().map_err(|_| refuse("listen.host is not an IP address".to_owned()))?;
    if first == 0 || last < first {
        return Err(refuse("the range is empty or begins with port 0".to_owned()));
    }
    let count = u64::from(last - first) + 1;
    let start = random() % count;
    for step in 0..count {
        let offset = u16::try_from((start + step) % count).unwrap_or_default();
        let address = SocketAddr::new(host, first + offset);
        let bound = probe(address)
            .and_then(|()| UdpSocket::bind(address, settings.routines, &socket_options(&settings.listen)));
        match bound {
            Ok(sockets) => return Ok((sockets, address.port())),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(refuse(errno::text(&error))),
        }
    }
    Err(refuse("every port is in use; widen portRange".to_owned()))
}

/// Sockets that share a port among themselves would share it with another instance's as well.
fn probe(address: SocketAddr) -> std::io::Result<()> {
    std::net::UdpSocket::bind(address).map(drop)
}

fn watch_signals(signals: Signals, sender: Sender<Input>) -> std::io::Result<()> {
    let wait = move || while sender.send(Input::Signal(signals.wait())).is_ok() {};
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait).map(|_| ())
}

fn thread_failed(error: std::io::Error) -> Error {
    Error::SetUp { what: "cannot start a thread".to_owned(), cause: errno::text(&error) }
}

fn link_failed(error: &crate::overlay_link::Error) -> Error {
    Error::SetUp { what: "cannot configure the tun device in the pod".to_owned(), cause: chain(error) }
}

#[allow(clippy::disallowed_methods, reason = "the rim reads the clock; the life cycle takes it as an argument")]
fn wall_clock() -> Moment {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

fn moment(time: UnixTime) -> Moment {
    Moment::from_secs(u64::try_from(time).unwrap_or(0))
}

fn unix_seconds(moment: Moment) -> UnixTime {
    UnixTime::try_from(moment.as_secs()).unwrap_or(UnixTime::MAX)
}

/// Only spreads load; without randomness all instances merely try the same ports first.
fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id()))
}

const MAX_LAUNCH: u64 = 1 << 20;
const NETNS_INTERVAL: Duration = Duration::from_secs(2);
// A runtime may remount while it sets up; a namespace that is gone stays gone.
const GONE_FOR: Duration = Duration::from_secs(1);
const STOP_WITHIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(change: impl FnOnce(&mut serde_json::Value)) -> Result<LaunchSpec, Error> {
        let mut spec = serde_json::json!({
            "version": 1,
            "network": "mesh",
            "container_id": "c0ffee",
            "ifname": "eth0",
            "netns": "/run/netns/x",
            "netns_id": [4, 4026531840u64],
            "pod": {"namespace": "shop", "name": "web-1", "uid": "u"},
            "pod_address": "10.244.1.7",
            "device": "nebula0",
            "mode": "strict",
            "overlay": ["10.42.0.0/16"],
            "budget_seconds": 18,
            "port_range": [20000, 20003],
            "ca": {"url": "https://ca:8443", "tls_ca_file": "/a", "token_file": "/b"},
            "nebula": {},
            "status_socket": "/run/x.sock",
        });
        change(&mut spec);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), spec.to_string()).unwrap();
        read_launch(file.path())
    }

    #[test]
    fn a_launch_file_of_another_version_is_refused_by_its_version() {
        assert_eq!(launch(|_| ()).unwrap().pod.name, "web-1");
        let error = launch(|spec| {
            spec["version"] = 2.into();
            spec["new_field"] = true.into();
        });
        assert!(error.unwrap_err().to_string().contains("version 2 is not 1"));
    }

    #[test]
    fn a_launch_file_with_an_unknown_field_or_of_absurd_size_is_refused() {
        assert!(launch(|spec| spec["surprise"] = true.into()).unwrap_err().to_string().contains("surprise"));
        let error = launch(|spec| spec["nebula"] = "x".repeat(2 << 20).into()).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }

    #[test]
    fn a_taken_port_is_passed_over_and_a_full_range_is_named() {
        let spec = launch(|_| ()).unwrap();
        let settings =
            Settings::read_without_pki(&Value::from(&serde_json::json!({"listen": {"host": "127.0.0.1"}}))).unwrap();
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let one = LaunchSpec { port_range: (port, port), ..spec.clone() };
        let error = bind_in_range(&one, &settings).err().unwrap().to_string();
        assert!(error.contains(&format!("{port}-{port}")) && error.contains("widen"), "{error}");
        let empty = LaunchSpec { port_range: (5, 4), ..spec };
        assert!(bind_in_range(&empty, &settings).is_err());
    }
}
