//! Makes, checks and removes a pod's interface with its addresses, routes and rules.
//!
//! A lease comes first and goes last. So whatever a call that was killed has left belongs to a lease, and DEL, GC or
//! the next ADD of the same attachment finds it.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::netns::Netns;
use serde_json::value::to_raw_value;

use crate::host::Host;
use crate::link::masquerade::Masquerade;
use crate::link::veth::Veth;
use crate::link::{masquerade, own_source, veth};
use crate::primary::leases::{Lease, Leases, Owner};
use crate::primary::range::Range;
use crate::primary::settings::{self, Ipam, Primary};
use crate::primary::{delegate, forwarding, result};
use crate::reply::{Error, code};
use crate::request::prev_result::PrevResult;
use crate::request::{Attach, Collect, Key, NetworkConfig};
use crate::settings::Settings;
use crate::verb::add::open_netns;

/// What ADD has made.
#[derive(Debug)]
pub struct Made {
    /// As plugins behind us get it.
    pub result: PrevResult,
    /// Whether this call made it.
    pub is_new: bool,
}

/// Gives the pod its interface. One that an earlier ADD made is kept if it is whole.
///
/// # Errors
/// Everything has been undone when an error is returned, or the lease stays for DEL.
pub fn add(request: &Attach, primary: &Primary, host: &Host<'_>) -> Result<Made, Error> {
    let netns = open_netns(request, host)?;
    let (key, config) = (&request.key, &request.config);
    let (veth, leases) = (Veth::new(key), leases(config));
    let failed = |what: &str, error: &io::Error| failed(key, what, error);
    let pod = match (request.args.get("K8S_POD_NAMESPACE"), request.args.get("K8S_POD_NAME")) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        _ => String::new(),
    };
    let owner = Owner { key, pod: &pod, netns: (&request.netns, netns.id) };
    let mtu = primary.mtu.or_else(veth::mtu_of_node).unwrap_or(DEFAULT_MTU);
    let mut dns = config.value("dns")?;

    let lock = leases.lock().map_err(|error| failed("lock the leases", &error))?;
    let mut all = leases.list().map_err(|error| failed("read the leases", &error))?;
    let mut addresses = own(&all, key);
    let is_new = is_whole(&netns, key, &veth, &addresses, host).is_err();
    if is_new {
        if !addresses.is_empty() {
            // A call was killed, or the pod's namespace is another one by now.
            remove_link(&veth).map_err(|error| failed("remove what an earlier call left", &error))?;
            leases.give_back(key).map_err(|error| failed("give its old addresses back", &error))?;
            all.retain(|lease| !lease.is_of(key));
        }
        let networks;
        (addresses, networks) = match &primary.ipam {
            Ipam::Own { ranges, reserved } => {
                (take(&leases, owner, ranges, reserved, &all)?, networks_of(ranges, &all))
            }
            Ipam::Delegated(plugin) => {
                let given = delegate::add(plugin, config, &key.ifname)?;
                dns = given.dns.or(dns);
                note(&leases, owner, &given.addresses).inspect_err(|_| {
                    let _ = delegate::pass_on(plugin, "DEL", config);
                })?;
                (given.addresses, given.networks)
            }
        };
        let masquerade = primary.masquerade.clone().map(|except| Masquerade { ranges: networks, except });
        let made = match masquerade.map_or(Ok(()), |masquerade| masquerade.install(&key.network)) {
            Err(error) => Err(failed("install the rules of \"ipMasq\"", &error)),
            Ok(()) => make(key, &netns, &veth, &addresses, mtu, &pod),
        };
        if let Err(error) = made {
            drop(lock);
            return Err(match remove(config, key) {
                Ok(()) => error,
                Err(undo) => error.also(&undo),
            });
        }
    }
    let netns = request.netns.display().to_string();
    let text = result::of(&veth, &netns, &addresses, mtu, dns, &config.version);
    let raw = to_raw_value(&text).map_err(|error| failed("encode the result", &error.into()))?;
    Ok(Made { result: PrevResult::parse(&raw)?, is_new })
}

