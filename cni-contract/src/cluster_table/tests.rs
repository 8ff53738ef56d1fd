//! The answers of a table are those of plain maps, and no bytes do harm.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// Few enough to meet often.
const ADDRESSES: [&str; 12] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.0.3",
    "10.0.1.1",
    "10.0.1.2",
    "10.96.0.1",
    "10.96.0.2",
    "0.0.0.0",
    "fd00::1",
    "fd00::2",
    "fd00:96::1",
    "::a00:1",
];
const PREFIXES: [&str; 8] =
    ["10.0.0.0/30", "10.0.0.2/31", "10.0.1.0/24", "0.0.0.0/0", "10.0.1.2/32", "fd00::/64", "::/0", "fd00::2/128"];
const PORTS: [u16; 3] = [0, 53, 80];

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Facts about a cluster, which the builder and the reference are given alike.
#[derive(Debug, Clone)]
enum Fact {
    Pod(IpAddr, u64),
    Clear(IpAddr),
    ClearPrefix(IpNet),
    SealedPrefix(IpNet),
    PodPrefix(IpNet),
    Service(ServicePort, Vec<ServiceEndpoint>),
}

/// Answers from plain maps, in the words of the documentation.
#[derive(Debug, Default)]
struct Reference {
    pods: BTreeMap<IpAddr, u64>,
    clear: BTreeSet<IpAddr>,
    clear_prefixes: Vec<IpNet>,
    sealed_prefixes: Vec<IpNet>,
    pod_prefixes: Vec<IpNet>,
    services: BTreeMap<(IpAddr, u16, u8), (ServicePort, Vec<ServiceEndpoint>)>,
}

/// What is found, without the index.
#[derive(Debug, PartialEq)]
enum Answer {
    Enrolled(u64),
    Service { choice: BTreeSet<(IpAddr, u16, u64)>, clear: usize, affinity: Option<Duration> },
    NoEndpoint,
    Clear,
    Unknown,
}

impl Reference {
    fn learn(&mut self, fact: Fact) {
        match fact {
            Fact::Pod(address, incarnation) => drop(self.pods.insert(address, incarnation)),
            Fact::Clear(address) => drop(self.clear.insert(address)),
            Fact::ClearPrefix(prefix) => self.clear_prefixes.push(prefix),
            Fact::SealedPrefix(prefix) => self.sealed_prefixes.push(prefix),
            Fact::PodPrefix(prefix) => self.pod_prefixes.push(prefix),
            Fact::Service(port, endpoints) => {
                self.services.insert((port.address, port.port, port.protocol), (port, endpoints));
            }
        }
    }

    fn find(&self, address: IpAddr, port: u16, protocol: u8) -> Answer {
        let is_in = |prefixes: &[IpNet]| prefixes.iter().any(|prefix| prefix.contains(&address));
        if let Some(incarnation) = self.pods.get(&address) {
            return Answer::Enrolled(*incarnation);
        }
        if let Some((port, endpoints)) = self.services.get(&(address, port, protocol)) {
            let (choice, clear) = self.choice(port, endpoints);
            let takes_flows = |endpoint: &ServiceEndpoint| {
                endpoint.state != EndpointState::NotReady && (endpoint.is_on_this_node || !port.this_node_only)
            };
            return match (choice.len(), clear) {
                (0, 0) if endpoints.iter().any(takes_flows) => Answer::Unknown,
                (0, 0) => Answer::NoEndpoint,
                _ => Answer::Service { choice, clear, affinity: port.affinity },
            };
        }
        if self.services.keys().any(|(service, ..)| *service == address) {
            Answer::NoEndpoint
        } else if self.clear.contains(&address) {
            Answer::Clear
        } else if is_in(&self.sealed_prefixes) {
            Answer::Enrolled(0)
        } else if is_in(&self.clear_prefixes) {
            Answer::Clear
        } else {
            Answer::Unknown
        }
    }

    fn of_state(
        &self,
        port: &ServicePort,
        endpoints: &[ServiceEndpoint],
        state: EndpointState,
    ) -> BTreeSet<(IpAddr, u16, u64)> {
        let listed = endpoints.iter().filter(|endpoint| endpoint.state == state);
        let near = listed.filter(|endpoint| endpoint.is_on_this_node || !port.this_node_only);
        near.filter_map(|at| Some((at.address, at.port, *self.pods.get(&at.address)?))).collect()
    }

