//! What a former run left on a device that outlived it, and the configuration does not have any more.

use std::io;

use ipnet::IpNet;
use nebula_linux::link_contents::LinkContents;
use nebula_linux::rtnetlink::{Kernel, LinkRoute};

use crate::overlay::link::{Error, OverlayLink, interface_index};

impl OverlayLink {
    /// Removes addresses and routes that a former run of this program gave to the link and that this one does not
    /// want, in the network namespace of the calling thread. What it still wants stays as it is, so that no packet is
    /// lost for lack of a route. What the kernel does not remove is logged.
    ///
    /// # Errors
    /// Returns an error if the device is gone, or the kernel does not tell what it has.
    pub(crate) fn remove_leftovers_here(&self) -> Result<(), Error> {
        let mut kernel = Kernel::connect().map_err(Error::Socket)?;
        let index = interface_index(&self.device)?;
        let read = || LinkContents::read(index).map_err(|source| self.refused("ask what it has".into(), source));
        for address in read()?.addresses.iter().filter(|address| !self.addresses.contains(address)) {
            self.report("address", *address, kernel.remove_address(index, *address));
        }
        // With an address the kernel removed its routes.
        for found in read()?.routes {
            match self.routes.iter().find(|wanted| is_in_place_of(wanted, &found)) {
                // The kernel has some of its own for an address.
                None if self.addresses.iter().any(|own| own.trunc() == found.network) => {}
                None => self.report("route", found.network, kernel.remove_route(index, &found)),
                // Nobody else sets the MTU back.
                Some(wanted) if self.is_made_by_kernel(wanted) && found.mtu.is_some_and(|mtu| mtu != self.mtu) => {
                    self.report("MTU of the route", found.network, kernel.add_route(index, wanted, self.mtu));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn report(&self, what: &str, network: IpNet, removed: io::Result<()>) {
        match removed {
            Ok(()) => tracing::info!(device = self.device, what, %network, "Removed what the last run left"),
            Err(error) => {
                tracing::error!(device = self.device, what, %network, %error, "What the last run left stays");
            }
        }
    }
}

/// Whether the kernel takes one of these routes for the other.
fn is_in_place_of(a: &LinkRoute, b: &LinkRoute) -> bool {
    let key = |route: &LinkRoute| {
        // The kernel puts this number in the place of 0.
        let default = if route.network.addr().is_ipv6() { DEFAULT_METRIC_V6 } else { 0 };
        let metric = if route.metric == 0 { default } else { route.metric };
        (route.table, route.network.trunc(), metric)
    };
    key(a) == key(b)
}

// IP6_RT_PRIO_USER of the kernel.
const DEFAULT_METRIC_V6: u32 = 1024;
