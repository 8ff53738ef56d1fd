//! The UDP sockets of one pod's tunnel: one port per pod, in the host's network namespace or the pod's own.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use nebula_cni_contract::launch::{LaunchSpec, port_at};
use nebula_config::Settings;
use nebula_core::io::UdpSocket;
use nebula_linux::netns::Namespace;

use crate::pod::error::Error;

/// Binds a free port of the range, in `namespace`. An instance that starts again for the same pod gets the same port if
/// that is free, so that the pod's peers find it where it was.
pub(crate) fn bind(
    spec: &LaunchSpec,
    settings: &Settings,
    namespace: &Namespace,
) -> Result<(Vec<UdpSocket>, u16), Error> {
    namespace
        .run("underlay", || bind_in_range(spec, settings))
        .unwrap_or_else(|error| Err(Error::set_up("cannot make the UDP socket", error)))
}

/// Goes on with the sockets of the instance before this one, which are in `namespace`.
///
/// # Errors
/// Returns an error if they are not those that [`bind`] would make.
pub(crate) fn adopt(
    sockets: Vec<OwnedFd>,
    spec: &LaunchSpec,
    settings: &Settings,
    namespace: &Namespace,
) -> io::Result<(Vec<UdpSocket>, u16)> {
    let host: IpAddr =
        settings.listen.host.parse().map_err(|_| io::Error::other("listen.host is not an IP address"))?;
    let adopt = || {
        let first = sockets.first().ok_or_else(|| io::Error::other("there are no UDP sockets"))?;
        let port = std::net::UdpSocket::from(first.try_clone()?).local_addr()?.port();
        let (from, to) = spec.port_range;
        if !(from..=to).contains(&port) {
            return Err(io::Error::other(format!("UDP port {port} is not in {from}-{to}")));
        }
        let address = SocketAddr::new(host, port);
        let options = settings.listen.socket_options();
        Ok((UdpSocket::adopt(sockets, address, settings.routines, &options)?, port))
    };
    namespace.run("underlay", adopt).unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn bind_in_range(spec: &LaunchSpec, settings: &Settings) -> Result<(Vec<UdpSocket>, u16), Error> {
    let range @ (first, last) = spec.port_range;
    let what = || format!("cannot bind a UDP port in {first}-{last} on {}", settings.listen.host);
    let refuse = |cause: &'static str| Error::set_up(what(), cause);
    let host: IpAddr = settings.listen.host.parse().map_err(|_| refuse("listen.host is not an IP address"))?;
    if first == 0 || last < first {
        return Err(refuse("the range is empty or begins with port 0"));
    }
    let number = spec.target.port_number();
    for port in (0..).map_while(|step| port_at(number, step, range)) {
        let address = SocketAddr::new(host, port);
        let options = settings.listen.socket_options();
        // The sockets of a tunnel share their port, and would share it with those of another instance, too; a single
        // one does not.
        let is_free = UdpSocket::bind(address, 1, &options).map(drop);
        let bound = is_free.and_then(|()| UdpSocket::bind(address, settings.routines, &options));
        match bound {
            Ok(sockets) => return Ok((sockets, address.port())),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(Error::set_up_io(what(), error)),
        }
    }
    Err(refuse("every port is in use; widen portRange"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::launch_file::tests::launch;
    use nebula_config::Value;

    #[test]
    fn a_taken_port_is_passed_over_and_a_full_range_is_named() {
        let spec = launch(|_| ()).unwrap();
        let settings =
            Settings::read_without_pki(&Value::from(&serde_json::json!({"listen": {"host": "127.0.0.1"}}))).unwrap();
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let one = LaunchSpec { port_range: (port, port), ..spec.clone() };
        let error = bind(&one, &settings, &Namespace::Own).err().unwrap().to_string();
        assert!(error.contains(&format!("{port}-{port}")) && error.contains("widen"), "{error}");
        let empty = LaunchSpec { port_range: (5, 4), ..spec };
        assert!(bind(&empty, &settings, &Namespace::Own).is_err());
    }

    #[test]
    fn a_pod_keeps_its_port_when_its_instance_starts_again() {
        let spec = LaunchSpec { port_range: (20_000, 30_000), ..launch(|_| ()).unwrap() };
        let settings =
            Settings::read_without_pki(&Value::from(&serde_json::json!({"listen": {"host": "127.0.0.1"}}))).unwrap();
        let start = |spec: &LaunchSpec| bind(spec, &settings, &Namespace::Own).unwrap();
        let (sockets, port) = start(&spec);
        assert_eq!(start(&spec).1, port + 1, "the next one while its own is taken");
        drop(sockets);
        assert_eq!(start(&spec).1, port);
        let mut other = spec;
        other.target.container_id.push('2');
        assert_eq!(start(&other).1, port, "another sandbox of the pod is where its peers expect the pod");
        other.target.pod.uid.push('2');
        assert!(start(&other).1.abs_diff(port) > 1, "others begin elsewhere");
    }
}
