//! Sockets for packets that leave a captured pod on its primary network after all.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nebula_cni_contract::launch::{LaunchSpec, MARK};
use nebula_core::io::Bypass;
use nebula_linux::errno;
use nebula_linux::netns::Namespace;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};

use crate::pod::error::Error;

/// Opens raw sockets in the pod's namespace, one of each family of the pod's addresses, bound to the pod's interface.
/// They send whole packets and receive nothing, and what they send carries the mark that the routing rule of the
/// capture lets pass. Needs CAP_NET_RAW and CAP_NET_ADMIN.
pub(crate) fn open(spec: &LaunchSpec, namespace: &Namespace) -> Result<Bypass, Error> {
    let interface = &spec.target.ifname;
    let sources = spec.capture.iter().flat_map(|capture| &capture.sources);
    let [v4, v6]: [bool; 2] = [true, false].map(|v4| sources.clone().any(|own| own.is_ipv4() == v4));
    let open_one = |is_wanted: bool, family| is_wanted.then(|| open_here(family, interface).map(Arc::new)).transpose();
    let what = format!("cannot open the raw sockets on {interface} for traffic that is not captured");
    let opened = namespace.run("bypass", || {
        Ok(Bypass { v4: open_one(v4, AddressFamily::Inet)?, v6: open_one(v6, AddressFamily::Inet6)? })
    });
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => Error::set_up(&what, "CAP_NET_RAW and CAP_NET_ADMIN are needed"),
        _ => Error::set_up(&what, errno::text(&error)),
    };
    opened.map_err(|error| Error::set_up(&what, error))?.map_err(refused)
}

fn open_here(family: AddressFamily, interface: &str) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    // Of this protocol the kernel takes packets with their header, and hands none over.
    let socket = socket(family, SockType::Raw, flags, SockProtocol::Raw)?;
    setsockopt(&socket, sockopt::Mark, &MARK)?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::launch_file::tests::launch;

    #[test]
    #[ignore = "needs root"]
    fn each_family_of_the_pod_has_a_marked_socket_on_its_interface() {
        let spec = |sources: &[&str], ifname: &str| {
            let (sources, ifname) = (serde_json::json!(sources), ifname.to_owned());
            let capture = serde_json::json!({"ranges": ["10.244.0.0/16"], "sources": sources, "table": "/none/table"});
            launch(|spec| (spec["capture"], spec["ifname"]) = (capture, ifname.into())).unwrap()
        };
        let both = open(&spec(&["10.244.1.7", "fd00::7"], "lo"), &Namespace::Own).unwrap();
        assert!(both.v6.is_some());
        let socket = both.v4.unwrap();
        assert_eq!(nix::sys::socket::getsockopt(&socket, sockopt::Mark).unwrap(), MARK);
        let one = open(&spec(&["fd00::7"], "lo"), &Namespace::Own).unwrap();
        assert!(one.v4.is_none() && one.v6.is_some());
        let error = open(&spec(&["10.244.1.7"], "none0"), &Namespace::Own).unwrap_err().to_string();
        assert!(error.contains("none0") && error.contains("no such device"), "{error}");
    }
}
