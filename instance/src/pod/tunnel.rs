//! The instance of one pod: drives the certificate's life cycle, the trust watch and the data path.

mod start;
mod takeover;

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::issuance::{Lighthouses, MAX_WAIT_SECONDS};
use nebula_cert::{Certificate, UnixTime};
use nebula_cni_contract::instance_status::FollowedSettings;
use nebula_config::log;
use nebula_config::reloaded;
use nebula_config::{Settings, Value};
use nebula_core::handover;
use nebula_enrolment::ca_client::life_cycle::{
    Closing, Failure, Install, LifeCycle, Moment, Now, Standing, Step, moment,
};
use nebula_enrolment::ca_client::trust_watch::TrustWatch;
use nebula_enrolment::ca_client::{self, CaClient, Issued, Refusal, TrustAnswer};
use nebula_linux::capabilities;
use nebula_linux::clock;
use nebula_linux::confinement;
use nebula_linux::confinement::{Confinement, Missing};
use nebula_linux::descriptors::{Passed, take_passed};
use nebula_linux::memory;
use nebula_linux::netns::{Namespace, Presence};
use nebula_linux::notify;
use nebula_linux::signals::{Signal, Signals, go_name};
use rustix::thread::CapabilitySet;

use crate::overlay::link;
use crate::pod::capture::{Capture, LOOK_INTERVAL};
use crate::pod::data_path::{DataPath, spawn};
use crate::pod::enrolment::{Enrolment, Outcome};
use crate::pod::error::Error;
use crate::pod::events::{Event, EventQueue, EventSender};
use crate::pod::kept::Kept;
use crate::pod::launch_file::{Launch, OpenLaunch};
use crate::pod::lighthouses::Configured;
use crate::pod::predecessor::Predecessor;
use crate::pod::status::{Shared, Status};
use crate::pod::stored;
use crate::pod::tunnel::start::{inherit, set_up, start};
use crate::pod::tunnel::takeover::Handover;

/// Serves the pod of a launch file until it is gone, a signal asks to stop, another instance takes over, or something
/// fails. If `predecessor` is the process of an instance of the pod, this one takes over from it.
///
/// # Errors
/// See [`Error`]. Everything created is removed again, except the routes and rules that keep packets for the overlay
/// from leaving in the clear.
pub fn serve(launch: &Path, predecessor: Option<i32>) -> Result<(), Error> {
    // Their numbers are known only as long as nothing else was opened.
    let passed = take_passed();
    confinement::hide_memory().map_err(set_up("cannot hide the memory of this process"))?;
    let wanted = capabilities::FOR_SET_UP | capabilities::FOR_CAPTURE;
    capabilities::keep(wanted).map_err(set_up("cannot give up capabilities"))?;
    if let Err(error) = notify::connect() {
        eprintln!("nobody hears that this instance is ready: {error}");
    }
    let signals = Signals::block().map_err(set_up("cannot set up signal handling"))?;
    // Fails only if this process already leads a process group.
    let _ = nix::unistd::setsid();
    // Set-up needs a deep stack; on a thread of its own, that memory is freed when the thread ends.
    let started = Namespace::Own.run("start", || {
        let (claimed, predecessor) = match predecessor {
            Some(pid) => inherit(launch, pid)?,
            None => (Launch::claim(launch)?, None),
        };
        let contract = OpenLaunch::of(&claimed, launch).map_err(set_up("cannot keep the launch file open"))?;
        let Launch { spec, lock: only_one } = claimed;
        if spec.capture.is_none() {
            capabilities::give_up(capabilities::FOR_CAPTURE).map_err(set_up("cannot give up a capability"))?;
        }
        let settings = Settings::read_for_pod(&Value::from(&spec.nebula))
            .map_err(|error| Error::set_up("tunnel configuration", error))?;
        log::start(settings.logging, log::Output::Stderr);
        settings.remarks.iter().for_each(|remark| tracing::warn!("{remark}"));
        let confinement = Confinement::of(&spec);
        let lock = only_one.file().map_err(set_up("cannot keep the launch file open"))?;
        let (pod, events) = start(spec, (contract, lock), settings, signals, &confinement, predecessor, passed)?;
        Ok((pod, events, only_one, confinement.prepare()))
    });
    let (mut pod, mut events, only_one, sandbox) = started.map_err(|error| Error::set_up("pod", error))??;
    // All other threads are started by this one from here on, or have entered the sandbox themselves.
    let missing = sandbox.enter(CapabilitySet::empty()).map_err(set_up("cannot confine this instance"))?;
    if missing != Missing::default() {
        tracing::warn!(missing = missing.names(), "This kernel does not offer all that would confine the instance");
    }
    if !pod.is_awaited && pod.predecessor.is_none() {
        // In the init flow, the kubelet starts the init container only after this.
        notify::ready();
    }
    let result = pod.run(&mut events);
    if pod.is_handing_over() || matches!(result, Ok(Ended::HandedOver)) {
        // Another instance serves, or may: what it has, too, is neither closed in an orderly way nor unlocked or
        // removed.
        std::mem::forget((pod, events, only_one));
        return result.map(drop);
    }
    // The pod's next instance may start once nothing of this one is left.
    drop(pod);
    drop(events);
    drop(only_one);
    result.map(drop)
}

