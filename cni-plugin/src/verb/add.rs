//! ADD: gives a pod its tunnel and passes prevResult on. An attempt that fails is undone before the error is printed.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::Status;
use nebula_cni_contract::launch::{
    Capture, Isolate, LaunchSpec, Pod, StartError, Target, Underlay, ca_address, is_refusal_of_token,
};
use nebula_cni_contract::netns::Netns;

use crate::attachment::files::{Files, write_durably};
use crate::attachment::lock::Lock;
use crate::attachment::queue::Turn;
use crate::attachment::record::{self, Found, Record, State};
use crate::attachment::shared;
use crate::attachment::{foreign, released, room, sibling};
use crate::enrolment::{Decision, Knowledge};
use crate::host::Host;
use crate::link::capture::PodCapture;
use crate::link::capture_guard::{CaptureGuard, Terms};
use crate::link::guard::{self, Guard, Tunnel};
use crate::primary::network;
use crate::primary::settings::{Primary, is_primary};
use crate::programs;
use crate::reply::{Error, code};
use crate::request::checked::prefix;
use crate::request::prev_result::PrevResult;
use crate::request::{Attach, Key, NetworkConfig};
use crate::settings::Settings;
use crate::settings::capturing::Capturing;
use crate::settings::isolation::source_towards;
use crate::supervisor::kind::Kind;
use crate::supervisor::{Launch, StartFailure, Systemd};
use crate::verb::del::{detach, detach_closed};
use crate::verb::node_token::NodeToken;

/// Attaches the pod and returns the result for stdout. Printing it is the commit point.
///
/// # Errors
/// Everything has been undone when an error is returned; if that failed too, the record stays for DEL.
pub fn run(request: &Attach, host: &Host<'_>) -> Result<String, Error> {
    let Some(primary) = Primary::read(&request.config)? else {
        let settings = Settings::read(&request.config)?;
        return chained(request, &settings, &required_prev_result(&request.config)?, host);
    };
    if request.config.prev_result()?.is_some() {
        return Err(Error::new(code::CONFIG, "there is a prevResult, and this entry has \"primary\": true")
            .details("put it before all other plugins of the list, or leave \"primary\" out"));
    }
    let settings = primary.has_tunnels.then(|| Settings::read(&request.config)).transpose()?;
    let made = network::add(request, &primary, host)?;
    let Some(settings) = settings else { return Ok(made.result.as_output(&request.config.version)) };
    chained(request, &settings, &made.result, host).map_err(|error| match made.is_new {
        true => match network::remove(&request.config, &request.key) {
            Ok(()) => error,
            Err(undo) => error.also(&undo),
        },
        false => error,
    })
}

/// Gives the pod its tunnel, behind the plugin with this result.
fn chained(request: &Attach, settings: &Settings, prev_result: &PrevResult, host: &Host<'_>) -> Result<String, Error> {
    let output = |given: Given<'_>| match given {
        Given::Tunnel(Record { host_route: Some(route), .. }) => {
            prev_result.renumbered(&request.key.ifname, route.destination, &request.config.version)
        }
        Given::Tunnel(_) | Given::BySibling | Given::Nothing => Ok(prev_result.as_output(&request.config.version)),
    };
    give_tunnel(request, settings, prev_result, host, Mode::NewPod, output)
}

/// In what state the pod is that gets a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// None of its processes runs yet; if it gets no tunnel, the runtime removes it.
    NewPod,
    /// It runs, and goes on whatever becomes of the attachment: with the key `isolate` or `capture`, its link is closed
    /// before anything else and stays closed if the attachment fails.
    RunningPod {
        /// Whether to replace an attachment that looks complete.
        afresh: bool,
    },
}

/// What a pod has got.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Given<'a> {
    /// Its tunnel.
    Tunnel(&'a Record),
    /// Nothing new: the pod has its tunnel by another of its interfaces.
    BySibling,
    /// Nothing, because it is not enrolled.
    Nothing,
}