    /// Number of endpoints of a state that are known not to be enrolled.
    fn clear_of_state(&self, port: &ServicePort, endpoints: &[ServiceEndpoint], state: EndpointState) -> usize {
        let is_in = |prefixes: &[IpNet], address: &IpAddr| prefixes.iter().any(|prefix| prefix.contains(address));
        let is_clear = |address: &IpAddr| {
            self.clear.contains(address)
                || !is_in(&self.sealed_prefixes, address)
                    && (is_in(&self.clear_prefixes, address) || !is_in(&self.pod_prefixes, address))
        };
        let listed = endpoints.iter().filter(|endpoint| endpoint.state == state);
        let near = listed.filter(|endpoint| endpoint.is_on_this_node || !port.this_node_only);
        let clear = near.filter(|at| !self.pods.contains_key(&at.address) && is_clear(&at.address));
        clear.map(|at| (at.address, at.port)).collect::<BTreeSet<_>>().len()
    }

    /// The enrolled ones, and the number of the others.
    fn choice(&self, port: &ServicePort, endpoints: &[ServiceEndpoint]) -> (BTreeSet<(IpAddr, u16, u64)>, usize) {
        let of = |state| (self.of_state(port, endpoints, state), self.clear_of_state(port, endpoints, state));
        let ready = of(EndpointState::Ready);
        if ready.0.is_empty() && ready.1 == 0 { of(EndpointState::Terminating) } else { ready }
    }

    fn serves(&self, service: (IpAddr, u16, u8), address: IpAddr, number: u16) -> bool {
        self.services.get(&service).is_some_and(|(port, endpoints)| {
            [EndpointState::Ready, EndpointState::Terminating]
                .map(|state| self.of_state(port, endpoints, state))
                .iter()
                .flatten()
                .any(|(at, port, _)| (*at, *port) == (address, number))
        })
    }
}

fn some_address() -> impl Strategy<Value = IpAddr> {
    select(&ADDRESSES[..]).prop_map(address)
}

fn some_prefix() -> impl Strategy<Value = IpNet> {
    select(&PREFIXES[..]).prop_map(|text| text.parse().unwrap())
}

fn some_endpoint() -> impl Strategy<Value = ServiceEndpoint> {
    let state = select(vec![EndpointState::Ready, EndpointState::Terminating, EndpointState::NotReady]);
    let fields = (some_address(), select(&PORTS[..]), state, any::<bool>());
    fields.prop_map(|(address, port, state, is_on_this_node)| ServiceEndpoint { address, port, state, is_on_this_node })
}

fn some_service() -> impl Strategy<Value = Fact> {
    let affinity = proptest::option::of((1_u64..20_000).prop_map(Duration::from_secs));
    // Port and protocol 0 are those of a Service's address as such.
    let port = (some_address(), 1_u16..3, select(vec![TCP, UDP]), affinity, any::<bool>());
    (port, vec(some_endpoint(), 0..6)).prop_map(|((address, port, protocol, affinity, this_node_only), endpoints)| {
        Fact::Service(ServicePort { address, port, protocol, affinity, this_node_only }, endpoints)
    })
}

fn some_facts() -> impl Strategy<Value = Vec<Fact>> {
    let fact = prop_oneof![
        4 => (some_address(), 1_u64..5).prop_map(|(address, incarnation)| Fact::Pod(address, incarnation)),
        2 => some_address().prop_map(Fact::Clear),
        1 => some_prefix().prop_map(Fact::ClearPrefix),
        1 => some_prefix().prop_map(Fact::SealedPrefix),
        1 => some_prefix().prop_map(Fact::PodPrefix),
        4 => some_service(),
    ];
    vec(fact, 0..25)
}

fn build(facts: &[Fact], version: u64) -> Vec<u8> {
    let mut builder = Builder::new();
    for fact in facts.iter().cloned() {
        match fact {
            Fact::Pod(address, incarnation) => {
                builder.pod(address, incarnation);
                builder.identity(address, u32::try_from(incarnation).ok());
                builder.programs(address, [vec![1; 3], Vec::new()]);
            }
            Fact::Clear(address) => builder.clear(address),
            Fact::ClearPrefix(prefix) => builder.clear_prefix(prefix),
            Fact::SealedPrefix(prefix) => builder.sealed_prefix(prefix),
            Fact::PodPrefix(prefix) => builder.pod_prefix(prefix),
            Fact::Service(port, endpoints) => builder.service(port, endpoints),
        }
    }
    builder.finish(version)
}

fn answer(table: &Table<'_>, address: IpAddr, port: u16, protocol: u8) -> Answer {
    match table.find(address, port, protocol) {
        Found::Enrolled { incarnation } => Answer::Enrolled(incarnation),
        Found::Service(Service { id, ready, clear, affinity }) => {
            let choice = (0..ready).map(|n| table.endpoint(id, n).expect("one of those to choose from"));
            let choice: BTreeSet<_> = choice.map(|at| (at.address, at.port, at.incarnation)).collect();
            assert_eq!((choice.len(), table.endpoint(id, ready)), (ready as usize, None));
            let tags: BTreeSet<u16> = table.tags(id).filter(|tag| *tag > 0).collect();
            assert_eq!(tags.len(), choice.len(), "each endpoint has a tag of its own");
            Answer::Service { choice, clear: clear as usize, affinity }
        }
        Found::NoEndpoint => Answer::NoEndpoint,
        Found::Clear => Answer::Clear,
        Found::Unknown => Answer::Unknown,
    }
}

