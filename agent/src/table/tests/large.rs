//! What a large cluster costs.

use nebula_cni_contract::cluster_table::EndpointState;

use super::super::endpoints::{Endpoint, Port, Slice};
use super::super::keeper::MAX_GATHER;
use super::super::kept::Keep;
use super::super::member::Member;
use super::super::services::Service;
use super::super::shown::Shown;
use super::*;

/// 10,000 Services with 50,000 endpoints, all of them enrolled.
fn large() -> Facts {
    let (mut facts, node) = (Facts::default(), "n1".into());
    for service in 0..10_000u32 {
        let [_, _, high, low] = service.to_be_bytes();
        let name: Box<str> = format!("shop/service-{service}").into();
        facts.services.put(name.clone(), Some(Service::new([10, 100, high, low].into(), 80)));
        facts.slices.put(name.clone(), Some(vec![slice(&name, service, 8080)]));
    }
    for number in 0..50_000u32 {
        enrol(&mut facts, number, &node);
    }
    for input in Input::ALL {
        facts.is_heard(input);
    }
    facts
}

/// A pod with a certificate.
fn enrol(facts: &mut Facts, number: u32, node: &Arc<str>) {
    let addresses = [Some(address(number)), None];
    let member = Member { addresses, incarnation: u64::from(number) + 1, port_number: number, is_host: false };
    facts.members.insert(number.into(), member);
    let (is_left_out, is_host_network, mirrors) = (false, false, None);
    let shown = Shown {
        addresses,
        node: Arc::clone(node),
        is_left_out,
        counts: true,
        is_host_network,
        mirrors,
        described: None,
    };
    facts.pods.put(number.into(), Some(shown));
}

fn address(number: u32) -> IpAddr {
    let [_, high, middle, low] = number.to_be_bytes();
    [10, 200 + high, middle, low].into()
}

fn slice(name: &str, service: u32, port: u16) -> Slice {
    let endpoint = |n: u32| Endpoint { address: address(service * 5 + n), state: EndpointState::Ready, node: None };
    let ports = Box::new([Port { name: "".into(), port, protocol: 6 }]);
    Slice { service: name.into(), is_ipv4: true, ports, endpoints: (0..5).map(endpoint).collect() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_changed_endpoints_are_in_the_file_soon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cluster/table");
    let shared = Arc::new(Shared::default());
    let before = resident();
    *shared.facts() = large();
    println!("the facts take {} kB", resident().saturating_sub(before));
    let outputs = Outputs { node: "n1".to_owned(), writer: Writer::open(&path), ..Outputs::default() };
    let keeper = Keeper {
        shared: Arc::clone(&shared),
        outputs,
        metrics: Arc::new(Metrics::new(true)),
        readiness: Readiness::default(),
        unenforced: Unenforced::default(),
        failure: None,
    };
    let task = tokio::spawn(keeper.run());
    shared.changed.notify_one();
    let says = |port: u16| {
        fs::read(&path).is_ok_and(|bytes| {
            let layout = Layout::read(&bytes).unwrap();
            let table = layout.table(&bytes);
            let Found::Service(service) = table.find([10, 100, 0, 199].into(), 80, 6) else { return false };
            table.endpoint(service.id, 4).unwrap().port == port
        })
    };
    let until = async |port: u16| {
        while !says(port) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), until(8080)).await.unwrap();
    let length = fs::metadata(&path).unwrap().len();
    tokio::time::sleep(MAX_GATHER).await;
    let (began, used) = (Instant::now(), cpu());
    for service in 0..200u32 {
        let name: Box<str> = format!("shop/service-{service}").into();
        let slices = vec![slice(&name, service, 9090)];
        shared.change(|facts| facts.slices.put(name, Some(slices)));
    }
    tokio::time::timeout(Duration::from_secs(30), until(9090)).await.unwrap();
    let (took, used) = (began.elapsed(), cpu() - used);
    println!(
        "{length} bytes; 1,000 endpoints in the file after {took:?}, {used:?} of CPU (with the test's own reading)"
    );
    task.abort();
    // Programs of the development profile are many times slower.
    assert!(length < 20 << 20 && took < Duration::from_secs(if cfg!(debug_assertions) { 15 } else { 1 }));
}