/// How an instance ended.
enum Ended {
    Stopped,
    /// Another one serves the pod.
    HandedOver,
}

struct PodTunnel {
    /// With the lighthouses that the CA announced last.
    settings: Settings,
    /// The settings of the start, once there are others.
    started_with: Option<Box<Settings>>,
    contract: OpenLaunch,
    /// What the CA announced last.
    announced: Lighthouses,
    /// The lighthouses of the chain's entry.
    configured: Configured,
    presence: Presence,
    clock: Clock,
    status: Shared,
    reports: EventSender,
    client: CaClient,
    enrolment: Enrolment,
    life: LifeCycle,
    /// Whether the plugin waits for the first certificate.
    is_awaited: bool,
    trust: TrustWatch,
    /// ETag of the latest trust.
    etag: Option<String>,
    path: DataPath,
    /// Of a captured pod.
    capture: Option<Capture>,
    /// Whether nothing tells that the cluster table was replaced.
    polls_table: bool,
    /// Where the next instance of this pod finds the certificate.
    kept: Option<Kept>,
    is_provisional: bool,
    /// The instance that serves until this one takes over, and its certificate.
    predecessor: Option<(Predecessor, Kept)>,
    /// What that one handed over, until the path is open.
    inherited: Option<handover::State>,
    /// For the next instance.
    descriptors: Arc<Vec<Passed>>,
    handover: Handover,
}

/// Reads both clocks.
#[derive(Debug, Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(clock::now())
    }

    fn now(&self) -> Now {
        Now { uptime: clock::now() - self.0, wall: clock::since_epoch() }
    }
}