/// Attaches the pod if it is enrolled and no other interface has its tunnel, and returns what `output` makes of that.
/// If `output` fails, the attachment is undone.
pub(crate) fn give_tunnel<T>(
    request: &Attach,
    settings: &Settings,
    prev_result: &PrevResult,
    host: &Host<'_>,
    mode: Mode,
    output: impl Fn(Given<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let deadline = Deadline::after(host.clock, settings.timeout);
    let Some(pod) = enrolled(request, settings, host, deadline)? else { return output(Given::Nothing) };
    // Before the interface is looked at: it need not be one that could have a tunnel.
    if has_sibling(request, settings, host)? {
        return output(Given::BySibling);
    }
    let attachment = Attachment::check(request, settings, prev_result, pod, host)?;

    // Kept until ADD returns. The time limit is for the work, not for the time in the queue.
    let _turn = Turn::wait(&settings.state_dir, width(), host.clock, Deadline::after(host.clock, QUEUE_TIMEOUT))?;
    let deadline = Deadline::after(host.clock, settings.timeout);
    let lock = Lock::acquire(&attachment.files, host.clock, deadline)?;
    if mode != (Mode::RunningPod { afresh: true })
        && let Some(record) = attachment.in_place(settings.renumber, host)
    {
        return output(Given::Tunnel(&record));
    }
    loop {
        let token = NodeToken::of(&settings.ca, &settings.state_dir);
        let attached =
            attachment.attach(settings, host, deadline, mode).and_then(|record| output(Given::Tunnel(&record)));
        let error = match attached {
            Ok(output) => return Ok(output),
            Err(error) => named(error, &attachment.pod),
        };
        return Err(match attachment.undo(host, mode) {
            // A pod that runs is attempted again by the agent, which then has a token.
            Ok(Undone::Completely) if mode == Mode::NewPod && token.is_replaced_after(&error, host.clock, deadline) => {
                continue;
            }
            Ok(Undone::Completely) => {
                lock.remove();
                error
            }
            Ok(Undone::ButClosed) => error,
            Err(undo) => error.also(&undo),
        });
    }
}

/// The pod of a request if it is enrolled, else `None`.
pub(crate) fn enrolled(
    request: &Attach,
    settings: &Settings,
    host: &Host<'_>,
    deadline: Deadline,
) -> Result<Option<Pod>, Error> {
    let program = || settings.instance_binary(host.plugin_dir.as_deref());
    let container_id = &request.key.container_id;
    let knowledge = Knowledge { container_id, labels: host.labels, program: &program, clock: host.clock, deadline };
    settings.enrolment.decide(&request.args, &request.config, knowledge).map(Decision::pod)
}

/// Whether another interface of the pod has its tunnel in this network.
pub(crate) fn has_sibling(request: &Attach, settings: &Settings, host: &Host<'_>) -> Result<bool, Error> {
    let netns = || Ok(open_netns(request, host)?.id);
    sibling::has_tunnel(&settings.state_dir, &request.key, &settings.device, netns, host)
}

/// Undoes an ADD whose result could not be printed.
///
/// # Errors
/// The same as DEL.
pub fn undo(request: &Attach, host: &Host<'_>) -> Result<(), Error> {
    let files = Files::new(&Settings::state_dir(&request.config), &request.key);
    let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))?;
    detach(&files, host)?;
    lock.remove();
    if is_primary(&request.config)? { network::remove(&request.config, &request.key) } else { Ok(()) }
}

/// The result of the previous plugin, which a chained plugin cannot do without.
pub(crate) fn required_prev_result(config: &NetworkConfig) -> Result<PrevResult, Error> {
    config.prev_result()?.ok_or_else(|| {
        Error::new(code::CONFIG, "prevResult is missing: nebula-cni-plugin must be chained after an interface plugin")
            .details("put it behind the plugin that gives pods their address, in the \"plugins\" of a .conflist")
    })
}

/// What is left of a failed attachment.
enum Undone {
    /// Nothing.
    Completely,
    /// The rules of the pod's link, and a record that names them.
    ButClosed,
}

/// One attachment whose request has been checked; from here on the system may be changed.
struct Attachment<'a> {
    request: &'a Attach,
    files: Files,
    // Held open until the instance has opened it, so that the identity in the launch contract stays valid.
    netns: Netns,
    pod: Pod,
    pod_address: IpAddr,
    other_address: Option<IpAddr>,
    instance: PathBuf,
    device: &'a str,
    /// What the pod may reach besides the overlay, and the rules on its link that enforce it.
    isolated: Option<(Isolate, Guard)>,
    /// Which traffic goes through the tunnel whatever address it has, and what makes it go there.
    captured: Option<(Capture, PodCapture)>,
}

