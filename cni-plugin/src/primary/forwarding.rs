//! Lets the node route packets of pods.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

/// Switches routing on for the families of these addresses, where it is off.
///
/// # Errors
/// Returns the file system's error: the node has no such family, or the plugin may not change it.
pub(super) fn enable(addresses: &[IpAddr]) -> io::Result<()> {
    enable_in(Path::new("/proc/sys/net"), addresses)
}

fn enable_in(switches: &Path, addresses: &[IpAddr]) -> io::Result<()> {
    if addresses.iter().any(IpAddr::is_ipv4) {
        let switch = switches.join("ipv4/ip_forward");
        if !is_on(&switch)? {
            fs::write(switch, "1")?;
        }
    }
    if addresses.iter().any(IpAddr::is_ipv6) {
        let interfaces = switches.join("ipv6/conf");
        let switch = interfaces.join("all/forwarding");
        if !is_on(&switch)? {
            keep_routers(&interfaces);
            fs::write(switch, "1")?;
        }
    }
    Ok(())
}

/// A node that routes ignores router advertisements, and loses the default route that it has from one, except on
/// interfaces where it is asked to heed them all the same (2).
fn keep_routers(interfaces: &Path) {
    for interface in fs::read_dir(interfaces).into_iter().flatten().flatten() {
        let heeds = interface.path().join("accept_ra");
        if is_on(&heeds).unwrap_or(false) {
            let _ = fs::write(heeds, "2");
        }
    }
}

fn is_on(switch: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(switch)?.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> tempfile::TempDir {
        let node = tempfile::tempdir().unwrap();
        for (switch, value) in [
            ("ipv4/ip_forward", "0\n"),
            ("ipv6/conf/all/forwarding", "0\n"),
            ("ipv6/conf/eth0/accept_ra", "1\n"),
            ("ipv6/conf/eth1/accept_ra", "0\n"),
        ] {
            fs::create_dir_all(node.path().join(switch).parent().unwrap()).unwrap();
            fs::write(node.path().join(switch), value).unwrap();
        }
        node
    }

    #[test]
    fn only_the_families_of_the_pod_are_routed_and_the_node_keeps_its_own_router() {
        let node = node();
        let read = |switch: &str| fs::read_to_string(node.path().join(switch)).unwrap();
        enable_in(node.path(), &["10.0.0.1".parse().unwrap()]).unwrap();
        assert_eq!((read("ipv4/ip_forward").as_str(), read("ipv6/conf/all/forwarding").as_str()), ("1", "0\n"));
        enable_in(node.path(), &["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()]).unwrap();
        assert_eq!(read("ipv6/conf/all/forwarding"), "1");
        assert_eq!(
            (read("ipv6/conf/eth0/accept_ra").as_str(), read("ipv6/conf/eth1/accept_ra").as_str()),
            ("2", "0\n")
        );
        fs::write(node.path().join("ipv6/conf/eth0/accept_ra"), "1").unwrap();
        enable_in(node.path(), &["fd00::1".parse().unwrap()]).unwrap();
        assert_eq!(read("ipv6/conf/eth0/accept_ra"), "1", "a node that routes already is left alone");
    }

    #[test]
    fn a_family_that_the_node_does_not_have_is_an_error() {
        let node = node();
        fs::remove_dir_all(node.path().join("ipv6")).unwrap();
        assert!(enable_in(node.path(), &["fd00::1".parse().unwrap()]).is_err());
        enable_in(node.path(), &["10.0.0.1".parse().unwrap()]).unwrap();
    }
}