/// The methods that the loop calls are not inlined: their locals would be part of the frame that waits, which was 16
/// KiB of private memory more for each pod.
impl PodTunnel {
    fn run(&mut self, events: &mut EventQueue) -> Result<Ended, Error> {
        let mut gone_since = None;
        let mut release_memory_at = None;
        // A namespace loses its links before it disappears, so a change of links makes the checks more frequent.
        let mut fast_checks_until = Duration::ZERO;
        self.begin()?;
        // It may have been replaced before its folder was watched.
        self.look_at_table();
        loop {
            let now = self.clock.now();
            while let Some(step) = self.life.poll(now) {
                match step {
                    Step::Ask { within } => self.ask(within)?,
                    Step::Close(closing) => self.close(closing),
                    Step::GiveUp(Failure::Denied(refusal)) => return Err(Error::Denied(refusal)),
                    Step::GiveUp(Failure::Misconfigured(cause)) => return Err(Error::Misconfigured(cause)),
                    Step::GiveUp(Failure::Unavailable(cause)) => return Err(Error::Unavailable(cause)),
                }
            }
            if self.trust.is_due(now.uptime) {
                self.ask_whom_to_trust(now.uptime)?;
            }
            if release_memory_at.take_if(|at| now.uptime >= *at).is_some() {
                memory::release_program_pages();
                memory::release_free_heap();
                memory::release_stack();
            }
            let look = if now.uptime < fast_checks_until { FAST_CHECK_INTERVAL } else { NETNS_CHECK_INTERVAL };
            let [trust, tidy] =
                [self.trust.deadline(), release_memory_at].map(|at| Some(at?.saturating_sub(now.uptime)));
            let table = self.polls_table.then_some(LOOK_INTERVAL);
            if let Handover::Stopped { since, .. } = self.handover
                && now.uptime >= since + STOPPED_FOR
            {
                return Err(Error::Broken("it was handed over to an instance that ended, and to no other".into()));
            }
            let wait = [self.life.idle(now), trust, tidy, table].into_iter().flatten().fold(look, Duration::min);
            match events.next(wait) {
                Some(Event::Signal(Signal::SIGHUP)) => self.reload(),
                Some(Event::Signal(signal)) => {
                    tracing::info!(signal = go_name(signal), "Caught signal, shutting down");
                    if matches!(self.handover, Handover::UnderWay) {
                        // Another instance may serve already.
                        return Ok(Ended::HandedOver);
                    }
                    self.stop(events);
                    return Ok(Ended::Stopped);
                }
                Some(Event::TableChanged) => self.look_at_table(),
                Some(Event::LinksChanged) => fast_checks_until = self.clock.now().uptime + FAST_CHECKS_FOR,
                Some(Event::Enrolment(answer)) => {
                    self.answered(*answer)?;
                    release_memory_at = Some(self.clock.now().uptime + RELEASE_MEMORY_AFTER);
                }
                Some(Event::Trust { asked, answer }) => {
                    self.told_whom_to_trust(asked, *answer);
                    release_memory_at = Some(self.clock.now().uptime + RELEASE_MEMORY_AFTER);
                }
                Some(Event::Successor(channel)) => self.hand_over(channel)?,
                // Another instance answers clients from here on, unless it has failed already.
                Some(Event::DriverEnded(Ok(()))) if !matches!(self.handover, Handover::None) => {
                    events.pause_clients(matches!(self.handover, Handover::UnderWay));
                }
                Some(Event::HandedOver(outcome)) => {
                    if self.handed_over(*outcome)? {
                        return Ok(Ended::HandedOver);
                    }
                    events.pause_clients(false);
                    release_memory_at = Some(self.clock.now().uptime + RELEASE_MEMORY_AFTER);
                }
                Some(Event::DriverEnded(result)) => {
                    return Err(Error::Broken(result.err().map_or_else(|| "it ended by itself".into(), Into::into)));
                }
                None if self.polls_table => self.look_at_table(),
                None => {}
            }
            let now = self.clock.now().uptime;
            if self.presence.is_there() {
                gone_since = None;
            } else if now.saturating_sub(*gone_since.get_or_insert(now)) >= NETNS_GONE_FOR {
                // This instance must end: its open tun would keep the namespace, its links and the pod's address alive.
                tracing::info!("The pod's network namespace is gone, ending");
                self.stop(events);
                return Ok(Ended::Stopped);
            } else {
                fast_checks_until = now + FAST_CHECKS_FOR;
            }
        }
    }

    #[inline(never)]
    fn ask(&self, within: Duration) -> Result<(), Error> {
        let (enrolment, reports) = (self.enrolment.clone(), self.reports.clone());
        let now = unix_seconds(self.clock.now().wall);
        spawn("ca-client", move || reports.send(Event::Enrolment(Box::new(enrolment.apply(within, now)))))
    }