fn make(key: &Key, netns: &Netns, veth: &Veth, addresses: &[IpAddr], mtu: u32, pod: &str) -> Result<(), Error> {
    let failed = |what: &str, error: &io::Error| failed(key, what, error);
    forwarding::enable(addresses).map_err(|error| failed("let the node route", &error))?;
    let alias = [&key.network, pod, &key.container_id, &key.ifname].join(" ");
    veth.create(&netns.file, mtu, &alias).map_err(|error| match error.raw_os_error() {
        Some(nix::libc::EEXIST) => {
            let msg = format!("the pod has an interface {:?} already", key.ifname);
            Error::new(code::CONFIG, msg).details("\"primary\" is for the first plugin of the list, which makes it")
        }
        _ => failed("make the veth pair", &error),
    })?;
    own_source::install(veth, addresses).map_err(|error| failed("install the rules about the pod's source", &error))?;
    veth.set_up_pod(&netns.file, addresses).map_err(|error| failed("set up the pod's end", &error))?;
    veth.set_up_node(addresses).map_err(|error| failed("set up the node's end", &error))
}

/// Removes the pod's interface, and gives its addresses back. What is gone already is no error.
///
/// # Errors
/// Code 5 if something cannot be removed; the lease stays then.
pub fn remove(config: &NetworkConfig, key: &Key) -> Result<(), Error> {
    let failed = |what: &str, error: &io::Error| failed(key, what, error);
    remove_link(&Veth::new(key)).map_err(|error| failed("remove the link", &error))?;
    if let Ok(Some(plugin)) = settings::delegate(config) {
        delegate::pass_on(&plugin, "DEL", config)?;
    }
    give_back(config, key)
}

/// The last step.
fn give_back(config: &NetworkConfig, key: &Key) -> Result<(), Error> {
    let failed = |what: &str, error: &io::Error| failed(key, what, error);
    let leases = leases(config);
    let _lock = leases.lock().map_err(|error| failed("lock the leases", &error))?;
    let has_others = leases.give_back(key).map_err(|error| failed("give its addresses back", &error))?;
    if !has_others {
        masquerade::remove(&key.network).map_err(|error| failed("remove the rules of \"ipMasq\"", &error))?;
    }
    Ok(())
}

/// Checks that the pod's interface is as ADD made it.
///
/// # Errors
/// Code 3 without a lease; otherwise the first problem found.
pub fn check(request: &Attach, primary: &Primary, host: &Host<'_>) -> Result<(), Error> {
    let netns = open_netns(request, host)?;
    let (key, config) = (&request.key, &request.config);
    let (veth, leases) = (Veth::new(key), leases(config));
    let failed = |what: &str, error: &io::Error| failed(key, what, error);
    if let Ipam::Delegated(plugin) = &primary.ipam {
        delegate::pass_on(plugin, "CHECK", config)?;
    }
    let addresses = own(&leases.list().map_err(|error| failed("read the leases", &error))?, key);
    if addresses.is_empty() {
        let msg = format!("container {} has no address on this node", key.container_id);
        return Err(Error::new(code::UNKNOWN_CONTAINER, msg).details("delete the pod"));
    }
    let reported = config.prev_result()?.map(|result| result.addresses(&key.ifname)).unwrap_or_default();
    if let Some(other) = reported.iter().find(|address| !addresses.contains(address)) {
        let msg = format!("container {} has no lease of {other}, which ADD reported", key.container_id);
        return Err(Error::new(code::ADDRESS, msg).details("delete the pod"));
    }
    let bad = |why: &str| Error::new(code::DEVICE, format!("{} of the pod is not as it was made: {why}", key.ifname));
    is_whole(&netns, key, &veth, &addresses, host).map_err(|why| bad(&why))?;
    if primary.masquerade.is_some()
        && !masquerade::is_installed(&key.network).map_err(|error| failed("read the rules", &error))?
    {
        let gone = bad("the rules of \"ipMasq\" are gone");
        return Err(gone.details("the next ADD of any pod installs them again"));
    }
    Ok(())
}

