//! Tun device: queues, virtio-net header, offload negotiation.

use std::os::fd::OwnedFd;

/// An open tun device with one descriptor per queue. Closing the last descriptor removes the device.
#[derive(Debug)]
pub struct Tun {}

impl Tun {
    /// Creates a device in the network namespace of the calling thread. Fails if the name exists.
    /// An empty name lets the kernel choose. The device is down and has no address.
    ///
    /// # Errors
    /// No permission, name taken, or no tun support.
    pub fn create(_name: &str, _queues: usize, _offloads: bool) -> std::io::Result<Self> {
        unimplemented!()
    }
    /// Adopts queues opened elsewhere (with IFF_VNET_HDR).
    ///
    /// # Errors
    /// Not a tun descriptor.
    pub fn from_queues(_queues: Vec<OwnedFd>) -> std::io::Result<Self> {
        unimplemented!()
    }
    /// Device name.
    #[must_use]
    pub fn name(&self) -> &str {
        unimplemented!()
    }
}
