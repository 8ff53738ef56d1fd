//! Finds who else changes the tun device or uses its network: a process, a network manager, or another overlay.

use std::fs;
use std::io;

use ipnet::IpNet;
use nix::ifaddrs::getifaddrs;

/// Name and id of the process that owns the netlink socket with this port id, if known.
pub(crate) fn process(port: u32) -> Option<String> {
    // Only a process's first socket has its process id as the port; further ones get values beyond all process ids.
    let process = i32::try_from(port).ok().filter(|process| *process > 0)?;
    let name = fs::read_to_string(format!("/proc/{process}/comm")).ok();
    Some(match name {
        Some(name) => format!("{} ({process})", name.trim_end()),
        None => format!("process {process}, which has ended or is hidden"),
    })
}

/// Suggests how to stop a network manager from managing the device.
pub(crate) fn manager(device: &str, index: u32) -> Option<String> {
    let networkd = fs::read_to_string(format!("/run/systemd/netif/links/{index}")).ok();
    let network_manager = fs::read_to_string(format!("/run/NetworkManager/devices/{index}")).ok();
    let by_networkd = networkd.and_then(|state| of_networkd(device, &state));
    by_networkd.or_else(|| network_manager.and_then(|state| of_network_manager(device, &state)))
}

fn of_networkd(device: &str, state: &str) -> Option<String> {
    let value = |key: &str| state.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let managed = value("ADMIN_STATE").is_some_and(|state| ["configuring", "configured", "failed"].contains(&state));
    let file = value("NETWORK_FILE").map(|file| format!(" by {file}")).unwrap_or_default();
    managed.then(|| {
        format!(
            "systemd-networkd manages {device}{file}: put [Match] Name={device} and [Link] Unmanaged=yes into \
             /etc/systemd/network/00-{device}.network, then networkctl reload"
        )
    })
}

fn of_network_manager(device: &str, state: &str) -> Option<String> {
    let managed = state.lines().any(|line| line == "managed=true");
    managed.then(|| {
        format!(
            "NetworkManager manages {device}: put [keyfile] unmanaged-devices=interface-name:{device} into \
             /etc/NetworkManager/conf.d/{device}.conf, then systemctl reload NetworkManager"
        )
    })
}

/// Another interface with an address in one of this overlay's networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rival {
    pub(crate) interface: String,
    pub(crate) address: IpNet,
    /// Name and id of its process, if the interface is a tun device and the process is visible.
    pub(crate) process: Option<String>,
}

/// Lists the interfaces other than `device` with an address in exactly these networks, in the namespace of the calling
/// thread.
pub(crate) fn find(device: &str, networks: &[IpNet]) -> io::Result<Vec<Rival>> {
    let mut found: Vec<Rival> = Vec::new();
    for entry in getifaddrs()?.filter(|entry| entry.interface_name != device) {
        let (Some(address), Some(mask)) = (entry.address.and_then(ip), entry.netmask.and_then(ip)) else { continue };
        let Ok(address) = IpNet::with_netmask(address, mask) else { continue };
        let interface = entry.interface_name;
        let is_known = found.iter().any(|rival| rival.interface == interface);
        if !is_known && networks.iter().any(|network| network.trunc() == address.trunc()) {
            let process = tun_process(&interface);
            found.push(Rival { interface, address, process });
        }
    }
    Ok(found)
}

fn ip(address: nix::sys::socket::SockaddrStorage) -> Option<std::net::IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| v4.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| v6.ip().into()))
}

/// The first process that has the tun device open. Reads much of `/proc`, so it is called only once per rival.
fn tun_process(device: &str) -> Option<String> {
    let line = format!("iff:\t{device}");
    let holds = |descriptors: fs::ReadDir| {
        let texts = descriptors.flatten().filter_map(|descriptor| fs::read_to_string(descriptor.path()).ok());
        texts.into_iter().any(|text| text.lines().any(|found| found == line))
    };
    let own = std::process::id();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        if process != own && fs::read_dir(entry.path().join("fdinfo")).is_ok_and(holds) {
            return self::process(process);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_named_by_its_process() {
        let own = std::process::id();
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(process(own), Some(format!("{} ({own})", name.trim_end())));
        assert_eq!(process(0), None);
        assert_eq!(process(u32::MAX - 7), None, "the second socket of some process");
        assert!(process(i32::MAX as u32).is_some_and(|text| text.starts_with("process 2147483647")));
    }

    #[test]
    fn managers_are_named_only_if_they_manage_the_device() {
        let hint = of_networkd("nebula1", "ADMIN_STATE=configured\nNETWORK_FILE=/etc/systemd/network/all.network\n");
        assert!(hint.is_some_and(|hint| hint.contains("by /etc/systemd/network/all.network: put [Match]")));
        assert_eq!(of_networkd("nebula1", "ADMIN_STATE=unmanaged\nOPER_STATE=carrier\n"), None);
        assert_eq!(of_networkd("nebula1", ""), None);
        assert!(of_network_manager("nebula1", "[device]\nmanaged=true\n").is_some());
        assert_eq!(of_network_manager("nebula1", "[device]\nmanaged=unknown\n"), None);
    }

    #[test]
    fn the_network_of_another_interface_is_found() {
        let loopback = ["127.9.9.9/8".parse().unwrap(), "10.1.0.1/16".parse().unwrap()];
        let found = find("nebula1", &loopback).unwrap();
        assert_eq!(found.iter().map(|rival| rival.interface.as_str()).collect::<Vec<_>>(), ["lo"]);
        assert_eq!(find("lo", &loopback).unwrap(), []);
        assert_eq!(find("nebula1", &["127.9.9.9/16".parse().unwrap()]).unwrap(), []);
    }
}