/// Asks everything there is to ask; whatever the bytes are, there must be an end to it.
fn ask_everything(bytes: &[u8]) {
    let Ok(layout) = Layout::read(bytes) else { return };
    let table = layout.table(bytes);
    for address in ADDRESSES.map(address) {
        let _ = (table.incarnation(address), table.labels(address), table.programs(address));
        for (port, protocol) in [(0, 0), (1, TCP), (2, UDP), (53, UDP)] {
            let _ = table.find(address, port, protocol);
        }
        for service in [0, 1, 2, 7, u32::MAX] {
            let _ = table.serves(service, address, 80);
            let _ = [0, 1, u32::MAX].map(|n| table.endpoint(service, n));
            assert!(table.tags(service).count() <= bytes.len());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_table_answers_like_plain_maps(facts in some_facts(), version in 1_u64..) {
        let bytes = build(&facts, version);
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        prop_assert_eq!(table.version(), version);
        let mut reference = Reference::default();
        facts.into_iter().for_each(|fact| reference.learn(fact));
        for asked in ADDRESSES.map(address) {
            let expected = match reference.find(asked, 0, 0) {
                Answer::Enrolled(incarnation) => Some(incarnation),
                _ => None,
            };
            let is_service = reference.services.keys().any(|(service, ..)| *service == asked);
            prop_assert!(is_service || table.incarnation(asked) == expected, "{}", asked);
            for (port, protocol) in [(0, 0), (0, 1), (1, TCP), (1, UDP), (2, TCP), (2, UDP), (3, TCP)] {
                let expected = reference.find(asked, port, protocol);
                prop_assert_eq!(answer(&table, asked, port, protocol), expected, "{} {}/{}", asked, port, protocol);
                let Found::Service(service) = table.find(asked, port, protocol) else { continue };
                for (at, number) in ADDRESSES.iter().flat_map(|at| PORTS.map(|port| (address(at), port))) {
                    let expected = reference.serves((asked, port, protocol), at, number);
                    prop_assert_eq!(table.serves(service.id, at, number), expected, "{}:{}", at, number);
                }
            }
        }
    }

    #[test]
    fn damaged_bytes_do_no_harm(
        facts in some_facts(),
        cut in any::<Index>(),
        damage in vec((any::<Index>(), any::<u8>()), 1..8),
        numbers in vec((any::<Index>(), select(vec![0, 1, 1 << 31, u32::MAX])), 0..4),
    ) {
        let mut bytes = build(&facts, 1);
        prop_assert!(Layout::read(&bytes[..cut.index(bytes.len())]).is_err(), "whatever is cut off is missed");
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        ask_everything(&bytes);
        for (at, number) in numbers {
            let at = at.index(bytes.len() / 4) * 4;
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
        }
        ask_everything(&bytes);
    }
}

#[test]
fn a_table_begins_with_what_tells_its_format() {
    let bytes = Builder::new().finish(7);
    assert_eq!(bytes[..16], *b"nebcltbl\x03\0\x02\0\x0e\0\0\0");
    let changed = |at: usize, value| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        Layout::read(&bytes).map(|layout| layout.version())
    };
    assert_eq!(changed(8, 5), Ok(7), "a later minor version");
    assert_eq!(changed(10, 1), Err(Error::OtherFormat { found: 1 }));
    assert_eq!(changed(0, b'N'), Err(Error::NotATable));
    assert_eq!(changed(12, 8), Err(Error::Malformed(8)), "a section is missing");
    assert_eq!(changed(40 + 16 + 12, 23), Err(Error::Malformed(1)), "records of pods are too short");
    assert_eq!(changed(40 + 8, 0), Err(Error::Malformed(0)), "no buckets");
    let (expected, found) = (bytes.len() as u64 + 256, bytes.len() as u64);
    assert_eq!(changed(17, bytes[17] + 1), Err(Error::Truncated { expected, found }));
    assert_eq!(Layout::read(&[]), Err(Error::NotATable));
}

/// Bytes of a table of version 2.2, made by another program from the description in [`mod@super::format`].
const GOLDEN: &[&str] = &[
    "6e6562636c74626c030002000e0000008104000000000000070000000000000014df177b2330ae12080100000000000003000000040000",
    "00140100000000000003000000180000005c01000000000000030000000400000068010000000000000200000010000000880100000000",
    "00000100000020000000a8010000000000000100000020000000c8010000000000000900000004000000ec010000000000000c0000002c",
    "000000fc03000000000000050000000800000024040000000000000100000010000000340400000000000001000000180000004c040000",
    "0000000002000000080000005c0400000000000001000000200000007c0400000000000005000000010000000000000002000000030000",
    "0000000000000000000000ffff0af400010b0000000000000000000000000000000000ffff0af400020c00000000000000fd0002440000",
    "000000000000000000010d0000000000000000000000010000000200000000000000000000000000ffff0af40009fd0002440000000000",
    "0000000000000900000000000000000000ffff0a00000000000000000000000000ffff0a0000ff00000000000000000000ffff0a090000",
    "00000000000000000000ffff0a09ffff000000000000000003000000050000000600000007000000080000000c0000000c000000000000",
    "00000000000000ffff0a6000010000000200000000000000000000000000000000000000000000000000000000000000000000ffff0a60",
    "00030000000200000000000000000000000000000000000000000000000000000000000000000000ffff0a600004010006000000000001",
    "000000010000000000000001000000911f000000000000000000000000ffff0a60000150000600010000000200000002000000302a0000",
    "000000000000000000000000000000000000ffff0a600002bb010600030000000000000000000000000000000100000000000000000000",
    "00000000000000ffff0a6000013500110003000000010000000200000000000000000000000000000000000000000000000000ffff0a60",
    "00050100840105000000000000000000000000000000000000000000000000000000000000000000ffff0a600002000000020000000000",
    "0000000000000000000000000000000000000000000000000000000000ffff0a600003bb01060005000000000000000000000000000000",
    "000000000000000000000000000000000000ffff0a60000400000002000000000000000000000000000000000000000000000000000000",
    "00000000000000ffff0a600004020006000000000001000000010000000000000001000000921f000000000000000000000000ffff0a60",
    "0005000000020000000000000000000000000000000000000000000000000000000000007c0800000000901f7c0801000000901f156b02",
    "000000e914cb3601000000e914156b00000000000000000000ffffc0000201010000004fee50ee00000000000000000000ffffc0000202",
    "010000001500000002000000ffffffff00000000000000000000ffff0af4000100000000020000000200000003000000696e6f7574",
];

/// The same of version 2.2, which had neither labels nor programs.
const GOLDEN_2_2: &[&str] = &[
    "6e6562636c74626c020002000b0000001c04000000000000070000000000000014df177b2330ae12d80000000000000003000000040000",
    "00e40000000000000003000000180000002c01000000000000030000000400000038010000000000000200000010000000580100000000",
    "000001000000200000007801000000000000010000002000000098010000000000000900000004000000bc010000000000000c0000002c",
    "000000cc030000000000000500000008000000f40300000000000001000000100000000404000000000000010000001800000000000000",
    "020000000300000000000000000000000000ffff0af400010b0000000000000000000000000000000000ffff0af400020c000000000000",
    "00fd0002440000000000000000000000010d0000000000000000000000010000000200000000000000000000000000ffff0af40009fd00",
    "024400000000000000000000000900000000000000000000ffff0a00000000000000000000000000ffff0a0000ff000000000000000000",
    "00ffff0a09000000000000000000000000ffff0a09ffff000000000000000003000000050000000600000007000000080000000c000000",
    "0c00000000000000000000000000ffff0a6000010000000200000000000000000000000000000000000000000000000000000000000000",
    "000000ffff0a6000030000000200000000000000000000000000000000000000000000000000000000000000000000ffff0a6000040100",
    "06000000000001000000010000000000000001000000911f000000000000000000000000ffff0a60000150000600010000000200000002",
    "000000302a0000000000000000000000000000000000000000ffff0a600002bb0106000300000000000000000000000000000001000000",
    "0000000000000000000000000000ffff0a6000013500110003000000010000000200000000000000000000000000000000000000000000",
    "000000ffff0a6000050100840105000000000000000000000000000000000000000000000000000000000000000000ffff0a6000020000",
    "000200000000000000000000000000000000000000000000000000000000000000000000ffff0a600003bb010600050000000000000000",
    "00000000000000000000000000000000000000000000000000ffff0a600004000000020000000000000000000000000000000000000000",
    "0000000000000000000000000000ffff0a600004020006000000000001000000010000000000000001000000921f000000000000000000",
    "000000ffff0a600005000000020000000000000000000000000000000000000000000000000000000000007c0800000000901f7c080100",
    "0000901f156b02000000e914cb3601000000e914156b00000000000000000000ffffc0000201010000004fee50ee000000000000000000",
    "00ffffc0000202",
];

/// The same of version 2.0, which had no nodes.
const GOLDEN_2_0: &[&str] = &[
    "6e6562636c74626c0000020009000000d403000000000000070000000000000014df177b2330ae12b80000000000000003000000040000",
    "00c40000000000000003000000180000000c01000000000000030000000400000018010000000000000200000010000000380100000000",
    "0000010000002000000058010000000000000100000020000000780100000000000009000000040000009c010000000000000c0000002c",
    "000000ac03000000000000050000000800000000000000020000000300000000000000000000000000ffff0af400010b00000000000000",
    "00000000000000000000ffff0af400020c00000000000000fd0002440000000000000000000000010d0000000000000000000000010000",
    "000200000000000000000000000000ffff0af40009fd00024400000000000000000000000900000000000000000000ffff0a0000000000",
    "0000000000000000ffff0a0000ff00000000000000000000ffff0a09000000000000000000000000ffff0a09ffff000000000000000003",
    "000000050000000600000007000000080000000c0000000c00000000000000000000000000ffff0a600001000000020000000000000000",
    "0000000000000000000000000000000000000000000000000000ffff0a6000030000000200000000000000000000000000000000000000",
    "000000000000000000000000000000ffff0a600004010006000000000001000000010000000000000001000000911f0000000000000000",
    "00000000ffff0a60000150000600010000000200000002000000302a0000000000000000000000000000000000000000ffff0a600002bb",
    "01060003000000000000000000000000000000010000000000000000000000000000000000ffff0a600001350011000300000001000000",
    "0200000000000000000000000000000000000000000000000000ffff0a6000050100840105000000000000000000000000000000000000",
    "000000000000000000000000000000ffff0a60000200000002000000000000000000000000000000000000000000000000000000000000",
    "00000000ffff0a600003bb01060005000000000000000000000000000000000000000000000000000000000000000000ffff0a60000400",
    "00000200000000000000000000000000000000000000000000000000000000000000000000ffff0a600004020006000000000001000000",
    "010000000000000001000000921f000000000000000000000000ffff0a6000050000000200000000000000000000000000000000000000",
    "00000000000000000000007c0800000000901f7c0801000000901f156b02000000e914cb3601000000e914156b",
];

#[test]
fn a_table_has_the_bytes_that_its_format_describes() {
    let mut builder = Builder::new();
    for (pod, incarnation) in [("10.244.0.1", 11), ("10.244.0.2", 12), ("fd00:244::1", 13)] {
        builder.pod(address(pod), incarnation);
    }
    builder.clear(address("fd00:244::9"));
    builder.clear(address("10.244.0.9"));
    builder.clear_prefix("10.0.0.0/25".parse().unwrap());
    builder.clear_prefix("10.0.0.128/25".parse().unwrap());
    builder.sealed_prefix("10.9.0.0/16".parse().unwrap());
    let endpoint = |text, port, state| ServiceEndpoint { address: address(text), port, state, is_on_this_node: true };
    let mut service = |text, port, protocol, affinity: Option<u64>, endpoints: &[ServiceEndpoint]| {
        let affinity = affinity.map(Duration::from_secs);
        let port = ServicePort { address: address(text), port, protocol, affinity, this_node_only: false };
        builder.service(port, endpoints.iter().copied());
    };
    let ready = EndpointState::Ready;
    let two = [endpoint("10.244.0.2", 8080, ready), endpoint("10.244.0.1", 8080, ready)];
    service("10.96.0.1", 80, TCP, Some(10_800), &two);
    let other = [endpoint("10.244.0.2", 5353, EndpointState::Terminating), endpoint("fd00:244::1", 5353, ready)];
    service("10.96.0.1", 53, UDP, None, &other);
    service("10.96.0.2", 443, TCP, None, &[endpoint("192.0.2.1", 6443, ready)]);
    service("10.96.0.3", 443, TCP, None, &[]);
    service("10.96.0.5", 1, SCTP, None, &[endpoint("10.244.0.77", 1, ready)]);
    builder.pod_prefix("10.244.0.0/16".parse().unwrap());
    let list = builder.endpoints([endpoint("10.244.0.1", 0, ready), endpoint("10.244.0.9", 0, ready)]);
    for (port, target) in [(1, 8081), (2, 8082)] {
        let address = address("10.96.0.4");
        let port = ServicePort { address, port, protocol: TCP, affinity: None, this_node_only: false };
        builder.service_port(port, [(list, target)]);
    }
    builder.node(address("192.0.2.1"));
    builder.end(address("10.244.0.2"), End { node: address("192.0.2.2"), port: 61_007, other: Some(61_008) });
    builder.identity(address("10.244.0.2"), Some(21));
    builder.identity(address("fd00:244::1"), None);
    builder.programs(address("10.244.0.1"), [b"in".to_vec(), b"out".to_vec()]);
    let hex: String = builder.finish(7).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN.concat());
}

