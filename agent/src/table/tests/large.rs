//! What a large cluster costs.

use nebula_cni_plugin::cluster_table::EndpointState;

use super::super::endpoints::{Endpoint, Slice};
use super::super::facts::{self, Member};
use super::super::keeper::MAX_GATHER;
use super::super::services::{Port, Service};
use super::*;

/// 10,000 Services with 50,000 endpoints, all of them enrolled.
fn large() -> Facts {
    let mut facts = Facts::default();
    for service in 0..10_000u32 {
        let [_, _, high, low] = service.to_be_bytes();
        let name: Box<str> = format!("shop/service-{service}").into();
        facts.services.insert(name.clone(), Service::new([10, 100, high, low].into(), 80));
        facts.slices.insert(name.clone(), vec![slice(&name, service, 8080)]);
    }
    for number in 0..50_000u32 {
        let addresses = [Some(address(number)), None];
        let member = Member { addresses, incarnation: u64::from(number) + 1 };
        facts.members.insert(number.into(), member);
    }
    for input in Input::ALL {
        facts.is_heard(input);
    }
    facts
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
    let keeper = Keeper {
        shared: Arc::clone(&shared),
        node: "n1".to_owned(),
        writer: Writer::open(&path),
        metrics: Arc::new(Metrics::new(true)),
        readiness: Readiness::default(),
        clear_sets: ClearSets::default(),
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
        shared.change(|facts| facts::put(&mut facts.slices, name, Some(slices)));
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
