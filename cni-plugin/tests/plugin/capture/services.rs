//! A Service of which some endpoints are enrolled: what a captured pod sends past its tunnel reaches one of the
//! others, whatever kube-proxy would choose.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use nebula_cni_plugin::link::service_choice::{self, Choice};

use super::site::{Pod, Primary, Site};

const SERVICES: [&str; 2] = ["10.96.0.5:80", "[fd00:96::5]:80"];

/// Asks from each of these ports, and counts who answered with the Service's address.
fn asked(site: &Site, from: &Pod, service: SocketAddr, ports: std::ops::Range<u16>) -> BTreeMap<String, usize> {
    let own: IpAddr = if service.is_ipv4() { from.v4() } else { from.v6() }.parse().unwrap();
    let mut counts = BTreeMap::new();
    for port in ports {
        let answer = site.at(&from.name, || {
            let socket = UdpSocket::bind((own, port))?;
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            socket.connect(service)?;
            socket.send(b"who?")?;
            let mut text = [0; 16];
            let len = socket.recv(&mut text)?;
            Ok(String::from_utf8_lossy(&text[..len]).into_owned())
        });
        *counts.entry(answer.unwrap_or_else(|error| error.kind().to_string())).or_default() += 1;
    }
    counts
}

#[test]
#[ignore = "needs root and network namespaces"]
fn the_node_leads_captured_pods_to_endpoints_that_are_not_enrolled_and_others_as_before() {
    let mut site = Site::new(Primary::Links);
    // The rules on the links of captured pods have tests of their own.
    let [client, stranger] = [site.pod("client", 7), site.pod("stranger", 8)];
    let servers = [site.pod("enrolled", 9), site.pod("one", 10), site.pod("two", 11)];
    for (service, to) in SERVICES.iter().zip([servers[0].v4(), format!("[{}]", servers[0].v6())]) {
        let address: SocketAddr = service.parse().unwrap();
        let family = if address.is_ipv4() { "ip" } else { "ip6" };
        // As kube-proxy's choice of the moment.
        let chain = format!(
            "chain c {{\ntype nat hook prerouting priority -100;\n{family} daddr {} udp dport 80 dnat to {to}:8080;\n}}",
            address.ip()
        );
        site.inside("node", &["nft", &format!("table {family} proxy {{\n{chain}\n}}")]);
    }
    for server in &servers {
        for address in [server.v4(), server.v6()] {
            let socket = site.at(&server.name, || UdpSocket::bind((address.as_str(), 8080))).unwrap();
            let name = server.name.clone();
            thread::spawn(move || {
                let mut text = [0; 16];
                while let Ok((_, from)) = socket.recv_from(&mut text) {
                    let _ = socket.send_to(name.as_bytes(), from);
                }
            });
        }
    }
    let choice = |service: &str, by_client: bool| {
        let service: SocketAddr = service.parse().unwrap();
        let of = |pod: &Pod| if service.is_ipv4() { pod.v4() } else { pod.v6() }.parse::<IpAddr>().unwrap();
        let endpoints = servers[1..].iter().map(|pod| SocketAddr::new(of(pod), 8080)).collect();
        Choice { service, protocol: 17, by_client, endpoints }
    };
    let replace = |choices: &[Choice]| {
        let pods = [client.v4(), client.v6()].map(|address| address.parse().unwrap());
        site.at("node", || service_choice::replace(&pods, choices)).unwrap();
    };
    let mut port = 20_000;
    for service in SERVICES {
        let target: SocketAddr = service.parse().unwrap();
        let mut next = |from: &Pod, count: u16| {
            port += count;
            asked(&site, from, target, port - count..port)
        };
        assert_eq!(next(&client, 3), [("enrolled".to_owned(), 3)].into(), "{service}: kube-proxy's choice");
        replace(&SERVICES.map(|service| choice(service, false)));
        let counts = next(&client, 60);
        let [one, two] = ["one", "two"].map(|name| counts.get(name).copied().unwrap_or_default());
        assert!(one + two == 60 && one > 15 && two > 15, "{service}: {counts:?}");
        assert_eq!(next(&stranger, 3), [("enrolled".to_owned(), 3)].into(), "{service}: others are not concerned");
        replace(&SERVICES.map(|service| choice(service, true)));
        assert_eq!(next(&client, 20).len(), 1, "{service}: affinity");
        // A flow keeps its endpoint as long as it is in use.
        let before = asked(&site, &client, target, 30_000..30_010);
        replace(&[Choice { endpoints: choice(service, true).endpoints[..1].to_vec(), ..choice(service, true) }]);
        assert_eq!(asked(&site, &client, target, 30_000..30_010), before, "{service}");
        replace(&[]);
        assert_eq!(next(&client, 3), [("enrolled".to_owned(), 3)].into(), "{service}: as before");
        assert_eq!(site.rules(), "");
    }
}
