//! The `nebula` daemon: reads the configuration, starts the node and handles signals.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use nebula_cert::with_causes;
use nebula_config::Settings;
use nebula_config::go::firewall_hash;
use nebula_config::loaded::{Error, Loaded, bind_failed, listen_address};
use nebula_config::log;
use nebula_config::log::events;
use nebula_config::names;
use nebula_core::config::RecvErrorPolicy;
use nebula_core::firewall::Rule;
use nebula_core::io::{Driver, Handle, Options, SocketControl, Tun, UdpSocket};
use nebula_enrolment::renewal::Renewal;
use nebula_enrolment::renewal_health::RenewalHealth;
use nebula_linux::clock::unix_now;
use nebula_linux::descriptors::{self, Passed};
use nebula_linux::errno;
use nebula_linux::netns::Namespace;
use nebula_linux::notify;
use nebula_linux::signals::{Arrived, Signals};
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;
use rustix::thread::CapabilitySet;
use serde_json::json;

use crate::handover::new::{self, Committed, Takeover};
use crate::host::account::Account;
use crate::host::control::{ControlService, ControlSockets, Facts, RemovedAtEnd};
use crate::host::housekeeping::Housekeeping;
use crate::host::link_repair::{DeviceGone, LinkRepair};
use crate::host::reload::{Link, Reloader};
use crate::host::rivals;
use crate::host::stored::Stored;
use crate::host::subnets::Subnets;
use crate::host::system_routes::{self, Overlay};
use crate::host::unmet::Unmet;
use crate::host::upgrade::attempt::{Outcome as UpgradeOutcome, Upgrade};
use crate::metrics::{Handshakes, Metrics, Repairs};
use crate::overlay::idle;
use crate::overlay::lan;
use crate::overlay::link::{self, OverlayLink};
use crate::overlay::stored_tun::OpenTun;

/// What earlier processes left.
#[derive(Debug)]
pub struct Before {
    passed: io::Result<Vec<Passed>>,
    takeover: Result<Option<Takeover>, new::Error>,
}

impl Before {
    /// Takes it from the service manager and from a process that started this one to take over. Call it before any file
    /// is opened.
    #[must_use]
    pub fn take() -> Self {
        Self { passed: descriptors::take_passed(), takeover: Takeover::find() }
    }
}

