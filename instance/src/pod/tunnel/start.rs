//! The start of an instance: everything that needs privileges, with what the instance before it hands over.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nebula_cert::issuance::Lighthouses;
use nebula_cni_contract::launch::{Flow, LaunchSpec, Mode, Underlay};
use nebula_config::Settings;
use nebula_enrolment::ca_client::life_cycle::{LifeCycle, Start};
use nebula_enrolment::ca_client::trust_watch::TrustWatch;
use nebula_enrolment::ca_client::{CaClient, backoff};
use nebula_linux::confinement::Confinement;
use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nebula_linux::netns::{self, Namespace, NamespaceExecutor, Presence};
use nebula_linux::rtnetlink::LinkWatch;
use nebula_linux::signals::Signals;
use nix::sys::socket::SockType;
use rustix::thread::CapabilitySet;

use super::takeover::Handover;
use super::{Clock, PodTunnel};
use crate::handoff;
use crate::handoff::server::{self, HandoffServer};
use crate::pod::capture::Capture;
use crate::pod::data_path::{DataPath, Place};
use crate::pod::enrolment::Enrolment;
use crate::pod::error::Error;
use crate::pod::events::EventQueue;
use crate::pod::isolation;
use crate::pod::kept::Kept;
use crate::pod::launch_file::{self, Launch, OpenLaunch};
use crate::pod::lighthouses::Configured;
use crate::pod::predecessor::{Descriptors, Predecessor, listener};
use crate::pod::status::Status;
use crate::pod::status_socket::StatusSocket;
use crate::pod::stored;
use crate::pod::successor::SuccessorSocket;
use crate::pod::underlay;

/// The launch file with the lock of the instance from which this one takes over, and that instance. Without one, this
/// is a start like any other: the service manager repeats it after a crash.
pub(super) fn inherit(launch: &Path, pid: i32) -> Result<(Launch, Option<(Predecessor, Descriptors)>), Error> {
    let spec = launch_file::read(launch)?;
    let Some((mut predecessor, mut descriptors)) = Predecessor::find(&spec.successor_socket(), pid)? else {
        return Ok((Launch::claim(launch)?, None));
    };
    let lock = descriptors.lock.take().ok_or_else(|| std::io::ErrorKind::NotFound.into());
    let inherited = lock.and_then(|lock| Launch::inherit(launch, spec, lock));
    let launch = inherited.map_err(|error| predecessor.refuse(&error))?;
    Ok((launch, Some((predecessor, descriptors))))
}