    #[inline(never)]
    fn answered(&mut self, answer: Outcome) -> Result<(), Error> {
        let now = self.clock.now();
        let failure = match answer {
            Outcome::Issued(issued) => match self.check(issued) {
                Ok(issued) => return self.install(*issued, false),
                Err(refusal) => Failure::Denied(refusal),
            },
            Outcome::Provisional(issued) => match self.check(issued) {
                Ok(issued) => return self.install(*issued, true),
                Err(refusal) => Failure::Denied(refusal),
            },
            Outcome::NoProvisional(cause) => {
                tracing::warn!(
                    error = cause,
                    "The CA gives no provisional certificate; the path stays closed until there is another"
                );
                self.enrolment.waits_for_init();
                self.life.not_yet(now);
                return Ok(());
            }
            Outcome::NotYet(cause) => {
                if self.path.networks().is_none() {
                    notify::status("waiting for the pod's init container");
                }
                let is_overdue = now.uptime > INIT_OVERDUE_AFTER && self.path.networks().is_none();
                self.update(|status| {
                    if is_overdue && !status.init_is_overdue {
                        tracing::warn!("{INIT_OVERDUE}");
                    }
                    status.init_is_overdue = is_overdue;
                    status.last_error = Some(if is_overdue { INIT_OVERDUE.to_owned() } else { cause });
                });
                self.life.not_yet(now);
                return Ok(());
            }
            Outcome::Refused(refusal) => Failure::Denied(refusal),
            Outcome::Misconfigured(cause) => Failure::Misconfigured(cause),
            Outcome::Failed(cause) => Failure::Unavailable(cause),
        };
        let (denied, cause) = (matches!(failure, Failure::Denied(_)), failure.to_string());
        self.update(|status| status.certificate_failed(&cause, denied));
        // With a certificate in force nothing is lost by waiting: it proves the next renewal, which needs no token.
        let is_final = !matches!(failure, Failure::Unavailable(_));
        if is_final && !self.life.is_open() && self.client.has_stale_files() {
            let message = format!("{cause}; a file of the key \"ca\" was replaced, and only a new start can read it");
            return Err(Error::Denied(Refusal { code: None, message }));
        }
        if self.path.networks().is_none() {
            notify::status(&format!("no certificate yet: {cause}"));
        }
        self.life.failed(now, failure);
        Ok(())
    }

    /// Refuses a certificate with other networks than the first one, whose addresses the pod and its peers already use.
    fn check(&self, issued: Box<Issued>) -> Result<Box<Issued>, Refusal> {
        match self.path.networks() {
            Some(networks) if networks != issued.identity.networks() => {
                let given = issued.identity.networks();
                let message = format!("the CA changed the overlay address from {networks:?} to {given:?}");
                Err(Refusal { code: None, message })
            }
            _ => match self.contradiction(issued.identity.networks()) {
                Some(message) => Err(Refusal { code: None, message }),
                None => Ok(issued),
            },
        }
    }

    /// Why a certificate for these networks is none for a captured pod.
    fn contradiction(&self, networks: &[IpNet]) -> Option<String> {
        self.capture.as_ref()?.contradiction(networks)
    }

    #[inline(never)]
    fn look_at_table(&mut self) {
        let Some(capture) = &mut self.capture else { return };
        if let Some(directory) = capture.refresh() {
            self.path.set_directory(directory);
        }
        let report = capture.report();
        self.update(|status| status.table = Some(report));
    }