#[test]
fn tables_of_earlier_releases_are_read() {
    let end = End { node: address("192.0.2.2"), port: 61_007, other: Some(61_008) };
    for (golden, nodes, end) in [(GOLDEN_2_0, 0, None), (GOLDEN_2_2, 1, Some(end))] {
        let hex = golden.concat();
        let digits = |n: usize| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len() / 2).map(digits).collect();
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        assert_eq!(table.find(address("10.244.0.1"), 80, TCP), Found::Enrolled { incarnation: 11 });
        assert_eq!(table.find(address("192.0.2.1"), 80, TCP), Found::Unknown);
        assert_eq!((table.nodes().count(), table.end(address("10.244.0.2"))), (nodes, end));
        assert_eq!(table.labels(address("10.244.0.1")), Labels::Unknown);
        assert_eq!(table.programs(address("10.244.0.1")), None);
    }
}

#[test]
fn a_table_with_other_policies_has_the_bytes_of_one_built_with_them() {
    let build = |numbers: [Option<u32>; 2], programs: &[(&str, &[u8])]| {
        let mut builder = Builder::new();
        for (pod, incarnation) in (1..=40).map(|n: u64| (IpAddr::from([10, 0, 0, n as u8]), n)) {
            builder.pod(pod, incarnation);
            builder.identity(pod, Some(5));
        }
        builder.pod(address("10.0.1.1"), 77);
        builder.clear(address("10.0.1.2"));
        builder.identity(address("10.0.0.1"), numbers[0]);
        builder.identity(address("10.0.0.40"), numbers[1]);
        for (own, ingress) in programs {
            builder.programs(address(own), [ingress.to_vec(), b"out".to_vec()]);
        }
        builder.finish(9)
    };
    let before = build([Some(5), Some(6)], &[("10.0.0.1", b"one"), ("10.0.0.2", b"two")]);
    let layout = Layout::read(&before).unwrap();
    let table = layout.table(&before);
    let numbers = [("10.0.0.1", None), ("10.0.0.40", Some(8))].map(|(pod, number)| (address(pod), number));
    let programs = || [(address("10.0.0.3"), [b"longer than before".to_vec(), b"out".to_vec()])];
    let after = table.with_policies(9, &numbers, programs()).unwrap();
    assert!(after == build([None, Some(8)], &[("10.0.0.3", b"longer than before")]));
    let next = table.with_policies(10, &[], programs()).unwrap();
    assert_eq!(version_of(&next), Some(10));
    for unknown in ["10.0.1.1", "10.0.1.2", "10.0.9.9"] {
        assert_eq!(table.with_policies(9, &[(address(unknown), Some(1))], programs()), None, "{unknown} has no number");
    }
    let hex = GOLDEN_2_2.concat();
    let digits = |n: usize| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap();
    let old: Vec<u8> = (0..hex.len() / 2).map(digits).collect();
    assert_eq!(Layout::read(&old).unwrap().table(&old).with_policies(9, &[], programs()), None, "another release");
    // Damage never makes a panic.
    for at in 0..before.len() {
        let mut damaged = before.clone();
        damaged[at] ^= 0xff;
        if let Ok(layout) = Layout::read(&damaged) {
            let _ = layout.table(&damaged).with_policies(9, &numbers, programs());
        }
    }
}