impl<'a> Attachment<'a> {
    fn check(
        request: &'a Attach,
        settings: &'a Settings,
        prev_result: &PrevResult,
        pod: Pod,
        host: &Host<'_>,
    ) -> Result<Self, Error> {
        let pod_address = prev_result.pod_address(&request.key.ifname)?;
        let other_address = prev_result.other_address(&request.key.ifname, pod_address);
        let device = settings.device.as_str();
        if device == request.key.ifname || prev_result.has_container_interface(device) {
            let msg = format!("device {device:?} is the name of an interface the pod already has");
            return Err(Error::new(code::CONFIG, msg).details("choose another name with the key \"device\""));
        }
        let instance = settings.instance_binary(host.plugin_dir.as_deref())?;
        let netns = open_netns(request, host)?;
        let files = Files::new(&settings.state_dir, &request.key);
        let mut attachment = Self {
            request,
            files,
            netns,
            pod,
            pod_address,
            other_address,
            instance,
            device,
            isolated: None,
            captured: None,
        };
        if let Some(isolation) = &settings.isolate {
            let allowed = isolation.of_pod(pod_address, &request.config, prev_result);
            let guard = attachment.guard(settings, &allowed, prev_result, host)?;
            attachment.isolated = Some((allowed, guard));
        }
        if let Some(capturing) = &settings.capture {
            attachment.captured = Some(attachment.capture(capturing, prev_result, host)?);
        }
        Ok(attachment)
    }

    fn guard(
        &self,
        settings: &Settings,
        allowed: &Isolate,
        prev_result: &PrevResult,
        host: &Host<'_>,
    ) -> Result<Guard, Error> {
        let ifname = &self.request.key.ifname;
        let link = host.links.of_pod(&self.netns, ifname, self.pod_address).map_err(|why| {
            Error::new(code::ISOLATION, format!("cannot isolate the pod: {why}")).details(
                "the key \"isolate\" needs rules on the node's end of the pod's link, since a raw socket in the pod passes all \
                 others by; leave it out for pods with such links",
            )
        })?;
        let tunnel = match settings.underlay {
            Underlay::Host => None,
            Underlay::Pod => Some(Tunnel { ports: settings.port_range, ca: ca_address(&settings.ca.url) }),
        };
        let table = guard::table_name(&self.files.guard_tables(), &link.name);
        Ok(Guard::new(table, link, prev_result.gateways(), allowed.clone(), tunnel))
    }

    fn capture(
        &self,
        capturing: &Capturing,
        prev_result: &PrevResult,
        host: &Host<'_>,
    ) -> Result<(Capture, PodCapture), Error> {
        let ifname = &self.request.key.ifname;
        let link = host.links.of_pod(&self.netns, ifname, self.pod_address).map_err(|why| {
            Error::new(code::CAPTURE, format!("cannot capture the pod's traffic: {why}")).details(
                "the key \"capture\" needs rules on the node's end of the pod's link, since a raw socket in the pod passes all \
                 others by; leave it out for pods with such links",
            )
        })?;
        let reported = prev_result.addresses(ifname);
        let on_link = link.addresses.iter().map(IpNet::addr);
        capturing.check_pod(&on_link.chain(reported.iter().copied()).collect::<Vec<_>>())?;
        let addresses = [vec![self.pod_address], reported].concat();
        let capture = capturing.of_pod(&addresses, &self.files.state_dir());
        let sources = capture.sources.iter().filter_map(|source| source_towards(*source));
        let mut node: Vec<IpAddr> = prev_result.gateways().into_iter().chain(link.node_addresses.clone()).collect();
        node.extend(sources);
        node.retain(|address| !address.is_unspecified() && !capture.sources.contains(address));
        node.sort();
        node.dedup();
        let guard = CaptureGuard::new(self.files.capture(), link, capturing.terms.clone(), node.clone());
        let Terms { ranges, services, load_balancers, exclude, node_ports, .. } = &capturing.terms;
        let captured = [&ranges[..], services, load_balancers].concat();
        let made =
            PodCapture::new(ifname.clone(), captured, exclude, &node, guard).with_node_ports(*node_ports, exclude);
        Ok((capture, made))
    }