/// Removes the interfaces of attachments that the runtime does not know and whose namespaces are gone: another runtime
/// may use the same network.
///
/// # Errors
/// Lists those that could not be removed, after all were tried.
pub fn collect(request: &Collect, host: &Host<'_>) -> Result<(), Error> {
    let (config, Some(valid)) = (&request.config, &request.valid) else { return Ok(()) };
    let leases = leases(config).list();
    let leases = leases.map_err(|error| Error::new(code::IO, format!("cannot read the leases: {error}")))?;
    let mut problems = Vec::new();
    for lease in &leases {
        let is_valid = valid.iter().any(|(id, ifname)| (id, ifname) == (&lease.container_id, &lease.ifname));
        let has_netns = host.namespaces.open(&lease.netns).is_ok_and(|netns| netns.id == lease.netns_id);
        if is_valid || has_netns {
            continue;
        }
        let key = lease.key(&config.name);
        let removed = remove_link(&Veth::new(&key)).map_err(|error| failed(&key, "remove the link", &error));
        problems.extend(removed.and_then(|()| give_back(config, &key)).err().map(|error| error.to_string()));
    }
    if let Ok(Some(plugin)) = settings::delegate(config) {
        problems.extend(delegate::pass_on(&plugin, "GC", config).err().map(|error| error.to_string()));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::new(code::IO, "some attachments could not be collected").details(problems.join("; ")))
}

/// Whether an ADD would find addresses.
///
/// # Errors
/// Code 50 with the reason.
pub fn status(config: &NetworkConfig, primary: &Primary) -> Result<(), Error> {
    match &primary.ipam {
        Ipam::Delegated(plugin) => delegate::pass_on(plugin, "STATUS", config),
        Ipam::Own { ranges, reserved } => {
            let leases = leases(config);
            let taken = leases.list().map_err(|error| {
                Error::new(code::NOT_AVAILABLE, format!("cannot read the leases of addresses: {error}"))
            })?;
            let taken: Vec<IpAddr> = taken.iter().map(|lease| lease.address).collect();
            for is_v4 in families(ranges) {
                if free(ranges, is_v4, None, reserved, &taken).is_none() {
                    return Err(Error { code: code::NOT_AVAILABLE, ..full(ranges, is_v4, taken.len()) });
                }
            }
            Ok(())
        }
    }
}

/// Takes one address of each family that has a range.
fn take(
    leases: &Leases,
    owner: Owner<'_>,
    ranges: &[Range],
    reserved: &[IpNet],
    all: &[Lease],
) -> Result<Vec<IpAddr>, Error> {
    let failed = |error: io::Error| failed(owner.key, "take an address", &error);
    let mut taken: Vec<IpAddr> = all.iter().map(|lease| lease.address).collect();
    let mut addresses = Vec::new();
    for is_v4 in families(ranges) {
        let address = loop {
            let Some(address) = free(ranges, is_v4, leases.last_given(is_v4), reserved, &taken) else {
                let error = full(ranges, is_v4, taken.len());
                leases.give_back(owner.key).map_err(failed)?;
                return Err(error);
            };
            // With its lease lost, a pod still has its route.
            if !veth::is_routed(address) && leases.take(address, owner).map_err(failed)? {
                break address;
            }
            taken.push(address);
        };
        leases.note_given(address);
        addresses.push(address);
    }
    Ok(addresses)
}

/// The ranges, and the addresses of pods that are in none of them since they were changed.
fn networks_of(ranges: &[Range], all: &[Lease]) -> Vec<IpNet> {
    let ranges: Vec<IpNet> = ranges.iter().map(Range::network).collect();
    let others = all.iter().map(|lease| lease.address);
    let mut others: Vec<IpNet> =
        others.filter(|address| !ranges.iter().any(|range| range.contains(address))).map(Into::into).collect();
    others.sort();
    [ranges, others].concat()
}