#[test]
fn labels_and_programs_are_found_by_address() {
    let mut builder = Builder::new();
    for (pod, incarnation) in [("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)] {
        builder.pod(address(pod), incarnation);
    }
    builder.identity(address("10.0.0.1"), Some(7));
    builder.identity(address("10.0.0.2"), None);
    builder.identity(address("10.0.0.1"), Some(8));
    builder.identity(address("10.0.9.9"), Some(9));
    builder.programs(address("10.0.0.3"), [b"in".to_vec(), b"egress".to_vec()]);
    builder.programs(address("10.0.0.1"), [Vec::new(), b"out".to_vec()]);
    let bytes = builder.finish(1);
    let layout = Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    let labels = |text| table.labels(address(text));
    assert_eq!(
        ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.9.9"].map(labels),
        [Labels::Set(8), Labels::NoPod, Labels::Unknown, Labels::Unknown]
    );
    let programs = |text| table.programs(address(text));
    assert_eq!(programs("10.0.0.1"), Some([&b""[..], b"out"]));
    assert_eq!(programs("10.0.0.3"), Some([&b"in"[..], b"egress"]));
    assert_eq!(programs("10.0.0.2"), None);
}

#[test]
fn a_node_port_is_one_of_every_node_and_leads_past_the_tunnel_only_without_an_enrolled_endpoint() {
    let mut builder = Builder::new();
    let (enrolled, clear) = (address("10.0.0.1"), address("10.0.0.2"));
    builder.pod(enrolled, 11);
    builder.clear(clear);
    for node in ["192.0.2.1", "192.0.2.2", "fd00:2::1"] {
        builder.node(address(node));
        builder.clear(address(node));
    }
    let endpoint = |address| ServiceEndpoint { address, port: 0, state: EndpointState::Ready, is_on_this_node: false };
    let lists = [vec![enrolled, clear], vec![clear], vec![]]
        .map(|all| builder.endpoints(all.into_iter().map(endpoint).collect::<Vec<_>>()));
    for (list, port) in lists.into_iter().zip([30_001, 30_002, 30_003]) {
        let of = |text: &str, port| ServicePort {
            address: address(text),
            port,
            protocol: TCP,
            affinity: None,
            this_node_only: false,
        };
        builder.service_port(of("10.96.0.1", port), [(list, 8080)]);
        builder.node_port(of("10.96.0.1", port), [(list, 8080)]);
        builder.outer_port(of("198.51.100.1", port), [(list, 8080)]);
    }
    let (bytes, mixed) = builder.finish_with_mixed(7);
    let layout = Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    let counts = |text: &str, port| match table.find(address(text), port, TCP) {
        Found::Service(service) => (service.ready, service.clear),
        other => panic!("{text}:{port} is {other:?}"),
    };
    assert_eq!(counts("10.96.0.1", 30_001), (1, 1));
    for outer in ["192.0.2.1", "192.0.2.2", "198.51.100.1"] {
        assert_eq!((counts(outer, 30_001), counts(outer, 30_002)), ((1, 0), (0, 1)));
        assert_eq!(table.find(address(outer), 30_003, TCP), Found::NoEndpoint);
    }
    // The Service has no address of the other family.
    assert_eq!(table.find(address("fd00:2::1"), 30_001, TCP), Found::Clear);
    assert_eq!(table.find(address("192.0.2.1"), 22, TCP), Found::Clear);
    assert_eq!(table.find(address("192.0.2.3"), 30_001, TCP), Found::Unknown, "no node");
    assert_eq!(table.find(address("198.51.100.1"), 22, TCP), Found::Unknown);
    assert_eq!(mixed.len(), 1, "kube-proxy's choice counts for the ClusterIP only");
}

#[test]
fn a_table_of_a_later_minor_version_has_longer_records_and_more_sections() {
    let mut builder = Builder::new();
    builder.pod(address("10.0.0.1"), 11);
    builder.pod(address("10.0.0.2"), 12);
    let old = builder.finish(7);
    let layout = Layout::read(&old).unwrap();
    // Two pods of 24 bytes each become two of 32, and the file ends with a section that this release does not know.
    let pods = u64::from_le_bytes(old[56..64].try_into().unwrap()) as usize;
    let mut new = old.clone();
    let at = new.len() as u64;
    for pod in 0..2 {
        let start = pods + pod * 24;
        new.extend([&old[start..start + 24], &[0xff; 8]].concat());
    }
    new[56..64].copy_from_slice(&at.to_le_bytes());
    new[68..72].copy_from_slice(&32_u32.to_le_bytes());
    new[12] += 1;
    let len = new.len() as u64;
    new[16..24].copy_from_slice(&len.to_le_bytes());
    let longer = Layout::read(&new).unwrap();
    for last in 0..4 {
        let address = address(&format!("10.0.0.{last}"));
        assert_eq!(longer.table(&new).find(address, 80, TCP), layout.table(&old).find(address, 80, TCP));
    }
}

#[test]
fn the_tag_of_an_endpoint_is_the_same_in_every_table() {
    let pods: Vec<IpAddr> = (1..=250).map(|n| IpAddr::from([10, 0, 0, n])).collect();
    let port =
        ServicePort { address: address("10.96.0.1"), port: 80, protocol: TCP, affinity: None, this_node_only: false };
    let tags = |pods: &[IpAddr], version| {
        let mut builder = Builder::new();
        pods.iter().for_each(|pod| builder.pod(*pod, version));
        let (state, is_on_this_node) = (EndpointState::Ready, false);
        builder.service(
            port,
            pods.iter().map(|pod| ServiceEndpoint { address: *pod, port: 8080, state, is_on_this_node }),
        );
        let bytes = builder.finish(version);
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        let Found::Service(service) = table.find(port.address, port.port, port.protocol) else { panic!("a Service") };
        let endpoints = (0..service.ready).map(|n| table.endpoint(service.id, n).unwrap().address);
        endpoints.zip(table.tags(service.id)).collect::<BTreeMap<_, _>>()
    };
    let first = tags(&pods, 1);
    assert_eq!(first.values().collect::<BTreeSet<_>>().len(), pods.len(), "some of 250 have the same hash");
    assert_eq!(tags(&pods, 2), first);
    let fewer = tags(&pods[..200], 3);
    let changed = fewer.iter().filter(|(pod, tag)| first[*pod] != **tag).count();
    assert!(changed <= 2, "{changed} changed because others are gone");
}

#[test]
fn thousands_of_addresses_are_found_and_their_neighbours_are_not() {
    let mut builder = Builder::new();
    let number = |n: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(0x0af4_0000 + n));
    for n in (0..20_000).step_by(2) {
        builder.pod(number(n), u64::from(n) + 1);
        builder.clear(number(30_000 + n));
    }
    let bytes = builder.finish(3);
    let layout = Layout::read(&bytes).unwrap();
    for n in 0..60_000 {
        let expected = match n {
            0..20_000 if n % 2 == 0 => Found::Enrolled { incarnation: u64::from(n) + 1 },
            30_000..50_000 if n % 2 == 0 => Found::Clear,
            _ => Found::Unknown,
        };
        assert_eq!(layout.table(&bytes).find(number(n), 80, TCP), expected, "{n}");
    }
    assert_eq!(layout.table(&bytes).counts(), [10_000, 10_000, 0, 0]);
}