    /// Returns the record of an earlier ADD if everything that this ADD would set up is already in place.
    fn in_place(&self, renumber: bool, host: &Host<'_>) -> Option<Record> {
        let Ok(Found::Record(record)) = Record::load(&self.files.record()) else { return None };
        let (supervisor, process, host_route) = (record.supervisor, record.process, record.host_route);
        // Another program may have taken over, and been given up for the one before.
        let (instance, predecessor, is_upgrading) = (record.instance.clone(), record.predecessor, record.is_upgrading);
        let (program, previous) = (record.program.clone(), record.previous.clone());
        let (user, memory_limit, guard) = (record.user, record.memory_limit, record.guard.clone());
        let (restarts, refused, is_being_told) = (record.restarts, record.refused.clone(), record.is_being_told);
        let is_guarded = |guard: &Guard| host.guards.is_in_force(guard).unwrap_or(false);
        if guard.is_some() != self.isolated.is_some() || guard.as_ref().is_some_and(|guard| !is_guarded(guard)) {
            return None;
        }
        let is_captured =
            |capture: &PodCapture| host.captures.missing(&self.netns, capture).is_ok_and(|missing| missing.is_empty());
        if record.capture.as_ref().is_some_and(|capture| !is_captured(capture)) {
            return None;
        }
        let made = Record { user, memory_limit, guard, restarts, refused, is_being_told, ..self.record(supervisor) };
        let made = Record { program, previous, ..made };
        let expected =
            Record { state: State::Running, process, predecessor, is_upgrading, instance, host_route, ..made };
        let is_there = *record == expected
            && host_route.is_some() == renumber
            && host_route.is_none_or(|route| host.routes.is_used(&route))
            && host.supervisor(supervisor).is_alive(&self.files, process, host.clock);
        is_there.then_some(expected)
    }

    fn attach(&self, settings: &Settings, host: &Host<'_>, deadline: Deadline, mode: Mode) -> Result<Record, Error> {
        let found = Record::load(&self.files.record()).map_err(|e| self.io("read the record", &e))?;
        if let Found::Foreign(why) = &found {
            return Err(foreign::refusal(&self.files.record(), why));
        }
        let stays_closed = self.stays_closed(mode);
        if stays_closed {
            self.close(host)?;
        }
        match found {
            Found::Record(other) if other.key() != self.request.key => {
                let msg =
                    format!("{} belongs to container {}", self.files.record().display(), other.target.container_id);
                return Err(Error::new(code::CONFIG, msg));
            }
            // Also if there is no record, because an instance may have outlived it, with the whole state folder gone;
            // but the search for that takes the longer the more processes the node runs, and a new pod has neither it
            // nor its device.
            Found::Nothing if mode == Mode::NewPod && self.files.have_left_nothing() && !self.has_device(host) => {}
            Found::Record(other) if stays_closed => {
                detach_closed(&self.files, host)?;
                // The rules of the other key close the link by now.
                if other.guard.is_some() && self.isolated.is_none() {
                    let failed = |e| self.io("remove the rules of the key isolate", &e);
                    host.guards.remove(&self.files.guard_tables()).map_err(failed)?;
                }
            }
            _ if stays_closed => detach_closed(&self.files, host)?,
            _ => detach(&self.files, host)?,
        }
        self.fence(settings, host)?;
        released::forget(&settings.state_dir, &self.request.key.network, &self.pod.uid);

        let supervisor = match settings.supervisor {
            Some(configured) => configured,
            None if Systemd::answers(host.clock) => Kind::Systemd,
            None => Kind::Direct,
        };
        // One that others may write cannot be kept; it is started where it is, as ever.
        let program = programs::keep_installed(&self.instance)
            .inspect_err(|why| {
                eprintln!("nebula-cni-plugin: the instance starts again with whatever is installed: {why}")
            })
            .ok();
        let mut record = Record { memory_limit: settings.memory_limit, program, ..self.record(supervisor) };
        record.save(&self.files).map_err(|e| self.io("write the record", &e))?;
        self.close(host)?;
        record.user = room::make(&self.files, settings.users).map_err(|e| self.io("make the instance's folder", &e))?;
        let spec = LaunchSpec { user: record.user, ..self.launch_spec(settings) };
        let bytes = serde_json::to_vec(&spec).map_err(|e| self.io("encode the launch contract", &e.into()))?;
        write_durably(&self.files.launch(), &bytes).map_err(|e| self.io("write the launch contract", &e))?;

        let program = record.to_start();
        let mut started = |process| {
            record.process = process;
            if process.is_some() { record.save(&self.files) } else { Ok(()) }
        };
        let launch = Launch {
            instance: &program,
            files: &self.files,
            netns: &self.request.netns,
            description: &format!("Nebula tunnel of pod {}/{}", self.pod.namespace, self.pod.name),
            budget: settings.timeout,
            memory_limit: settings.memory_limit,
            replaces: None,
        };
        let outcome = host.supervisor(supervisor).start(&launch, host.clock, deadline, &mut started);
        outcome.map_err(|failure| explain(&failure, settings))?;
        if settings.renumber {
            self.renumber(&mut record, settings, host)?;
        }
        record.state = State::Running;
        record.save(&self.files).map_err(|e| self.io("write the record", &e))?;
        Ok(record)
    }