    #[inline(never)]
    fn install(&mut self, issued: Issued, provisional: bool) -> Result<(), Error> {
        let Issued { identity, trust, renewal_key, reply } = issued;
        let bundle = trust.certificates().map(Certificate::to_pem).collect();
        let is_first = self.path.networks().is_none();
        self.follow(reply.lighthouses.clone(), identity.networks());
        if is_first {
            let reports = self.reports.clone();
            let ended = move |result| reports.send(Event::DriverEnded(result));
            self.path.open(&identity, &trust, &self.settings, self.inherited.take(), ended)?;
        } else {
            self.path.swap(identity.clone(), trust);
        }
        let now = self.clock.now();
        let certificate = identity.primary();
        let expires = moment(certificate.not_after());
        let install =
            if provisional { self.life.issued_provisionally(now, expires) } else { self.life.issued(now, expires) };
        if install == Install::Open && !is_first {
            self.path.reopen(&self.settings);
        }
        self.trust.begin(now.uptime);
        self.is_provisional = provisional;
        tracing::info!(cert = certificate.name(), networks = ?certificate.networks(), groups = ?certificate.groups(),
            notAfter = certificate.not_after(), provisional, fingerprint = %certificate.fingerprint(), "Certificate in use");
        let handle = self.path.handle().cloned();
        self.update(|status| status.certificate_installed(identity.clone(), provisional, handle));
        if provisional {
            self.enrolment.waits_for_init();
            notify::status("running with a provisional certificate, waiting for the pod's init container");
            return Ok(());
        }
        if let Some(kept) = &mut self.kept {
            kept.put(&identity, reply);
        }
        self.client.ask_as(identity.clone());
        self.enrolment.holds(identity, renewal_key, bundle);
        if is_first && self.is_awaited {
            notify::ready();
        }
        notify::status("running");
        Ok(())
    }

    #[inline(never)]
    fn ask_whom_to_trust(&self, asked: Duration) -> Result<(), Error> {
        let (client, reports, etag) = (self.client.clone(), self.reports.clone(), self.etag.clone());
        spawn("ca-trust", move || {
            let answer = Box::new(client.trust(etag.as_deref(), Duration::from_secs(MAX_WAIT_SECONDS), TRUST_TIMEOUT));
            reports.send(Event::Trust { asked, answer });
        })
    }

    #[inline(never)]
    fn told_whom_to_trust(&mut self, asked: Duration, answer: Result<TrustAnswer, ca_client::Error>) {
        let now = self.clock.now();
        let news = match answer {
            Ok(TrustAnswer { news, retry_after }) => {
                self.trust.answered(asked, now.uptime, news.is_some(), retry_after);
                self.update(|status| status.trust_confirmed = Some(now.wall));
                news
            }
            Err(error) => {
                tracing::debug!(%error, "The CA does not say whom to trust");
                let _ = self.trust.failed(now.uptime);
                None
            }
        };
        let Some(news) = news else { return };
        let identity = self.status.lock().unwrap_or_else(PoisonError::into_inner).identity.clone();
        let standing =
            identity.map_or(Standing::Good, |identity| Standing::of(&identity, &news.trust, unix_seconds(now.wall)));
        tracing::info!(
            authorities = news.trust.certificates().count(),
            standing = standing.name(),
            etag = news.etag,
            "Trust changed"
        );
        self.etag = Some(news.etag);
        if let Some(kept) = &mut self.kept {
            kept.put_trust(&news.answer);
        }
        if let Some(networks) = self.path.networks().map(<[_]>::to_vec) {
            self.follow(news.answer.lighthouses, &networks);
        }
        if let Some(key) = news.renewal_key {
            self.enrolment.renew_with(key);
        }
        // A closed path keeps its empty trust.
        if self.life.is_open() {
            self.path.set_trust(news.trust);
        }
        self.life.judged(now, standing);
    }

    /// Switches to the lighthouses that the CA announced, beside those of the chain's entry.
    fn follow(&mut self, announced: Lighthouses, own: &[IpNet]) {
        self.announced = announced.clone();
        if self.configured.add(announced, own, &mut self.settings) {
            tracing::info!(lighthouses = ?self.settings.lighthouses, "The CA announced lighthouses");
            self.path.set_lighthouses(&self.settings);
        }
    }