/// Runs the node until a signal stops it, or another process takes over.
///
/// # Errors
/// Returns an error if the node could not start, or if a device failed for good.
pub fn serve(loaded: Loaded, before: Before) -> Result<(), Error> {
    let Before { passed, takeover } = before;
    let not_taken = |error: new::Error| Error::Start { message: "Failed to take over", cause: error.to_string() };
    let mut takeover = takeover.map_err(not_taken)?;
    let start = |message| move |error: io::Error| Error::Start { message, cause: errno::text(&error) };
    let signals = Signals::block().map_err(start("Failed to set up signal handling"))?;
    // The configuration parser recurses deeply; on its own thread, the stack is freed afterwards.
    let thread = |error: io::Error| Error::Start {
        message: "Failed to start a thread",
        cause: format!("{} (clone3(2) must be allowed, or answered with ENOSYS)", errno::text(&error)),
    };
    let settings = std::thread::scope(|scope| {
        let reading = std::thread::Builder::new().spawn_scoped(scope, || loaded.settings()).map_err(thread)?;
        reading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    let listen = listen_address(&settings.listen)?;
    let stored = match &mut takeover {
        Some(takeover) => Stored::new(Ok(takeover.offer().map_err(not_taken)?)),
        None => Stored::new(passed),
    };
    // While this is the only thread: with a second one, registering for membarrier(2) waits 10 ms in the kernel.
    // `_files` removes the control sockets when this function returns, for whatever reason.
    let repairs = Arc::new(Repairs::default());
    let unmet = Arc::new(Unmet::default());
    let Opened { driver, device, link, repair, controls, control, files, kept, udp } =
        open(&settings, listen, (stored, takeover), &repairs, &unmet)?;
    log_start(&settings, &device, udp);
    let handle = driver.handle();
    let subnets = Arc::new(Subnets::new(handle.clone(), settings.tun.routes.subnet_routes()));
    if let Some(link) = link.as_ref().filter(|_| settings.tun.follow_system_routes) {
        follow_system_routes(link, &settings, &subnets)?;
    }
    let handshakes = Arc::new(Handshakes::default());
    let watched = controls.iter().map(SocketControl::try_clone).collect::<Result<_, _>>();
    let watched = watched.map_err(start("Failed to start stats emitter"))?;
    let renewals = Arc::new(RenewalHealth::default());
    let metrics = Arc::new(Metrics::new(
        &settings,
        handle.clone(),
        (Arc::clone(&handshakes), repairs, Arc::clone(&renewals), Arc::clone(&unmet)),
        watched,
    ));
    let (metrics_of_link, unmet_of_link) = (Arc::clone(&metrics), Arc::clone(&unmet));
    let link = Link { overlay: link, sockets: controls, subnets, metrics: metrics_of_link, unmet: unmet_of_link };
    let enrolment = settings.operation.enrolment.clone();
    let own = settings.pki.as_ref().map(|pki| pki.identity.clone());
    let reloader = Reloader::new(loaded.path().to_owned(), loaded.tree(), settings, handle.clone(), link);
    reloader.report_unreadable();
    let reloader = Arc::new(Mutex::new(reloader));
    if let (Some(folder), Some(own)) = (enrolment, own) {
        let reloader = Arc::clone(&reloader);
        let reload = move || reloader.lock().unwrap_or_else(PoisonError::into_inner).reload(unix_now()).is_ok();
        Renewal::start(&folder, &own, Arc::clone(&renewals), reload).map_err(start("Failed to start a thread"))?;
    }
    let facts = Facts { device: device.clone(), udp, started: unix_now(), renewals, unmet };
    let upgrade = Upgrade::new(handle.clone(), kept, files.files()).map_err(start("Failed to make an eventfd"))?;
    let upgrade = Arc::new(upgrade);
    let service = ControlService {
        handle: handle.clone(),
        reloader: Arc::clone(&reloader),
        facts,
        upgrade: Arc::clone(&upgrade),
    };
    let service = Arc::new(service);
    #[cfg(feature = "ssh")]
    service.reloader().attach(crate::host::console::Console::new(&service));
    let signals = Arrived::of(signals).map_err(start("Failed to set up signal handling"))?;
    let housekeeping = Housekeeping { signals, control, service, reloader, metrics, handle: handle.clone(), repair };
    run_attended(driver, housekeeping, &handshakes)?.map_err(|ended| match ended {
        Ended::DeviceGone => Error::Running(gone(&device)),
        Ended::Failed(cause) => Error::Running(cause),
    })?;
    if upgrade.outcome() == Some(UpgradeOutcome::Failed) {
        return Err(Error::Running("no other program took over, and this one has stopped".to_owned()));
    }
    tracing::info!(counters = counted(&handle), "Goodbye");
    Ok(())
}

/// Explains that the device was removed. Sessions end with the device: a new device would need new sessions as well,
/// which is what a restart by the supervisor does.
fn gone(device: &str) -> String {
    format!(
        "the tun device {device} was removed by somebody else; a new start makes another (Restart=always in the unit)"
    )
}

/// All non-zero counters by name.
fn counted(handle: &Handle) -> String {
    let counters = handle.counters().into_iter().filter(|(_, value)| *value != 0);
    counters.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

fn follow_system_routes(link: &OverlayLink, settings: &Settings, subnets: &Arc<Subnets>) -> Result<(), Error> {
    let start =
        |error: io::Error| Error::Start { message: "Failed to follow system routes", cause: errno::text(&error) };
    let device = nix::net::if_::if_nametoindex(link.device.as_str()).map_err(|errno| start(errno.into()))?;
    let overlay = Overlay { networks: link.addresses.clone(), device };
    system_routes::follow(overlay, settings.tun.system_routes_buffer, Arc::clone(subnets)).map_err(start)
}

/// Why the driver stopped, other than by request.
enum Ended {
    DeviceGone,
    Failed(String),
}

type Outcome = Result<(), Ended>;

fn run_attended(mut driver: Driver, housekeeping: Housekeeping, handshakes: &Handshakes) -> Result<Outcome, Error> {
    let thread = |error: io::Error| Error::Start { message: "Failed to start a thread", cause: error.to_string() };
    let received = driver.take_events();
    let attending =
        std::thread::Builder::new().name("housekeeping".to_owned()).spawn(|| housekeeping.run()).map_err(thread)?;
    notify::ready();
    // Returns when the node's own thread ends, which it does first.
    events::log(received, |event| handshakes.note(event));
    let outcome = driver.run();
    // Any thread may notice the missing device first. Once it has ended, the device is gone in any case.
    if let Err(error) = outcome {
        return Ok(Err(if error.is_device_gone() { Ended::DeviceGone } else { Ended::Failed(with_causes(&error)) }));
    }
    // The housekeeping thread stopped the driver and now returns.
    let attended = attending.join().unwrap_or(Ok(()));
    Ok(attended.map_err(|DeviceGone| Ended::DeviceGone))
}

/// A name that distinguishes this instance from others on the host.
fn instance_name(settings: &Settings, device: &str) -> String {
    let own = settings.pki.as_ref().filter(|_| settings.tun.disabled).map(|pki| pki.identity.primary().name());
    own.unwrap_or(device).to_owned()
}

/// What a running node consists of.
struct Opened {
    driver: Driver,
    /// Name of the device, or `disabled`.
    device: String,
    link: Option<OverlayLink>,
    repair: Option<LinkRepair>,
    controls: Vec<SocketControl>,
    control: ControlSockets,
    files: RemovedAtEnd,
    /// Device and sockets.
    kept: Vec<Passed>,
    udp: SocketAddr,
}

/// Opens device, sockets and driver. From here on the system is changed; everything opened is closed when the driver
/// ends.
fn open(
    settings: &Settings,
    listen: SocketAddr,
    (mut stored, takeover): (Stored, Option<Takeover>),
    repairs: &Arc<Repairs>,
    unmet: &Arc<Unmet>,
) -> Result<Opened, Error> {
    let Some(pki) = &settings.pki else {
        return Err(Error::Start { message: "Could not load client cert", cause: "no certificate".to_owned() });
    };
    let become_user =
        |error: io::Error| Error::Start { message: "Failed to become daemon.user", cause: errno::text(&error) };
    let user = settings.operation.user.as_deref().map(Account::find).transpose().map_err(become_user)?;
    // Names may be looked up for seconds. Until the commit the other process serves, so nothing of it is changed.
    let advertise = names::resolve_once(&settings.advertise);
    let committed = takeover.map(|takeover| commit(takeover, stored.check(settings, listen))).transpose()?;
    let (tun, sockets) = open_files(settings, listen, &mut stored)?;
    let udp = |error: io::Error| bind_failed(&error, listen);
    let controls = sockets.iter().map(SocketControl::of).collect::<Result<Vec<_>, _>>().map_err(udp)?;
    if settings.listen.so_mark != 0 {
        apply_mark(&controls, settings.listen.so_mark);
    }
    let bound = sockets.first().map_or(Ok(listen), UdpSocket::local_addr).map_err(udp)?;
    let has_leftovers = tun.as_ref().is_some_and(OpenTun::has_leftovers);
    let tun = tun.map(|device| device.tun);
    let device = tun.as_ref().map_or("disabled", Tun::name).to_owned();
    let link = tun.is_some().then(|| OverlayLink {
        forwards: pki.identity.certificates().any(|certificate| !certificate.unsafe_networks().is_empty()),
        ..OverlayLink::new(&device, &settings.tun, pki.identity.networks().to_vec())
    });
    let mut repair = None;
    if let Some(link) = &link {
        let watched = LinkRepair::new(&device, Arc::clone(repairs));
        repair =
            Some(watched.map_err(|error| {
                Error::Running(format!("cannot watch {device} by netlink: {}", errno::text(&error)))
            })?);
        let failed = |error: link::Error| Error::Running(error.to_string());
        if has_leftovers {
            link.remove_leftovers_here().map_err(failed)?;
        }
        link.configure(&Namespace::Own).map_err(failed)?;
    }
    let left = stored.state();
    let kept = stored.keep(tun.as_ref(), &sockets, listen).map_err(udp)?;
    let name = instance_name(settings, &device);
    let (control, files) = ControlSockets::open(&settings.operation, name, user.clone(), unmet);
    if let Some(user) = &user {
        // Must precede any other thread, so that every thread inherits the user and capabilities of this one.
        user.assume(kept_capabilities(settings)).map_err(become_user)?;
    }
    let config = settings.to_config(pki.identity.clone(), pki.trust.clone(), bound.port(), advertise);
    let mut options = Options::default();
    options.raise_priority = settings.operation.raise_priority;
    options.processors = usable(&settings.tun.processors);
    options.on_idle = Some(idle::release);
    // The file was checked when it was read, and names in it are looked up later.
    options.check_config = false;
    let (committed, state) = committed.map(Committed::take_state).unzip();
    let driver = match state.flatten().or(left) {
        Some(state) => Driver::take_over(config, tun, sockets, options, state),
        None => Driver::start(config, tun, sockets, options),
    };
    let driver = driver.map_err(|error| Error::Running(with_causes(&error)))?;
    if let Some(committed) = committed {
        committed.confirm();
        committed.await_end();
    }
    if let Some(link) = &link {
        report_rivals(link);
        lan::report(&settings.tun, &device);
    }
    Ok(Opened { driver, device, link, repair, controls, control, files, kept, udp: bound })
}

/// Takes over from another process if what it has fits the configuration.
fn commit(mut takeover: Takeover, checked: io::Result<()>) -> Result<Committed, Error> {
    let failed = |cause: String| Error::Start { message: "Failed to take over", cause };
    if let Err(error) = checked {
        let why = errno::text(&error);
        takeover.refuse(&why);
        return Err(failed(why));
    }
    takeover.commit().map_err(|error| failed(error.to_string()))
}

/// Opens the device and the sockets, or those that an earlier process left.
fn open_files(
    settings: &Settings,
    listen: SocketAddr,
    stored: &mut Stored,
) -> Result<(Option<OpenTun>, Vec<UdpSocket>), Error> {
    let tun = if settings.tun.disabled {
        None
    } else {
        let tun = &settings.tun;
        Some(stored.tun(tun, settings.routines).map_err(|error| {
            let cause = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    format!("{} (run as root or with CAP_NET_ADMIN)", errno::text(&error))
                }
                _ => format!("could not create tun device {}: {}", tun.device, errno::text(&error)),
            };
            Error::Start { message: "Failed to get a tun/tap device", cause }
        })?)
    };
    let sockets = stored.sockets(listen, settings.routines, &settings.listen.socket_options());
    Ok((tun, sockets.map_err(|error| bind_failed(&error, listen))?))
}

/// Logs an error for every other interface in this overlay's network: both share its route, so packets for one of them
/// may leave by the other.
fn report_rivals(link: &OverlayLink) {
    for rival in rivals::find(&link.device, &link.addresses).unwrap_or_default() {
        tracing::error!(
            device = link.device, interface = rival.interface, address = %rival.address, process = rival.process,
            "Another interface has an address in the network of this overlay, and packets take either: end that \
             daemon, or let one of them run in another network namespace"
        );
    }
}

/// Capabilities that the node needs after start: a reload changes routes, MTU, marks and buffers, and may bind a low
/// port.
fn kept_capabilities(settings: &Settings) -> CapabilitySet {
    let priority = if settings.operation.raise_priority { CapabilitySet::SYS_NICE } else { CapabilitySet::empty() };
    CapabilitySet::NET_ADMIN | CapabilitySet::NET_BIND_SERVICE | priority
}

/// Returns the processors to pin threads to. As in Go, one processor that is missing or not allowed invalidates the
/// whole list.
fn usable(processors: &[usize]) -> Vec<usize> {
    if processors.is_empty() {
        return Vec::new();
    }
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let Some(wrong) = processors.iter().find(|processor| !allowed.is_set(**processor).unwrap_or(false)) else {
        return processors.to_vec();
    };
    tracing::warn!(
        processor = wrong,
        "tun.cpu_affinity names a processor that is not there or not allowed; it is ignored"
    );
    Vec::new()
}

/// Sets the mark of all outgoing packets. As in Go Nebula, a failure is only logged.
pub(crate) fn apply_mark(controls: &[SocketControl], mark: u32) {
    for control in controls {
        if let Err(error) = control.set_mark(mark) {
            tracing::error!(error = errno::text(&error), mark, "Failed to set listen.so_mark");
        }
    }
}

fn log_start(settings: &Settings, device: &str, udp: SocketAddr) {
    for (direction, rules) in [("outgoing", &settings.firewall.outbound), ("incoming", &settings.firewall.inbound)] {
        for rule in rules {
            tracing::info!(firewallRule = ?describe(direction, rule), "Firewall rule added");
        }
    }
    tracing::info!(firewallHashes = firewall_hash::both(&settings.firewall), "Firewall started");
    tracing::info!(addr = %udp, "listening");
    tracing::info!(preferredRanges = ?texts(&settings.preferred_ranges), "Main HostMap created");
    tracing::info!("punchy {}", if settings.punchy.punch { "enabled" } else { "disabled" });
    tracing::info!(sendRecvError = recv_error(settings.listen.send_recv_error), "Loaded send_recv_error config");
    tracing::info!(acceptRecvError = recv_error(settings.listen.accept_recv_error), "Loaded accept_recv_error config");
    let networks = settings.pki.as_ref().map(|pki| pki.identity.networks().to_vec()).unwrap_or_default();
    tracing::info!(interface = device, networks = ?texts(&networks), build = env!("CARGO_PKG_VERSION"), udpAddr = %udp,
        boringcrypto = false, "Nebula interface is active");
}

/// As in Go, an empty list is logged as null.
fn texts<T: ToString>(items: &[T]) -> log::Structured {
    let all = items.iter().map(ToString::to_string).collect();
    log::structured(if items.is_empty() { serde_json::Value::Null } else { all })
}

fn recv_error(policy: RecvErrorPolicy) -> &'static str {
    match policy {
        RecvErrorPolicy::Always => "always",
        RecvErrorPolicy::Never => "never",
        RecvErrorPolicy::Private => "private",
    }
}

/// The fields that Go Nebula logs for a firewall rule.
fn describe(direction: &str, rule: &Rule) -> log::Structured {
    let (protocol, first, last) = firewall_hash::numbers(rule);
    log::structured(json!({
        "caName": rule.ca_name.as_deref().unwrap_or_default(),
        "caSha": rule.ca_sha.map(|sha| sha.to_string()).unwrap_or_default(),
        "cidr": firewall_hash::cidr(rule.cidr),
        "direction": direction,
        "endPort": last,
        "groups": if rule.groups.is_empty() { serde_json::Value::Null } else { json!(rule.groups) },
        "host": rule.host.as_deref().unwrap_or_default(),
        "localCidr": firewall_hash::cidr(rule.local_cidr),
        "proto": protocol,
        "startPort": first,
    }))
}
