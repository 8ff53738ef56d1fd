//! Addresses, MTU and state of the tun link (rtnetlink).

use std::io;
use std::path::Path;

use ipnet::IpNet;
use nebula_config::TunSettings;
use nebula_core::io::Tun;
use nebula_linux::netns::Namespace;
pub use nebula_linux::rtnetlink::LinkRoute;
use nebula_linux::rtnetlink::{Kernel, LinkState, MAIN_TABLE};
use nix::errno::Errno;
use nix::libc;

/// The wanted state of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayLink {
    /// Name of the device.
    pub device: String,
    /// MTU.
    pub mtu: u32,
    /// Transmit queue length.
    pub tx_queue: u32,
    /// The node's own addresses with the prefix lengths of their networks; the kernel adds the routes to these
    /// networks.
    pub addresses: Vec<IpNet>,
    /// Routes to the device.
    pub routes: Vec<LinkRoute>,
    /// Whether packets of others leave through it. Their super-packets may have any length, and the kernel cuts one
    /// that is longer than the device allows into single packets.
    pub forwards: bool,
}

/// What of a link somebody else took away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// It was down.
    State,
    /// It had another MTU.
    Mtu,
    /// An own address.
    Address(IpNet),
    /// The route to a network.
    Route(IpNet),
}

/// A loss, and whether it could be put back.
pub(crate) type Restored = (Loss, io::Result<()>);

