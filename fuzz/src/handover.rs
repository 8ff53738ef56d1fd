//! Hand-over documents: read, and taken over by a small node.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nebula_core::firewall::Rule;
use nebula_core::handover::State;
use nebula_core::simulator::{HostSpec, SimNet};
use nebula_core::{Config, Engine, Seed, WallClock};

/// The configuration of the first host of the network in which the documents of the corpus were made, so that their
/// certificates are trusted.
fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let mut net = SimNet::new(7);
        let host = net.add(HostSpec::new("a"));
        let mut config = Config::new(net.identity(host).clone(), net.authority().trust());
        config.listen_port = 4242;
        config.firewall.inbound = vec![Rule::any()];
        config.firewall.outbound = vec![Rule::any()];
        config.path_mtu = Some(1300);
        config
    })
}

/// A document that reads is the same after it is written again. The node that takes it over survives, forgets what it
/// inherited, and hands over what reads again.
pub fn handover(data: &[u8]) {
    let Ok(state) = State::decode(data) else { return };
    let written = state.encode().expect("what was read has room");
    let again = State::decode(&written).expect("what we wrote reads").encode().expect("the same");
    assert_eq!(*written, *again);

    #[allow(clippy::disallowed_methods, reason = "a first instant has to come from somewhere")]
    let start = Instant::now();
    let clock = WallClock { at: start, unix: Duration::from_secs(1_800_000_002) };
    let seed = Seed::predictable([7; 32]);
    let mut engine = Engine::take_over(config().clone(), clock, seed, state).expect("a valid configuration");
    let from = SocketAddr::from(([198, 51, 100, 2], 4242));
    for millis in [0, 5, 10, 1000, 16_000, 61_000, 62_000] {
        let now = start + Duration::from_millis(millis);
        let _output = engine.timeout(now);
        // Datagrams for whatever index the input begins with.
        for chunk in data.chunks(64).take(4) {
            let _output = engine.receive(now, from, &mut chunk.to_vec());
        }
    }
    let end = start + Duration::from_secs(63);
    let _output = engine.timeout(end);
    assert_eq!(engine.node().table_sizes().inherited, 0);
    let last = engine.hand_over(end).encode().expect("a small node");
    assert!(State::decode(&last).is_ok());
}