    /// Whether a failed attachment leaves the pod closed.
    fn stays_closed(&self, mode: Mode) -> bool {
        mode != Mode::NewPod && (self.isolated.is_some() || self.captured.is_some())
    }

    /// Whether the rules on the pod's link are in force.
    fn is_closed(&self, host: &Host<'_>) -> bool {
        let isolated = self.isolated.as_ref().map(|(_, guard)| host.guards.is_in_force(guard).unwrap_or(false));
        let captured = self
            .captured
            .as_ref()
            .map(|(_, capture)| host.captures.unguarded(capture).is_ok_and(|missing| missing.is_empty()));
        isolated != Some(false) && captured != Some(false)
    }

    /// Whether the pod has a device of this name already.
    fn has_device(&self, host: &Host<'_>) -> bool {
        host.namespaces.link(&self.netns, self.device).is_ok_and(|link| link.is_some())
    }

    /// Undoes a failed attachment.
    fn undo(&self, host: &Host<'_>, mode: Mode) -> Result<Undone, Error> {
        if !self.stays_closed(mode) || !self.is_closed(host) {
            return detach(&self.files, host).map(|()| Undone::Completely);
        }
        detach_closed(&self.files, host)?;
        // Names the rules for the reconciliation, and tells that the attachment is not complete.
        let record = self.record(Kind::Direct);
        record.save(&self.files).map_err(|e| self.io("write the record", &e))?;
        Ok(Undone::ButClosed)
    }

    /// Installs the rules on the pod's link, of isolation or of capture, and what sends captured traffic to the device.
    /// For a new pod that is before any of its processes run.
    fn close(&self, host: &Host<'_>) -> Result<(), Error> {
        if let Some((_, guard)) = &self.isolated {
            self.close_link(guard, host)?;
        }
        let Some((_, capture)) = &self.captured else { return Ok(()) };
        shared::make_cluster_folder(&self.files.state_dir())
            .map_err(|e| self.io("make the folder of the cluster table", &e))?;
        host.captures.install(&self.netns, capture).map_err(|e| {
            let msg =
                format!("cannot capture the pod's traffic: rules, routes or settings for {}: {e}", capture.guard.link);
            Error::new(code::CAPTURE, msg).details(
                "the kernel must have policy routing, and nf_tables for single links in both directions (Linux 5.16, \
                 NETFILTER_EGRESS)",
            )
        })
    }

    /// Installs the isolation rules.
    fn close_link(&self, guard: &Guard, host: &Host<'_>) -> Result<(), Error> {
        host.guards.install(guard).map_err(|e| {
            let msg = format!("cannot isolate the pod: rules for its link {}: {e}", guard.link);
            Error::new(code::ISOLATION, msg).details(
                "the kernel must have nf_tables for single links in both directions (Linux 5.16, NETFILTER_EGRESS)",
            )
        })?;
        host.links.harden(&self.netns, &self.request.key.ifname);
        Ok(())
    }

