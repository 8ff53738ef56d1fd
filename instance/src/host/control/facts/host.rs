//! What this host is, and what the kernel has of it.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::Certificate;
use nebula_core::TunnelStatus;
use nebula_core::diagnosis::Diagnosis;
use nebula_linux::kernel_view;

use super::{Clocks, MAX_ROUTES, Sources, kernel_route, tunnel_with, validity};
use crate::host::control::answer::{self, texts};
use crate::host::dns::Registered;
use crate::host::documents::{self, ClockStep, Host, LighthouseFacts, Mtu, NetworkRoute, ReplacedRoute, TrustedCa};
use crate::overlay::lan;
use crate::overlay::link::kernel_has_v6;

impl Sources<'_> {
    pub(super) fn host(&self, diagnosis: &Diagnosis, clocks: Clocks, tunnels: &[TunnelStatus]) -> Host {
        let settings = self.settings;
        let identity = settings.pki.as_ref().map(|pki| &pki.identity);
        let own = identity.map(|identity| identity.primary());
        let networks: Vec<IpNet> = identity.map(|identity| identity.networks().to_vec()).unwrap_or_default();
        let issuer = own.and_then(Certificate::issuer);
        let cas = settings.pki.iter().flat_map(|pki| pki.trust.certificates());
        let cas =
            cas.map(|ca| TrustedCa { validity: validity(ca, clocks.unix), own: Some(ca.fingerprint()) == issuer });
        let lighthouses = settings.lighthouses.iter().map(|lighthouse| LighthouseFacts {
            address: lighthouse.to_string(),
            connected: tunnel_with(tunnels, *lighthouse).is_some(),
            own_address: networks.iter().any(|own| own.addr() == *lighthouse),
            configured: settings.static_hosts.entries.contains_key(lighthouse),
            endpoints: texts(&self.handle.whereabouts(*lighthouse).endpoints),
        });
        let has_device = !settings.tun.disabled;
        Host {
            name: own.map(|own| own.name().to_owned()),
            networks: texts(&networks),
            groups: own.map(|own| own.groups().to_vec()),
            device: self.device.to_owned(),
            udp: self.udp.to_string(),
            certificate: own.map(|own| validity(own, clocks.unix)),
            cas: cas.collect(),
            am_lighthouse: settings.am_lighthouse,
            am_relay: settings.relay.am_relay,
            use_relays: Some(settings.relay.use_relays),
            relay_groups: settings.relay.groups.clone(),
            relays: answer::offered_relays(&self.handle.offered_relays()),
            lighthouses: lighthouses.collect(),
            link: has_device.then(|| link(self.device)),
            mtu: Mtu {
                tun: Some(settings.tun.mtu),
                device: Some(settings.tun.device_mtu()),
                discovery: settings.tun.discovers_path_mtu,
            },
            routes: if has_device { self.routes(&networks) } else { Vec::new() },
            routes_replaced: if has_device { self.routes_replaced() } else { Vec::new() },
            names: self.names.as_deref().map(names),
            clock_step: diagnosis.clock_step.map(|(at, by_ms)| ClockStep { seconds_ago: clocks.ago(at), by_ms }),
        }
    }

    /// For each overlay network and unsafe route, whether the kernel routes it to the device.
    fn routes(&self, networks: &[IpNet]) -> Vec<NetworkRoute> {
        let own = networks.iter().filter(|net| net.prefix_len() < net.max_prefix_len()).map(|net| net.trunc());
        let subnets = &self.settings.tun.routes.subnets;
        let subnets = subnets.iter().filter(|subnet| subnet.install).map(|subnet| subnet.route.network);
        let wanted = own.map(|net| (net, false)).chain(subnets.map(|net| (net, true)));
        let addresses: Vec<_> = networks.iter().map(IpNet::addr).collect();
        let route = |(network, unsafe_route): (IpNet, bool)| NetworkRoute {
            route: kernel_route(inside(network, &addresses), self.device, 0),
            network: network.to_string(),
            unsafe_route,
        };
        wanted.take(MAX_ROUTES).map(route).collect()
    }

    fn routes_replaced(&self) -> Vec<ReplacedRoute> {
        let replaced = lan::replaced(&self.settings.tun, self.device).unwrap_or_default();
        let replaced = replaced.into_iter().take(MAX_ROUTES).map(|it| ReplacedRoute {
            route: it.route.to_string(),
            network: it.network.to_string(),
            interface: it.interface,
        });
        replaced.collect()
    }
}

fn names(registered: &Registered) -> documents::RegisteredNames {
    let told = registered.told();
    documents::RegisteredNames {
        domain: registered.registration().domain().to_string(),
        server: registered.registration().server().to_string(),
        told: told.as_ref().and_then(|told| told.as_ref().ok()).map(ToString::to_string),
        error: told.as_ref().and_then(|told| told.as_ref().err()).map(ToString::to_string),
    }
}

fn link(device: &str) -> documents::Link {
    match kernel_view::link(device) {
        Ok(link) => documents::Link {
            present: true,
            up: link.up,
            mtu: Some(link.mtu),
            addresses: texts(&link.addresses),
            ipv6_off: !kernel_has_v6(device),
        },
        Err(_) => documents::Link::default(),
    }
}

/// Picks an address of the network that does not belong to this host.
fn inside(network: IpNet, own: &[IpAddr]) -> IpAddr {
    network.hosts().take(4).find(|address| !own.contains(address)).unwrap_or_else(|| network.addr())
}