/// Why a link could not be configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The namespace cannot be entered.
    #[error(transparent)]
    Namespace(#[from] nebula_linux::netns::Error),
    /// No netlink socket can be opened.
    #[error("cannot open a netlink socket")]
    Socket(#[source] io::Error),
    /// The kernel refused a change.
    #[error("{device}: cannot {what}: {source}")]
    Refused {
        /// Name of the device.
        device: String,
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused an unreachable route.
    #[error("cannot keep packets for {network} from leaving in clear: {source}")]
    Unguarded {
        /// Network of the overlay.
        network: IpNet,
        /// The kernel's answer.
        source: io::Error,
    },
    /// There is no such device.
    #[error("{0}: no such network device")]
    NoDevice(String),
}

impl OverlayLink {
    /// The link that `settings` describe for a node with `addresses`.
    #[must_use]
    pub fn new(device: &str, settings: &TunSettings, addresses: Vec<IpNet>) -> Self {
        let has_peers = |address: &&IpNet| address.prefix_len() < address.max_prefix_len();
        let connected = addresses.iter().filter(has_peers).map(|address| LinkRoute {
            network: address.trunc(),
            mtu: Some(settings.mtu),
            metric: if address.addr().is_ipv6() { KERNEL_METRIC_V6 } else { 0 },
            source: Some(address.addr()),
            table: MAIN_TABLE,
        });
        let own = settings.routes.own.iter().map(|route| LinkRoute {
            network: route.network,
            mtu: Some(route.mtu),
            metric: 0,
            source: None,
            table: MAIN_TABLE,
        });
        let subnets = settings.routes.subnets.iter().filter(|subnet| subnet.install).map(|subnet| LinkRoute {
            network: subnet.route.network,
            mtu: Some(subnet.mtu.unwrap_or(settings.mtu)),
            metric: subnet.metric,
            source: None,
            table: MAIN_TABLE,
        });
        Self {
            device: device.to_owned(),
            mtu: settings.device_mtu(),
            tx_queue: settings.tx_queue,
            routes: connected.chain(own).chain(subnets).collect(),
            addresses,
            forwards: false,
        }
    }

    /// Brings the link up with exactly these settings, in `namespace`.
    ///
    /// # Errors
    /// Returns the error of the first step that fails; the device stays as it is then.
    pub fn configure(&self, namespace: &Namespace) -> Result<(), Error> {
        match namespace {
            Namespace::Own => self.configure_here(),
            // A netlink socket belongs to the namespace of the thread that opens it, so all of it happens on one
            // thread.
            Namespace::At { .. } => namespace.run("overlay-link", || self.configure_here())?,
        }
    }

    /// As [`OverlayLink::configure`], in the namespace of the calling thread.
    ///
    /// # Errors
    /// As [`OverlayLink::configure`].
    pub fn configure_here(&self) -> Result<(), Error> {
        let mut kernel = Kernel::connect().map_err(Error::Socket)?;
        let index = interface_index(&self.device)?;
        self.forbid_link_local();

        if let Err(error) = kernel.change(index, libc::IFLA_MTU, self.mtu) {
            // As in Go: an MTU the kernel refuses does not stop the node.
            tracing::error!(device = self.device, mtu = self.mtu, %error, "Failed to set tun mtu");
        }
        if let Err(error) = kernel.change(index, libc::IFLA_TXQLEN, self.tx_queue) {
            tracing::error!(device = self.device, %error, "Failed to set tun tx queue length");
        }
        let size = if self.forwards { Some(LONGEST_SUPER_PACKET) } else { Tun::best_super_packet(self.mtu) };
        if let Some(size) = size
            && let Err(error) = kernel.change(index, libc::IFLA_GSO_MAX_SIZE, size)
        {
            // This only costs speed: super-packets of another size are sent in two parts.
            tracing::debug!(device = self.device, size, %error, "The size of super-packets stays as it is");
        }
        let mut left_out = Vec::new();
        for address in &self.addresses {
            match kernel.add_address(index, *address) {
                Err(error) if self.does_without(*address, &error) => left_out.push(address.to_string()),
                added => added.map_err(|source| self.refused(self.adding("address", *address), source))?,
            }
        }
        kernel.bring_up(index).map_err(|source| self.refused("bring the link up".into(), source))?;
        for route in self.routes.iter().filter(|route| !self.is_made_by_kernel(route)) {
            let added = kernel.add_route(index, route, self.mtu).or_else(|error| {
                let sourceless = LinkRoute { source: None, ..route.clone() };
                // While the kernel still looks for duplicates of an address, it takes no route that names it. Without
                // one it finds the address itself, later.
                let is_tentative = error.raw_os_error() == Some(libc::EINVAL) && may_be_tentative(route);
                if is_tentative { kernel.add_route(index, &sourceless, self.mtu) } else { Err(error) }
            });
            match added {
                Err(error) if self.does_without(route.network, &error) => left_out.push(route.network.to_string()),
                added => added.map_err(|source| self.refused(self.adding("route", route.network), source))?,
            }
        }
        if !left_out.is_empty() {
            tracing::warn!(device = self.device, without = ?left_out, "{WITHOUT_V6}");
        }
        Ok(())
    }

    /// Changes the MTU and routes of a link that is configured as `old`, in the namespace of the calling thread.
    /// Changes that the kernel refuses are logged, and the others are still made.
    ///
    /// # Errors
    /// Returns an error if the device is gone or no netlink socket can be opened.
    pub fn update_here(&self, old: &Self) -> Result<(), Error> {
        let mut kernel = Kernel::connect().map_err(Error::Socket)?;
        let index = interface_index(&self.device)?;
        if self.mtu != old.mtu {
            match kernel.change(index, libc::IFLA_MTU, self.mtu) {
                Ok(()) => tracing::info!(mtu = self.mtu, "Set max MTU"),
                Err(error) => tracing::error!(mtu = self.mtu, %error, "Failed to set tun mtu"),
            }
        }
        let key = |route: &LinkRoute| (route.table, route.network.trunc(), route.metric);
        let is_same = |a: &LinkRoute, b: &LinkRoute| key(a) == key(b);
        for gone in old.routes.iter().filter(|route| !self.routes.iter().any(|new| is_same(route, new))) {
            match kernel.remove_route(index, gone) {
                Ok(()) => tracing::info!(route = %gone.network, "Removed route"),
                Err(error) => tracing::error!(route = %gone.network, %error, "Failed to remove route"),
            }
        }
        for route in &self.routes {
            match kernel.add_route(index, route, self.mtu) {
                Ok(()) => tracing::info!(route = %route.network, "Added route"),
                Err(error) => tracing::error!(route = %route.network, %error, "Failed to add route"),
            }
        }
        Ok(())
    }

    /// Removes the routes to these networks, in the namespace of the calling thread.
    ///
    /// # Errors
    /// Returns the error of the first step that fails.
    pub fn withdraw_here(&self, networks: &[IpNet]) -> Result<(), Error> {
        if networks.is_empty() {
            return Ok(());
        }
        let mut kernel = Kernel::connect().map_err(Error::Socket)?;
        let index = interface_index(&self.device)?;
        networks.iter().try_for_each(|network| {
            let route = LinkRoute { network: *network, mtu: None, metric: 0, source: None, table: MAIN_TABLE };
            let what = || format!("remove the route to {network}");
            kernel.remove_route(index, &route).map_err(|source| self.refused(what(), source))
        })
    }

    /// Puts back what is missing of a link that looked like this, in the namespace of the calling thread. Returns what
    /// that was, each with the kernel's refusal if it could not be put back; `None`: there is no such link.
    ///
    /// # Errors
    /// No netlink socket.
    pub(crate) fn restore_here(&self, index: u32) -> io::Result<Option<Vec<Restored>>> {
        let Some(state) = LinkState::read(index)? else { return Ok(None) };
        let mut kernel = Kernel::connect()?;
        let mut found = Vec::new();
        if state.mtu != self.mtu {
            found.push((Loss::Mtu, kernel.change(index, libc::IFLA_MTU, self.mtu)));
        }
        if !state.is_up {
            found.push((Loss::State, kernel.bring_up(index)));
        }
        // What is there is not read but offered: the kernel takes only what is missing, and nothing comes in between.
        let offer = |loss, network, outcome: io::Result<bool>| match outcome {
            Ok(was_missing) => was_missing.then_some((loss, Ok(()))),
            Err(error) if self.does_without(network, &error) => None,
            Err(error) => Some((loss, Err(error))),
        };
        for address in &self.addresses {
            found.extend(offer(Loss::Address(*address), *address, kernel.ensure_address(index, *address)));
        }
        // With an address the kernel recreates its route, and knows nothing of a special MTU; with the MTU of the
        // device it changes that of routes of IPv6.
        let is_renewed = |route: &&LinkRoute| {
            let is_new =
                |source| found.iter().any(|(loss, _)| matches!(loss, Loss::Address(new) if new.addr() == source));
            let by_address = route.source.is_some_and(|source| !state.is_up || is_new(source));
            by_address || (state.mtu != self.mtu && route.network.addr().is_ipv6())
        };
        let (renewed, kept): (Vec<_>, Vec<_>) = self.routes.iter().partition(is_renewed);
        for route in renewed.into_iter().filter(|route| !self.is_made_by_kernel(route)) {
            let changed = kernel.add_route(index, route, self.mtu).map(|()| false);
            found.extend(offer(Loss::Route(route.network), route.network, changed));
        }
        for route in kept {
            let ensured = kernel.ensure_route(index, route, self.mtu);
            found.extend(offer(Loss::Route(route.network), route.network, ensured));
        }
        Ok(Some(found))
    }

    /// Whether the kernel adds this very route with the address.
    pub(super) fn is_made_by_kernel(&self, route: &LinkRoute) -> bool {
        route.table == MAIN_TABLE && route.source.is_some() && route.mtu.is_none_or(|mtu| mtu == self.mtu)
    }

    /// Best effort: without IPv6 in the kernel there is nothing to forbid, and with a read-only /proc no way to do so.
    fn forbid_link_local(&self) {
        let path = format!("/proc/sys/net/ipv6/conf/{}/addr_gen_mode", self.device);
        if let Err(error) = std::fs::write(&path, "1") {
            tracing::debug!(path, %error, "Link-local addresses stay enabled on the tun");
        }
    }

    /// Whether the link works without this IPv6 network, which the kernel refused because it has no IPv6 there: so it
    /// does if it has anything of IPv4.
    fn does_without(&self, network: IpNet, error: &io::Error) -> bool {
        let mut all = self.addresses.iter().chain(self.routes.iter().map(|route| &route.network));
        network.addr().is_ipv6() && is_without_v6(error) && all.any(|other| other.addr().is_ipv4())
    }

    /// The kernel says "No such device" where the true cause is the MTU, and "Permission denied" where IPv6 is off.
    fn adding(&self, what: &str, network: IpNet) -> String {
        let why = too_small_for_v6(self.mtu, &[network]);
        let why =
            why.or_else(|| (network.addr().is_ipv6() && !kernel_has_v6(&self.device)).then(|| V6_IS_OFF.to_owned()));
        format!("add the {what} {network}{}", why.map(|why| format!(" ({why})")).unwrap_or_default())
    }

    pub(super) fn refused(&self, what: String, source: io::Error) -> Error {
        Error::Refused { device: self.device.clone(), what, source }
    }
}

/// Why a device with this MTU cannot have these networks.
#[must_use]
pub fn too_small_for_v6(mtu: u32, networks: &[IpNet]) -> Option<String> {
    let has_v6 = networks.iter().any(|network| network.addr().is_ipv6());
    (has_v6 && mtu < MIN_MTU_V6).then(|| {
        format!("its MTU is {mtu}, and IPv6 needs at least {MIN_MTU_V6}: see tun.mtu, in the chart network.mtu")
    })
}

/// Makes sure that packets for these networks never leave by another way than the overlay: without a route to the
/// device, they match an unreachable route. Those routes belong to the namespace, not to this process, and outlive it.
///
/// # Errors
/// Returns the error of the first step that fails.
pub fn guard(namespace: &Namespace, networks: &[IpNet]) -> Result<(), Error> {
    namespace.run("overlay-guard", || guard_here(networks))?
}

/// As [`guard`], in the namespace of the calling thread.
///
/// # Errors
/// As [`guard`].
pub fn guard_here(networks: &[IpNet]) -> Result<(), Error> {
    let mut kernel = Kernel::connect().map_err(Error::Socket)?;
    networks.iter().try_for_each(|network| match kernel.refuse(network.trunc()) {
        // Without IPv6 nothing leaves by it.
        Err(error) if network.addr().is_ipv6() && is_without_v6(&error) => Ok(()),
        refused => refused.map_err(|source| Error::Unguarded { network: network.trunc(), source }),
    })
}

/// Whether the kernel has IPv6 on this device; if that cannot be read, yes.
pub(crate) fn kernel_has_v6(device: &str) -> bool {
    match std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6")) {
        Ok(is_off) => is_off.trim() == "0",
        Err(_) => !Path::new("/proc/sys/net").is_dir() || Path::new("/proc/sys/net/ipv6").is_dir(),
    }
}

/// What the kernel says of addresses and routes on a device for which `disable_ipv6` is set, or without the module.
fn is_without_v6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EAFNOSUPPORT | libc::EOPNOTSUPP))
}

