//! Addresses, MTU and state of the tun link (rtnetlink).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags};
use rtnetlink::packet_route::route::RouteScope;
use rtnetlink::{AddressMessageBuilder, LinkUnspec, RouteMessageBuilder};

use crate::netns::Namespace;

/// How a link is to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayLink {
    /// Name of the device.
    pub device: String,
    /// MTU.
    pub mtu: u32,
    /// Transmit queue length.
    pub tx_queue: u32,
    /// Own addresses with the prefix lengths of their networks; the kernel adds the routes to these networks.
    pub addresses: Vec<IpNet>,
    /// Further prefixes routed to the device.
    pub routes: Vec<IpNet>,
}

/// Why a link could not be configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The namespace cannot be entered.
    #[error(transparent)]
    Namespace(#[from] crate::netns::Error),
    /// No netlink socket.
    #[error("cannot open a netlink socket")]
    Socket(#[source] std::io::Error),
    /// The kernel refused a change.
    #[error("{device}: cannot {what}: {source}")]
    Refused {
        /// Device.
        device: String,
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: rtnetlink::Error,
    },
    /// There is no such device.
    #[error("{0}: no such network device")]
    NoDevice(String),
}

impl OverlayLink {
    /// Brings the link up with exactly these settings, in `namespace`.
    ///
    /// # Errors
    /// The first step that fails; the device is left as it is then.
    pub fn configure(&self, namespace: &Namespace) -> Result<(), Error> {
        // A netlink socket belongs to the namespace of the thread that opens it, so all of it happens on one thread.
        namespace.run("overlay-link", || self.configure_here())?
    }

    /// As [`OverlayLink::configure`], in the namespace of the calling thread.
    ///
    /// # Errors
    /// As there.
    pub fn configure_here(&self) -> Result<(), Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(Error::Socket)?;
        runtime.block_on(self.apply())
    }

    async fn apply(&self) -> Result<(), Error> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(Error::Socket)?;
        let connection = tokio::spawn(connection);
        let index = interface_index(&self.device)?;
        self.forbid_link_local();

        let mtu = LinkUnspec::new_with_index(index).mtu(self.mtu).build();
        if let Err(source) = handle.link().change(mtu).execute().await {
            // As in Go: an MTU the kernel refuses does not stop the node.
            tracing::error!(device = self.device, mtu = self.mtu, error = %source, "Failed to set tun mtu");
        }
        let queue = LinkUnspec::new_with_index(index).txqueuelen(self.tx_queue).build();
        if let Err(source) = handle.link().change(queue).execute().await {
            tracing::error!(device = self.device, error = %source, "Failed to set tun tx queue length");
        }
        for address in &self.addresses {
            let result = match address.addr() {
                IpAddr::V4(_) => {
                    handle.address().add(index, address.addr(), address.prefix_len()).replace().execute().await
                }
                IpAddr::V6(ip) => self.add_v6(&handle, index, ip, address.prefix_len()).await,
            };
            result.map_err(|source| self.refused(format!("add the address {address}"), source))?;
        }
        let up = LinkUnspec::new_with_index(index).up().build();
        handle.link().change(up).execute().await.map_err(|source| self.refused("bring the link up".into(), source))?;
        for route in &self.routes {
            let message = match route {
                IpNet::V4(net) => RouteMessageBuilder::<Ipv4Addr>::new()
                    .destination_prefix(net.network(), net.prefix_len())
                    .output_interface(index)
                    .scope(RouteScope::Link)
                    .build(),
                IpNet::V6(net) => RouteMessageBuilder::<Ipv6Addr>::new()
                    .destination_prefix(net.network(), net.prefix_len())
                    .output_interface(index)
                    .build(),
            };
            let added = handle.route().add(message).replace().execute().await;
            added.map_err(|source| self.refused(format!("add the route {route}"), source))?;
        }
        connection.abort();
        Ok(())
    }

    /// Nobody can have the same address behind a tun, and detecting that would delay its use by a second.
    async fn add_v6(
        &self,
        handle: &rtnetlink::Handle,
        index: u32,
        address: Ipv6Addr,
        prefix_len: u8,
    ) -> Result<(), rtnetlink::Error> {
        let mut request = handle.address().add(index, address.into(), prefix_len).replace();
        let mut message = AddressMessageBuilder::<Ipv6Addr>::new().index(index).address(address, prefix_len).build();
        message.header.flags |= AddressHeaderFlags::Nodad;
        message.attributes.retain(|attribute| !matches!(attribute, AddressAttribute::Flags(_)));
        *request.message_mut() = message;
        request.execute().await
    }

    /// Best effort: without IPv6 in the kernel, or with a read-only /proc, there is nothing to forbid or no way to.
    fn forbid_link_local(&self) {
        let path = format!("/proc/sys/net/ipv6/conf/{}/addr_gen_mode", self.device);
        if let Err(error) = std::fs::write(&path, "1") {
            tracing::debug!(path, %error, "Link-local addresses stay enabled on the tun");
        }
    }

    fn refused(&self, what: String, source: rtnetlink::Error) -> Error {
        Error::Refused { device: self.device.clone(), what, source }
    }
}

fn interface_index(device: &str) -> Result<u32, Error> {
    nix::net::if_::if_nametoindex(device).map_err(|_| Error::NoDevice(device.to_owned()))
}
