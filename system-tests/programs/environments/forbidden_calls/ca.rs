//! The CA where the kernel has no IPv6.

use super::{logged, serves_without_v6};
use crate::loopback::free_tcp_port;
use crate::world::cluster::binary;

#[test]
#[ignore = "needs a build of the CA"]
fn without_ipv6_in_the_kernel_the_ca_listens_on_ipv4() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, log) = (dir.path().join("ca").display().to_string(), dir.path().join("log"));
    let said = || std::fs::read_to_string(&log).unwrap();
    let init = ["init", "--dir", &ca, "--tls-name", "localhost", "--overlay", "10.42.0.0/16"];
    assert!(logged(&binary("nebula-ca"), &log).args(init).status().unwrap().success(), "{}", said());
    let ports = [free_tcp_port(), free_tcp_port()];
    let [listen, status] = ports.map(|port| format!("[::]:{port}"));
    let serve = ["serve", "--dir", &ca, "--listen", &listen, "--status-listen", &status];
    let served = serves_without_v6(logged(&binary("nebula-ca"), &log).args(serve), &ports);
    assert_eq!(served, (true, Some(0)), "{}", said());
}