/// Whether the route names an IPv6 address that is on another device.
fn may_be_tentative(route: &LinkRoute) -> bool {
    route.table != MAIN_TABLE && route.source.is_some_and(|source| source.is_ipv6())
}

pub(crate) fn interface_index(device: &str) -> Result<u32, Error> {
    nix::net::if_::if_nametoindex(device).map_err(|errno| match errno {
        Errno::ENODEV | Errno::ENXIO => Error::NoDevice(device.to_owned()),
        errno => Error::Refused { device: device.to_owned(), what: "ask for its index".into(), source: errno.into() },
    })
}

const V6_IS_OFF: &str = "IPv6 is switched off here: sysctl net.ipv6.conf.*.disable_ipv6, or no module ipv6";
const WITHOUT_V6: &str =
    "IPv6 is switched off here, so the overlay has IPv4 only (sysctl net.ipv6.conf.*.disable_ipv6, or no module ipv6)";
// Metric of the routes that Linux adds for IPv6 addresses.
const KERNEL_METRIC_V6: u32 = 256;
/// What the kernel gives a new device. A device that was kept may have another one.
const LONGEST_SUPER_PACKET: u32 = 65_536;
/// RFC 8200, section 5. The kernel takes IPv6 from a device with a smaller MTU.
const MIN_MTU_V6: u32 = 1280;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mtu_that_ipv6_does_not_take_is_named() {
        let networks: Vec<IpNet> = ["10.42.0.7/16", "fd42::7/64"].map(|text| text.parse().unwrap()).into();
        assert_eq!(too_small_for_v6(1280, &networks), None);
        assert_eq!(too_small_for_v6(1200, &networks[..1]), None);
        assert!(too_small_for_v6(1200, &networks).unwrap().contains("MTU is 1200, and IPv6 needs at least 1280"));
    }
}