/// Services of one namespace, each with so many ports that lead to so many pods.
fn crowd(services: u32, ports: u16, pods: u32, target: impl Fn(u16, u32) -> u16) -> Facts {
    let (mut facts, node) = (Facts::default(), "n1".into());
    (0..pods).for_each(|number| enrol(&mut facts, number, &node));
    for service in 0..services {
        let [_, _, high, low] = service.to_be_bytes();
        let name: Box<str> = format!("evil/service-{service}").into();
        let named = |port: u16, number: u16| Port { name: format!("p{port}").into(), port: number, protocol: 6 };
        facts.services.put(
            name.clone(),
            Some(Service::with([10, 100, high, low].into(), (1..=ports).map(|port| named(port, port)))),
        );
        let slice = |part: u32| {
            let endpoint = |n: u32| Endpoint { address: address(n), state: EndpointState::Ready, node: None };
            let endpoints = (part * 100..pods.min((part + 1) * 100)).map(endpoint).collect();
            let ports = (1..=ports).map(|port| named(port, target(port, part))).collect();
            Slice { service: name.clone(), is_ipv4: true, ports, endpoints }
        };
        for part in 0..pods.div_ceil(100) {
            facts.slices.put(format!("{name}-{part}").into(), Some(vec![slice(part)]));
        }
    }
    facts
}

#[test]
fn the_services_of_one_namespace_do_not_end_the_agent_or_crowd_out_others() {
    let plain = |port: u16, _: u32| 10_000 + port;
    // Each slice leads to ports of its own, so that no list is like another one.
    let different = |port: u16, part: u32| 10_000 + port + part as u16;
    for (services, ports, pods, is_plain) in
        [(60, 1_000, 100, true), (20, 1_000, 1_000, true), (20, 1_000, 1_000, false), (600, 1_000, 100, true)]
    {
        let mut facts =
            if is_plain { crowd(services, ports, pods, plain) } else { crowd(services, ports, pods, different) };
        // A Service of another namespace, younger and later in order.
        facts.services.put("shop/web".into(), Some(Service::new([10, 99, 0, 1].into(), 80).made_at(9)));
        facts.slices.put("shop/web".into(), Some(vec![slice("shop/web", 0, 8080)]));
        let before = resident();
        let (bytes, _) = facts.table(&facts.judge("n1"), "n1", 1);
        let grown = resident().saturating_sub(before);
        println!("{services} x {ports} x {pods}: {} kB, with {grown} kB to make it", bytes.len() / 1024);
        assert!(bytes.len() < 16 << 20, "{services} x {ports} x {pods}: {} bytes", bytes.len());
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        let Found::Service(web) = table.find([10, 99, 0, 1].into(), 80, 6) else { panic!("a Service") };
        assert_eq!(web.ready, 5);
        let Found::Service(first) = table.find([10, 100, 0, 0].into(), 1, 6) else { panic!("a Service") };
        assert_eq!(first.ready, pods);
        assert_eq!(facts.crowded().is_empty(), services < 600);
    }
}

#[test]
fn of_two_services_with_one_address_the_older_one_counts() {
    let (mut facts, node) = (Facts::default(), "n1".into());
    (0..20).for_each(|number| enrol(&mut facts, number, &node));
    for (name, created, number) in [("a/new", 2, 0), ("z/old", 1, 1)] {
        let service = Service::new([10, 99, 0, 1].into(), 80).made_at(created);
        facts.services.put(name.into(), Some(service));
        facts.slices.put(name.into(), Some(vec![slice(name, number, 8080)]));
    }
    let (bytes, _) = facts.table(&facts.judge("n1"), "n1", 1);
    let layout = Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    let Found::Service(service) = table.find([10, 99, 0, 1].into(), 80, 6) else { panic!("a Service") };
    assert_eq!(table.endpoint(service.id, 0).unwrap().address, address(5));
}

/// Resident memory in kB.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn cpu() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
    let time = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec().try_into().unwrap(), u32::try_from(time.tv_usec()).unwrap() * 1_000)
    };
    time(usage.user_time()) + time(usage.system_time())
}