/// Does everything that needs privileges, except what depends on the first certificate. The instance before this one,
/// if there is one, serves meanwhile. `passed` is what the service manager held for this unit.
pub(super) fn start(
    spec: LaunchSpec,
    (contract, lock): (OpenLaunch, File),
    settings: Settings,
    signals: Signals,
    confinement: &Confinement,
    predecessor: Option<(Predecessor, Descriptors)>,
    passed: std::io::Result<Vec<Passed>>,
) -> Result<(Box<PodTunnel>, EventQueue), Error> {
    let namespace = Namespace::At { path: spec.target.netns.clone(), id: spec.target.netns_id };
    let refused = |error: netns::Error| Error::set_up("pod", error);
    let presence = Presence::of(namespace.clone()).map_err(set_up("cannot watch over the pod's network namespace"))?;
    let in_pod_with = |kept: CapabilitySet| {
        let sandbox = confinement.prepare();
        namespace.executor(move || sandbox.enter(kept).map(drop)).map_err(refused)
    };
    let in_pod = || in_pod_with(CapabilitySet::empty());
    // Sockets are created by their bare names: this program's later user owns their directory, but may not be able to
    // reach it by its path.
    let room = spec.status_socket.parent().unwrap_or_else(|| Path::new("/"));
    std::env::set_current_dir(room).map_err(set_up(&format!("cannot work in {}", room.display())))?;
    let mut store = stored::open(passed, predecessor.is_some());
    let (predecessor, inherited) = predecessor.unzip();
    let inherited = inherited.unwrap_or_default();
    let (outside, place_of_sockets) = match spec.underlay {
        Underlay::Host => (&Namespace::Own, NamespaceExecutor::Here),
        Underlay::Pod => (&namespace, in_pod()?),
    };
    let sockets = match inherited.udp {
        None => underlay::open(&mut store, &spec, &settings, outside)?,
        Some(sockets) => underlay::adopt(sockets, &spec, &settings, outside)
            .map_err(set_up("cannot go on with the sockets of the previous instance"))?,
    };
    let init = match spec.flow {
        // Opened before any program of the pod runs, so that none of them can take the name while this instance lives.
        Flow::Init => Some(open_handoff(&namespace, confinement, inherited.init)?),
        Flow::Node => None,
    };
    let (init, init_listener) = init.unzip();
    let mut client = CaClient::new(spec.ca.clone(), place_of_sockets.clone());
    let shows_token = spec.flow == Flow::Node || spec.provisional;
    client.hold_files(shows_token).map_err(|error| Error::Misconfigured(error.to_string()))?;
    let hand = Some(in_pod_with(CapabilitySet::NET_ADMIN)?);
    let place = Place { device: spec.target.device.clone(), pod: namespace.clone(), hand, underlay: place_of_sockets };
    let port = sockets.1;
    isolation::isolate(&spec, &namespace, port)?;
    let behind_hosts = settings.tun.routes.subnets.iter().map(|subnet| subnet.route.network);
    let overlay: Vec<_> = spec.overlay.iter().copied().chain(behind_hosts).collect();
    let capture = spec.capture.as_ref().map(|capture| Capture::open(capture, &overlay));
    let known = capture.as_ref().map(|capture| (capture.directory(), capture.verdicts()));
    let path = DataPath::new(place, &spec, &settings, sockets, known, (inherited.tun, &mut store))?;
    let mut status = Status::new(&spec, port);
    status.settings.contract = contract.read()?.1;
    status.settings.device_mtu = Some(settings.tun.device_mtu());
    status.table = capture.as_ref().map(Capture::report);
    status.verdicts = capture.as_ref().map(Capture::verdicts);
    let status = Arc::new(Mutex::new(status));
    let clients = match inherited.status {
        Some(listener) => StatusSocket::of(listener, Arc::clone(&status)),
        None => StatusSocket::open(in_room(&spec.status_socket), Arc::clone(&status)),
    };
    let clients =
        clients.map_err(set_up(&format!("cannot make the status socket {}", spec.status_socket.display())))?;
    let successor_socket = spec.successor_socket();
    let successors = match inherited.successor {
        Some(listener) => SuccessorSocket::of(listener),
        None => SuccessorSocket::open(in_room(&successor_socket)),
    };
    let successors = successors.map_err(set_up(&format!("cannot make the socket {}", successor_socket.display())))?;
    let kept = Kept::open(&mut store).inspect_err(|error| {
        tracing::warn!(error = errno::text(error), "The next instance will not go on with the certificate of this one");
    });
    let kept = kept.ok();
    let what = "cannot keep descriptors for the next instance";
    let (tun, udp) = path.descriptors().map_err(set_up(what))?;
    stored::keep(store, &tun, &udp);
    let descriptors = descriptors((tun, udp), &clients, &successors, kept.as_ref(), lock, init_listener);
    let descriptors = descriptors.map_err(set_up(what))?;
    let table = capture.as_ref().and_then(|capture| capture.watch(spec.user));
    let polls_table = capture.is_some() && table.is_none();
    let events = EventQueue::new(signals, watch_links(&namespace)?, table, clients, successors);
    let (events, reports) = events.map_err(set_up("cannot wait for signals"))?;
    let is_awaited = spec.flow == Flow::Node && spec.mode == Mode::Strict && predecessor.is_none();
    let start = if is_awaited { Start::Within(Duration::from_secs(spec.budget_seconds)) } else { Start::Whenever };
    let clock = Clock::start();
    let pod = PodTunnel {
        life: LifeCycle::new(start, clock.now(), backoff::seed()),
        trust: TrustWatch::new(backoff::seed()),
        etag: None,
        enrolment: Enrolment::new(&spec, client.clone(), init),
        is_awaited,
        clock,
        path,
        capture,
        polls_table,
        configured: Configured::of(&settings),
        announced: Lighthouses::new(),
        settings,
        started_with: None,
        contract,
        presence,
        status,
        reports,
        client,
        kept,
        is_provisional: false,
        predecessor: predecessor.zip(inherited.identity.map(Kept::of)),
        inherited: None,
        descriptors: Arc::new(descriptors),
        handover: Handover::None,
    };
    Ok((Box::new(pod), events))
}

/// Prepares to serve the pod's init container, or serves it if no other instance does; returns a duplicate of the
/// listener, too.
fn open_handoff(
    namespace: &Namespace,
    confinement: &Confinement,
    inherited: Option<OwnedFd>,
) -> Result<(HandoffServer, OwnedFd), Error> {
    let sandbox = confinement.prepare();
    let confine = move || sandbox.enter(CapabilitySet::empty()).map(drop);
    let what = "cannot listen for the pod's init container";
    let is_new = inherited.is_none();
    let listener = match inherited {
        Some(inherited) => listener(inherited, SockType::Stream),
        // Bound as root, because init checks the listener's user; the thread that serves it is confined.
        None => {
            namespace.run("handoff", || server::listen(handoff::NAME)).map_err(|error| Error::set_up(what, error))?
        }
    };
    let prepared = listener.and_then(|listener| {
        let duplicate = listener.as_fd().try_clone_to_owned()?;
        Ok((HandoffServer::prepare(listener, confine)?, duplicate))
    });
    let prepared = prepared.map_err(|error| Error::set_up_io(what, error))?;
    if is_new {
        prepared.0.begin();
    }
    Ok(prepared)
}

/// What this instance hands over to the next one.
fn descriptors(
    (tun, udp): (Vec<OwnedFd>, Vec<OwnedFd>),
    clients: &StatusSocket,
    successors: &SuccessorSocket,
    kept: Option<&Kept>,
    lock: File,
    init: Option<OwnedFd>,
) -> std::io::Result<Vec<Passed>> {
    let descriptors = Descriptors {
        tun: Some(tun),
        udp: Some(udp),
        status: Some(clients.as_fd().try_clone_to_owned()?),
        successor: Some(successors.as_fd().try_clone_to_owned()?),
        lock: Some(lock.into()),
        identity: kept.map(Kept::file).transpose()?.map(Into::into),
        init,
    };
    Ok(descriptors.named())
}

fn watch_links(namespace: &Namespace) -> Result<LinkWatch, Error> {
    let what = "cannot watch the links of the pod";
    let watch = namespace.run("links", LinkWatch::new).map_err(|error| Error::set_up(what, error))?;
    watch.map_err(|error| Error::set_up_io(what, error))
}

/// The socket's path relative to the current directory.
fn in_room(socket: &Path) -> &Path {
    socket.file_name().map_or(socket, Path::new)
}

pub(super) fn set_up(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::set_up_io(what, error)
}
