//! The UDP sockets of one pod's tunnel: one port per pod, in the host's network namespace or the pod's own.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use nebula_cni_contract::launch::{LaunchSpec, port_at};
use nebula_config::Settings;
use nebula_core::io::UdpSocket;
use nebula_linux::netns::Namespace;
use nebula_linux::store::{Store, UDP};

use crate::pod::error::Error;

/// Goes on with the sockets that the last instance left in the store, or binds a free port of the range, in
/// `namespace`. An instance that starts again for the same pod gets the same port if that is free, so that the pod's
/// peers find it where it was.
pub(crate) fn open(
    store: &mut Store,
    spec: &LaunchSpec,
    settings: &Settings,
    namespace: &Namespace,
) -> Result<(Vec<UdpSocket>, u16), Error> {
    let before = store.left(UDP).iter().find_map(|socket| address_of(socket).ok());
    if let Some(kept) = store.adopt(UDP, |sockets| adopt(sockets, spec, settings, namespace)) {
        tracing::info!(port = kept.1, "The UDP port of the last instance goes on");
        return Ok(kept);
    }
    let bind = || {
        if let Some(address) = before {
            // Its port is free once the service manager has closed it. If it stays in use, another one is chosen.
            let _ = store.make_when_free(io::ErrorKind::AddrInUse, || std::net::UdpSocket::bind(address).map(drop));
        }
        bind_in_range(spec, settings)
    };
    namespace.run("underlay", bind).unwrap_or_else(|error| Err(Error::set_up("cannot make the UDP socket", error)))
}

/// Goes on with the sockets of the previous instance, which are in `namespace`.
///
/// # Errors
/// Returns an error if they are not those that [`open`] would make.
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
        let port = address_of(first)?.port();
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

fn address_of(socket: &OwnedFd) -> io::Result<SocketAddr> {
    std::net::UdpSocket::from(socket.try_clone()?).local_addr()
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
    use std::os::fd::AsFd;

    use super::*;
    use crate::pod::launch_file::tests::launch;
    use nebula_config::Value;
    use nebula_linux::descriptors::Passed;

    // Tests run side by side and the launch of each has the same port, so each test has a loopback address of its own.
    #[test]
    fn a_taken_port_is_passed_over_and_a_full_range_is_named() {
        let spec = launch(|_| ()).unwrap();
        let settings =
            Settings::read_without_pki(&Value::from(&serde_json::json!({"listen": {"host": "127.0.0.1"}}))).unwrap();
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let one = LaunchSpec { port_range: (port, port), ..spec.clone() };
        let error = open(&mut Store::default(), &one, &settings, &Namespace::Own).err().unwrap().to_string();
        assert!(error.contains(&format!("{port}-{port}")) && error.contains("widen"), "{error}");
        let empty = LaunchSpec { port_range: (5, 4), ..spec };
        assert!(open(&mut Store::default(), &empty, &settings, &Namespace::Own).is_err());
    }

    #[test]
    fn a_pod_keeps_its_port_when_its_instance_starts_again() {
        let spec = LaunchSpec { port_range: (20_000, 30_000), ..launch(|_| ()).unwrap() };
        let settings =
            Settings::read_without_pki(&Value::from(&serde_json::json!({"listen": {"host": "127.0.0.2"}}))).unwrap();
        let start = |spec: &LaunchSpec| open(&mut Store::default(), spec, &settings, &Namespace::Own).unwrap();
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

    #[test]
    fn sockets_of_the_store_go_on_if_they_fit_and_else_the_pod_s_own_port_is_bound() {
        let spec = LaunchSpec { port_range: (20_000, 30_000), ..launch(|_| ()).unwrap() };
        let settings = |routines: usize| {
            let entry = serde_json::json!({"listen": {"host": "127.0.0.3"}, "routines": routines});
            Settings::read_without_pki(&Value::from(&entry)).unwrap()
        };
        let stored = |sockets: Vec<OwnedFd>| {
            let passed = sockets.into_iter().map(|file| Passed { name: UDP.to_owned(), file });
            Store::new(Ok(passed.collect()), &[UDP])
        };
        let inode = |socket: &UdpSocket| nix::sys::stat::fstat(socket).unwrap().st_ino;
        let (sockets, port) = open(&mut Store::default(), &spec, &settings(1), &Namespace::Own).unwrap();
        let first = inode(&sockets[0]);
        let left = || vec![sockets[0].as_fd().try_clone_to_owned().unwrap()];
        let (again, its_port) = open(&mut stored(left()), &spec, &settings(1), &Namespace::Own).unwrap();
        assert_eq!((inode(&again[0]), its_port), (first, port));

        // Another range.
        let elsewhere = LaunchSpec { port_range: (port + 1, port + 100), ..spec.clone() };
        let (others, its_port) = open(&mut stored(left()), &elsewhere, &settings(1), &Namespace::Own).unwrap();
        assert!(inode(&others[0]) != first && its_port > port);
        // Another number of them: the port is waited for.
        let mut store = stored(left());
        drop((sockets, again));
        let (two, its_port) = open(&mut store, &spec, &settings(2), &Namespace::Own).unwrap();
        assert_eq!((two.len(), its_port), (2, port));
        // What is no socket at all, before one that is.
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut store = stored(vec![file.into(), two[0].as_fd().try_clone_to_owned().unwrap()]);
        let closing = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(two);
        });
        assert_eq!(open(&mut store, &spec, &settings(1), &Namespace::Own).unwrap().1, port);
        closing.join().unwrap();
    }
}