/// Notes addresses that another plugin gave.
fn note(leases: &Leases, owner: Owner<'_>, addresses: &[IpAddr]) -> Result<(), Error> {
    for address in addresses {
        if !leases.take(*address, owner).map_err(|error| failed(owner.key, "note an address", &error))? {
            let _ = leases.give_back(owner.key);
            let msg = format!("the plugin of \"ipam\" gave {address}, which another container of this network has");
            return Err(Error::new(code::ADDRESS, msg));
        }
    }
    Ok(())
}

fn families(ranges: &[Range]) -> impl Iterator<Item = bool> {
    [true, false].into_iter().filter(|is_v4| ranges.iter().any(|range| range.network().addr().is_ipv4() == *is_v4))
}

fn free(
    ranges: &[Range],
    is_v4: bool,
    last_given: Option<IpAddr>,
    reserved: &[IpNet],
    taken: &[IpAddr],
) -> Option<IpAddr> {
    let of_family: Vec<&Range> = ranges.iter().filter(|range| range.network().addr().is_ipv4() == is_v4).collect();
    // From the range in which the last one was, on.
    let start = of_family.iter().position(|range| last_given.is_some_and(|last| range.network().contains(&last)));
    let (before, after) = of_family.split_at(start.unwrap_or(0));
    let is_taken = |address: IpAddr| taken.contains(&address);
    after.iter().chain(before).find_map(|range| range.free(last_given, reserved, taken.len(), is_taken))
}

fn full(ranges: &[Range], is_v4: bool, leases: usize) -> Error {
    let of_family = ranges.iter().filter(|range| range.network().addr().is_ipv4() == is_v4);
    let named: Vec<String> =
        of_family.map(|range| format!("{} ({} addresses)", range.network(), range.size())).collect();
    let msg = format!("no address is free in {}; {leases} are taken, in all families", named.join(", "));
    Error::new(code::NO_ADDRESS, msg).details("add a range to \"subnets\", or remove containers")
}

fn own(all: &[Lease], key: &Key) -> Vec<IpAddr> {
    let mut own: Vec<IpAddr> = all.iter().filter(|lease| lease.is_of(key)).map(|lease| lease.address).collect();
    // IPv4 first, as it was given.
    own.sort();
    own
}

/// Looks for everything that ADD makes for the pod; says what is missing.
fn is_whole(netns: &Netns, key: &Key, veth: &Veth, addresses: &[IpAddr], host: &Host<'_>) -> Result<(), String> {
    let first = addresses.first().ok_or("it has no address")?;
    let link = host.links.of_pod(netns, &key.ifname, *first)?;
    if link.name != veth.node_end {
        return Err("another link leads to it".into());
    }
    for address in addresses {
        if !link.addresses.iter().any(|network| network.addr() == *address) {
            return Err(format!("it has lost its address {address}"));
        }
        if veth::interface_to(*address) != Some(link.index) {
            return Err(format!("the node's route to {address} is gone"));
        }
    }
    match own_source::is_installed(veth) {
        Ok(true) => Ok(()),
        Ok(false) => Err("the rules about its source address are gone".into()),
        Err(error) => Err(format!("the rules about its source address cannot be read: {error}")),
    }
}

fn remove_link(veth: &Veth) -> io::Result<()> {
    veth.remove()?;
    own_source::remove(veth)
}

fn leases(config: &NetworkConfig) -> Leases {
    Leases::new(&Settings::state_dir(config), &config.name)
}

fn failed(key: &Key, what: &str, error: &io::Error) -> Error {
    Error::new(code::IO, format!("container {} interface {}: cannot {what}: {error}", key.container_id, key.ifname))
}

/// Where no route leads anywhere.
const DEFAULT_MTU: u32 = 1500;