    /// Goes on with the settings of the tunnel that the launch file has now. What is refused changes nothing.
    #[inline(never)]
    fn reload(&mut self) {
        let read = self.contract.read().map_err(|error| error.to_string()).and_then(|(spec, hash)| {
            let settings = Settings::read_for_pod(&Value::from(&spec.nebula)).map_err(|error| error.to_string())?;
            let networks = self.path.networks().unwrap_or_default();
            match link::too_small_for_v6(settings.tun.device_mtu(), networks) {
                Some(why) => Err(format!("the device: {why}")),
                None => Ok((settings, hash)),
            }
        });
        let (mut settings, hash) = match read {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(error, "The changed settings are refused; the tunnel goes on with those before");
                self.update(|status| {
                    status.settings.reloads += 1;
                    status.settings.refused = Some(error);
                });
                return;
            }
        };
        settings.remarks.iter().for_each(|remark| tracing::warn!("{remark}"));
        self.configured = Configured::of(&settings);
        if let Some(networks) = self.path.networks() {
            self.configured.add(self.announced.clone(), networks, &mut settings);
        }
        log::apply(settings.logging);
        self.path.reconfigure(&settings, &self.settings, self.life.is_open());
        let before = std::mem::replace(&mut self.settings, settings);
        let started_with = self.started_with.get_or_insert_with(|| Box::new(before));
        let mut at_the_next_start = reloaded::needs_restart(started_with, &self.settings);
        // This process may no longer change routes.
        at_the_next_start.extend((started_with.tun.routes != self.settings.tun.routes).then_some("tun.routes"));
        tracing::info!(contract = hash, ?at_the_next_start, "The settings of the tunnel have been changed");
        let device_mtu = Some(self.settings.tun.device_mtu());
        let at_the_next_start = at_the_next_start.into_iter().map(str::to_owned).collect();
        self.update(|status| {
            let reloads = status.settings.reloads + 1;
            status.settings =
                FollowedSettings { contract: hash, reloads, device_mtu, refused: None, at_the_next_start };
        });
    }

    #[inline(never)]
    fn close(&mut self, closing: Closing) {
        let why = match closing {
            Closing::Expired => "the certificate expired and could not be renewed",
            Closing::Revoked => "the certificate was revoked",
        };
        tracing::error!("The tunnel is closed: {why}");
        notify::status(&format!("closed: {why}"));
        self.path.close();
        self.update(|status| status.closed = Some(why));
    }

    #[inline(never)]
    fn stop(&mut self, events: &EventQueue) {
        // The device ends with its last descriptor, and its last user waits for that.
        self.descriptors = Arc::default();
        stored::end_device();
        let has_ended = matches!(self.handover, Handover::Stopped { .. });
        let mut is_running = self.path.stop() && !has_ended;
        while is_running {
            match events.next_sent(STOP_TIMEOUT) {
                Some(Event::DriverEnded(_)) => is_running = false,
                Some(_) => {}
                None => {
                    tracing::warn!("The tunnel did not close in time");
                    return;
                }
            }
        }
        self.path.remove_device();
        tracing::info!("Goodbye");
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn unix_seconds(moment: Moment) -> UnixTime {
    UnixTime::try_from(moment.as_secs()).unwrap_or(UnixTime::MAX)
}

const NETNS_CHECK_INTERVAL: Duration = Duration::from_secs(2);
const FAST_CHECK_INTERVAL: Duration = Duration::from_millis(250);
const FAST_CHECKS_FOR: Duration = Duration::from_secs(5);
// A runtime may remount the namespace during set-up, so a single failed check is not enough.
const NETNS_GONE_FOR: Duration = Duration::from_secs(1);
const STOP_TIMEOUT: Duration = Duration::from_millis(250);
// The plugin ends the process that did not serve, and starts the old program.
const STOPPED_FOR: Duration = Duration::from_secs(30);
const TRUST_TIMEOUT: Duration = Duration::from_secs(10);
// Init itself gives up after five minutes, by default.
const INIT_OVERDUE_AFTER: Duration = Duration::from_secs(360);
const INIT_OVERDUE: &str = "no init container has shown the pod's token, so the pod is closed: see whether the pod has \
                            nebula-cni-init as its first init container and how that ended; a pod whose init container has \
                            ended must be recreated";
// By then the next request to the CA is in flight, and little of the memory that the last answer took is needed again.
const RELEASE_MEMORY_AFTER: Duration = Duration::from_secs(1);