    /// Lets the node reach the overlay address, which becomes the pod's address in Kubernetes, without a tunnel.
    fn renumber(&self, record: &mut Record, settings: &Settings, host: &Host<'_>) -> Result<(), Error> {
        let status = Status::ask(&self.files.status_socket()).map_err(|e| {
            Error::new(code::INSTANCE_UNREACHABLE, format!("the instance does not tell the overlay address: {e}"))
        })?;
        let address = status.counterpart(self.pod_address).ok_or_else(|| {
            let msg = format!("cannot renumber {}: the certificate has {:?}", self.pod_address, status.overlay);
            Error::new(code::ADDRESS, msg).details("the overlay address must be of the same family as the pod's")
        })?;
        self.refuse(record, settings, &status, host).map_err(|e| {
            Error::new(code::IO, format!("cannot keep the node from sending to the overlay in clear: {e}"))
        })?;
        let failed = |e| Error::new(code::IO, format!("cannot make the node's route to {address}: {e}"));
        let route = host.routes.like(self.pod_address, address).map_err(failed)?;
        // Recorded before the route is added, so that the record always names everything to be removed.
        record.host_route = Some(route);
        record.save(&self.files).map_err(|e| self.io("write the record", &e))?;
        host.routes.add(&route).map_err(failed)
    }

    /// Makes the overlay unreachable from the node, except where a better route leads: kube-proxy may choose a
    /// renumbered pod of another node, to which this node has only its default route.
    fn refuse(&self, record: &mut Record, settings: &Settings, status: &Status, host: &Host<'_>) -> io::Result<()> {
        let own = status.overlay.iter().filter_map(|text| prefix(text)).map(|network| network.trunc());
        let mut networks: Vec<IpNet> = settings.overlay.iter().copied().chain(own).collect();
        networks.sort();
        networks.dedup();
        let _lock = shared::lock_shared(&settings.state_dir)?;
        record.refused = networks;
        record.save(&self.files)?;
        record.refused.iter().try_for_each(|network| host.routes.refuse(*network))
    }

    /// Stops instances of earlier sandboxes of the same pod: two instances of one pod would compete for its overlay
    /// address.
    fn fence(&self, settings: &Settings, host: &Host<'_>) -> Result<(), Error> {
        if self.pod.uid.is_empty() {
            return Ok(());
        }
        let paths = record::list(&settings.state_dir, &self.request.key.network)
            .map_err(|e| self.io("list the records", &e))?;
        for path in paths {
            let Ok(Found::Record(other)) = Record::load(&path) else { continue };
            if other.target.pod.uid != self.pod.uid || other.target.container_id == self.request.key.container_id {
                continue;
            }
            let files = Files::new(&settings.state_dir, &other.key());
            let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))?;
            detach(&files, host)?;
            lock.remove();
        }
        Ok(())
    }

    fn target(&self) -> Target {
        let Key { network, container_id, ifname } = self.request.key.clone();
        Target {
            network,
            container_id,
            ifname,
            netns: self.request.netns.clone(),
            netns_id: self.netns.id,
            pod: self.pod.clone(),
            pod_address: self.pod_address,
            other_address: self.other_address,
            device: self.device.to_owned(),
        }
    }

    fn record(&self, supervisor: Kind) -> Record {
        Record {
            version: Record::VERSION,
            state: State::Intent,
            target: self.target(),
            supervisor,
            instance: self.instance.clone(),
            program: None,
            previous: None,
            process: None,
            host_route: None,
            refused: Vec::new(),
            user: None,
            memory_limit: None,
            restarts: None,
            predecessor: None,
            is_upgrading: false,
            is_being_told: false,
            guard: self.isolated.as_ref().map(|(_, guard)| guard.clone()),
            capture: self.captured.as_ref().map(|(_, capture)| capture.clone()),
            status_socket: self.files.status_socket(),
            rest: BTreeMap::new(),
        }
    }

    fn launch_spec(&self, settings: &Settings) -> LaunchSpec {
        LaunchSpec {
            version: LaunchSpec::VERSION,
            target: self.target(),
            flow: settings.flow,
            provisional: settings.provisional,
            mode: settings.mode,
            underlay: settings.underlay,
            isolate: self.isolated.as_ref().map(|(allowed, _)| allowed.clone()),
            capture: self.captured.as_ref().map(|(capture, _)| capture.clone()),
            renumber: settings.renumber,
            node_address: settings.renumber.then(|| source_towards(self.pod_address)).flatten(),
            // What is captured has a routing table of its own; the device is in no other.
            overlay: if self.captured.is_some() { Vec::new() } else { settings.overlay.clone() },
            budget_seconds: settings.timeout.as_secs().saturating_sub(UNDO_SECONDS).max(1),
            port_range: settings.port_range,
            ca: settings.ca.clone(),
            nebula: settings.nebula.clone(),
            user: None,
            status_socket: self.files.status_socket(),
        }
    }

    fn io(&self, what: &str, error: &io::Error) -> Error {
        Error::new(code::IO, format!("cannot {what} in {}: {error}", self.files.dir().display()))
    }
}