#[test]
fn a_prefix_of_ipv6_does_not_mean_addresses_of_ipv4() {
    let mut builder = Builder::new();
    builder.clear_prefix("::/0".parse().unwrap());
    let bytes = builder.finish(1);
    let layout = Layout::read(&bytes).unwrap();
    let found = |text| layout.table(&bytes).find(address(text), 80, TCP);
    assert_eq!(
        ["fd00::1", "::1", "10.0.0.1", "255.255.255.255"].map(found),
        [Found::Clear, Found::Clear, Found::Unknown, Found::Unknown]
    );
}

#[test]
fn the_product_of_ports_and_endpoints_is_never_written_out() {
    const PORTS: u16 = 1_000;
    const PODS: u16 = 1_000;
    let mut builder = Builder::new();
    let pod = |n: u16| IpAddr::from([10, 0, (n >> 8) as u8, n as u8]);
    (0..PODS).for_each(|n| builder.pod(pod(n), 1));
    for service in 1..=60 {
        let address = IpAddr::from([10, 96, 0, service]);
        let list = builder.endpoints((0..PODS).map(|n| ServiceEndpoint {
            address: pod(n),
            port: 0,
            state: EndpointState::Ready,
            is_on_this_node: false,
        }));
        for port in 1..=PORTS {
            let key = ServicePort { address, port, protocol: TCP, affinity: None, this_node_only: false };
            // Each leads to another port of the pods.
            builder.service_port(key, [(list, 10_000 + port)]);
        }
    }
    let bytes = builder.finish(1);
    assert!(bytes.len() < 5 << 20, "{} bytes", bytes.len());
    let layout = Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    for (port, n) in [(1, 0), (77, 500), (PORTS, u32::from(PODS) - 1)] {
        let Found::Service(service) = table.find(address("10.96.0.60"), port, TCP) else { panic!("a Service") };
        assert_eq!((service.ready, service.clear), (u32::from(PODS), 0));
        let endpoint = table.endpoint(service.id, n).unwrap();
        assert_eq!(endpoint.port, 10_000 + port);
        assert!(table.serves(service.id, endpoint.address, endpoint.port));
        assert!(!table.serves(service.id, endpoint.address, endpoint.port + 1));
    }
    // Whoever lists it has a bound, too.
    let listed: usize = contents::Contents::of(&table).services.iter().map(|service| service.endpoints.len()).sum();
    assert_eq!(listed, 1 << 20);
}

#[test]
fn a_service_with_different_ports_behind_one_name_lists_each_of_them() {
    let mut builder = Builder::new();
    let ends = ["10.0.0.1", "10.0.0.2"].map(address);
    ends.iter().for_each(|pod| builder.pod(*pod, 1));
    let lists = ends.map(|address| {
        let (state, is_on_this_node) = (EndpointState::Ready, false);
        builder.endpoints([ServiceEndpoint { address, port: 0, state, is_on_this_node }])
    });
    let port =
        ServicePort { address: address("10.96.0.1"), port: 80, protocol: TCP, affinity: None, this_node_only: false };
    builder.service_port(port, lists.into_iter().zip([8080, 9090]));
    let bytes = builder.finish(1);
    let layout = Layout::read(&bytes).unwrap();
    let table = layout.table(&bytes);
    let Found::Service(service) = table.find(port.address, port.port, TCP) else { panic!("a Service") };
    let found: BTreeSet<_> =
        (0..2).map(|n| table.endpoint(service.id, n).unwrap()).map(|at| (at.address, at.port)).collect();
    assert_eq!(found, ends.into_iter().zip([8080, 9090]).collect());
    assert!(table.serves(service.id, ends[0], 8080) && !table.serves(service.id, ends[0], 9090));
}
