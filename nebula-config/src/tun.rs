//! `tun.*`: the overlay device.

use super::section::Section;
use super::{Refused, Routes, Value};

/// `tun.*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunSettings {
    /// No device at all.
    pub disabled: bool,
    /// Name; empty: the kernel chooses.
    pub device: String,
    /// MTU.
    pub mtu: u32,
    /// Whether to find out how large a packet the path to each peer carries.
    pub discovers_path_mtu: bool,
    /// Transmit queue length.
    pub tx_queue: u32,
    /// Segmentation and checksum offloads.
    pub offloads: bool,
    /// Whether to drop packets to the broadcast address of one of the node's own networks.
    pub drop_local_broadcast: bool,
    /// Whether to drop multicast packets.
    pub drop_multicast: bool,
    /// Routes through the tunnel beyond the node's own networks.
    pub routes: Routes,
    /// Whether to follow routes that others add to the kernel, to gateways inside the overlay.
    pub follow_system_routes: bool,
    /// Receive buffer for notifications about those routes, in bytes; 0: the system's default.
    pub system_routes_buffer: usize,
    /// CPUs to pin the routines to, used repeatedly if there are fewer CPUs than routines; empty: no pinning.
    pub processors: Vec<usize>,
}

impl TunSettings {
    /// `networks` are the node's own networks as far as they are known yet.
    pub(super) fn read(section: &Section<'_>, networks: &[ipnet::IpNet]) -> Result<Self, Refused> {
        let number = |path: &str, default: u32| {
            section.int(path, 0..=i64::from(u32::MAX)).and_then(|n| u32::try_from(n).ok()).unwrap_or(default)
        };
        let mut device = section.string("tun.dev").unwrap_or_default();
        if device.len() > MAX_DEVICE_NAME {
            let end = (0..=MAX_DEVICE_NAME).rev().find(|end| device.is_char_boundary(*end)).unwrap_or(0);
            section.warn(
                "tun.dev",
                format!("tun.dev {device:?} is too long, the kernel allows {MAX_DEVICE_NAME} bytes; cut"),
            );
            device.truncate(end);
        }
        let buffer = section.int("tun.use_system_route_table_buffer_size", 0..=i64::from(i32::MAX));
        Ok(Self {
            disabled: section.boolean("tun.disabled", false),
            device,
            mtu: number("tun.mtu", 1300),
            discovers_path_mtu: section.boolean("tun.path_mtu_discovery", true),
            tx_queue: number("tun.tx_queue", 500),
            offloads: section.boolean("tun.use_offloads", true),
            drop_local_broadcast: section.boolean("tun.drop_local_broadcast", false),
            drop_multicast: section.boolean("tun.drop_multicast", false),
            routes: Routes::read(section, networks)?,
            follow_system_routes: section.boolean("tun.use_system_route_table", false),
            system_routes_buffer: buffer.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0),
            processors: processors(section),
        })
    }

    /// MTU of the device: large enough for every route. Routes without an MTU of their own get [`TunSettings::mtu`].
    #[must_use]
    pub fn device_mtu(&self) -> u32 {
        self.mtu.max(self.routes.largest_mtu())
    }

    /// How large the packets are that path MTU discovery tries to get to each peer; `None`: it is off.
    #[must_use]
    pub(super) fn path_mtu(&self) -> Option<u16> {
        let wanted = self.discovers_path_mtu && !self.disabled;
        wanted.then(|| u16::try_from(self.device_mtu()).unwrap_or(u16::MAX))
    }
}

/// As in Go, one invalid number makes the whole list ignored.
fn processors(section: &Section<'_>) -> Vec<usize> {
    let texts = section.strings(AFFINITY);
    let numbers: Result<Vec<usize>, _> = texts.iter().map(|text| text.parse()).collect();
    numbers.unwrap_or_else(|_| {
        section.warn(AFFINITY, format!("{AFFINITY} is not a list of numbers and is ignored"));
        Vec::new()
    })
}

/// Refuses an MTU that no tun device can have, also with `-test`: Go Nebula runs on, with a device of 1500.
pub(super) fn check_mtu(section: &Section<'_>) -> Result<(), Refused> {
    let Some(mtu) = section.get("tun.mtu").and_then(Value::int) else { return Ok(()) };
    if MTU.contains(&mtu) {
        return Ok(());
    }
    let cause = format!("tun.mtu={mtu}: the kernel takes {} to {}", MTU.start(), MTU.end());
    Err(Refused::new("tun.mtu is out of range", cause))
}

/// What the kernel takes for a tun device (drivers/net/tun.c).
const MTU: std::ops::RangeInclusive<i64> = 68..=65535;
const AFFINITY: &str = "tun.cpu_affinity";
// IFNAMSIZ without the terminating zero.
const MAX_DEVICE_NAME: usize = 15;