/// Opens CNI_NETNS once; from then on the open file is used, not the path.
pub(crate) fn open_netns(request: &Attach, host: &Host<'_>) -> Result<Netns, Error> {
    let path = request.netns.display();
    let bad = |why: &dyn std::fmt::Display| Error::new(code::NETNS, format!("CNI_NETNS {path}: {why}"));
    let netns = host.namespaces.open(&request.netns).map_err(|e| bad(&e))?;
    let own = host.namespaces.own().map_err(|e| bad(&format!("cannot tell it from the plugin's own: {e}")))?;
    if netns.id == own && !request.own_netns_allowed {
        return Err(bad(&"is the network namespace of the plugin itself")
            .details("pods with hostNetwork must not be given to CNI"));
    }
    Ok(netns)
}

fn named(mut error: Error, pod: &Pod) -> Error {
    error.msg = format!("pod {}/{}: {}", pod.namespace, pod.name, error.msg);
    error
}

fn explain(failure: &StartFailure, settings: &Settings) -> Error {
    let seconds = settings.timeout.as_secs();
    match failure {
        StartFailure::Spawn(_) | StartFailure::Record(_) => Error::new(code::INSTANCE_FAILED, failure.to_string()),
        StartFailure::Deadline { said } => {
            let msg = format!("the tunnel was not ready within {seconds} s");
            let said = if said.is_empty() { "the instance said nothing" } else { said };
            Error::new(code::DEADLINE, msg).details(said)
        }
        StartFailure::Ended { error, said, .. } => {
            let error = match error {
                Some(StartError::Refused { code: reason, .. })
                    if reason.as_deref().is_some_and(is_refusal_of_token) =>
                {
                    let msg = "the CA service refuses the node's token: the node agent that wrote it has ended, and there \
                               was no next one in time";
                    Error::new(code::NODE_TOKEN, msg)
                }
                Some(StartError::Refused { .. }) => {
                    Error::new(code::IDENTITY_DENIED, "the CA service refused a certificate")
                }
                Some(StartError::Misconfigured { .. }) => {
                    let msg = format!("the CA service at {} cannot be used as configured", settings.ca.url);
                    Error::new(code::CA_UNUSABLE, msg)
                }
                Some(StartError::Unavailable { .. }) => {
                    let msg = format!("the CA service at {} gives no certificate now", settings.ca.url);
                    Error::new(code::IDENTITY_UNAVAILABLE, msg)
                }
                Some(StartError::Failed { .. }) | None => Error::new(code::INSTANCE_FAILED, failure.to_string()),
            };
            error.details(said.as_str())
        }
    }
}

/// How many pods of a node are started at the same time.
fn width() -> u64 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    // A start waits for the CA at times.
    u64::try_from(processors).unwrap_or(u64::MAX).saturating_add(1)
}

// The kubelet gives up after four minutes. With the longest time limits for labels and for the work, a minute each,
// this leaves it some.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(100);

// The DEL of an older sandbox may be in progress; it takes a few seconds at most.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

// Part of ADD's time limit that is reserved for undoing a failed start and reporting the reason.
const UNDO_SECONDS: u64 = 2;
