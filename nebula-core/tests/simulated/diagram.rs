//! What a person sees of a failed run.

use std::time::Duration;

use nebula_core::simulator::{Link, SimNet};

#[test]
fn a_diagram_shows_seed_time_direction_kind_index_counter_size_and_fate() {
    let mut net = SimNet::new(4711);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let [a, b] = net.nodes(["alice", "bob"]);
    net.ping(a, b).until_delivered();
    net.cut(a, b);
    let _verdict = net.send_udp(a, b, (1, 2), b"into the void");
    net.inject("192.0.2.66:666".parse().unwrap(), net.underlay(b), b"noise");
    net.kill(b);
    let _verdict = net.send_udp(a, b, (1, 2), b"too late");
    let index = format!("{:08x}", net.tunnels(a)[0].remote_index.0);
    let diagram = net.diagram();
    let lines: Vec<&str> = diagram.lines().collect();
    assert_eq!(lines[0], "seed 4711");
    let expected = [
        ("alice", "bob", "stranger"),
        ("0.000s", "o------------->", "Handshake 00000000 #1, "),
        ("0.005s", "<-------------o", "Handshake "),
        ("0.010s", "o------------->", &format!("Data {index} #3, 76 B, 198.51.100.1:4242 -> 198.51.100.2:4242")),
        ("0.015s", "<-------------o", "#3, 76 B"),
        ("0.020s", "o-------------x", &format!("Data {index} #4, 73 B, 198.51.100.1:4242 -> 198.51.100.2:4242 lost")),
        ("0.020s", "<-------------o", "5 bytes, 5 B, 192.0.2.66:666 -> 198.51.100.2:4242"),
        ("0.020s", "x             |", "nobody there"),
    ];
    assert_eq!(lines.len(), expected.len() + 1, "{diagram}");
    for (line, (time, arrow, what)) in lines[1..].iter().zip(expected) {
        for part in [time, arrow, what] {
            assert!(line.contains(part), "{part:?} is not in {line:?}:\n{diagram}");
        }
    }
}

#[test]
fn a_failed_expectation_prints_the_diagram() {
    let failed = std::panic::catch_unwind(|| {
        let mut net = SimNet::new(12);
        let [a, b] = net.nodes(["a", "b"]);
        net.set_link(Link { loss: 100, ..Link::default() });
        net.control(a, |node, now| node.connect(now, "10.42.0.2".parse().unwrap()));
        net.expect("a tunnel", Duration::from_secs(10), |net| !net.tunnels(b).is_empty());
    });
    let message = *failed.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("a tunnel: not within 10s"), "{message}");
    assert!(message.contains("seed 12") && message.contains("Handshake 00000000 #1"), "{message}");
}

#[test]
fn a_long_diagram_is_cut_to_its_end() {
    let mut net = SimNet::new(13);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).train(400, Duration::from_millis(20));
    let sent = net.flow().count();
    let diagram = net.diagram();
    assert!(diagram.lines().count() < 210);
    assert!(diagram.contains(&format!("({} earlier datagrams left out)", sent - 200)), "{diagram}");
    let last = net.flow().next_back().unwrap();
    assert!(diagram.trim_end().ends_with(&last.to.to_string()), "the end is what matters");
}
