//! Hosts whose program is replaced by another process, which goes on by hand-over.

use std::sync::Arc;
use std::time::Instant;

use super::host::Host;
use super::{HostId, SimNet};
use crate::config::Cipher;
use crate::handover::{DecodeError, State};
use crate::lighthouse::LocalAddress;
use crate::{Engine, Forwarder, Node, Seed, WallClock};

impl SimNet {
    /// What the program of the host would hand over, without keys; it goes on.
    #[must_use]
    pub fn offer(&self, host: HostId) -> Vec<u8> {
        encode(&self.hosts[host].engine.node.offer(self.now))
    }

    /// Ends the program of the host, and returns what it hands over. Until [`SimNet::take_over`], datagrams to the host
    /// are lost.
    pub fn hand_over(&mut self, host: HostId) -> Vec<u8> {
        let (now, wall) = (self.now, self.wall());
        self.hosts.change(host, |host| host.hand_over(now, wall))
    }

    /// Starts the host's next program with the configuration for the next start and with what another one handed over.
    ///
    /// # Errors
    /// Returns an error, and starts nothing, if that cannot be read.
    pub fn take_over(&mut self, host: HostId, document: &[u8]) -> Result<(), DecodeError> {
        let state = State::decode(document)?;
        let (now, wall, seed) = (self.now, self.wall(), self.random_seed());
        self.hosts.change(host, |host| host.take_over(now, wall, seed, state));
        self.dispatch(host);
        Ok(())
    }

    /// Replaces the program of the host by the next one at once.
    pub fn upgrade(&mut self, host: HostId) {
        let document = self.hand_over(host);
        self.take_over(host, &document).expect("what we wrote reads");
    }

    /// The forwarding plane of the host's present program.
    #[must_use]
    pub fn forwarder(&self, host: HostId) -> Arc<Forwarder> {
        Arc::clone(self.hosts[host].engine.forwarder())
    }

    /// The keys with which a host opens at present: those with which its peers seal.
    #[must_use]
    pub fn opening_keys(&self, host: HostId) -> Vec<(Cipher, [u8; 32])> {
        self.hosts[host].engine.node.opening_keys()
    }
}

impl Host {
    fn hand_over(&mut self, now: Instant, wall: WallClock) -> Vec<u8> {
        let clock = WallClock { at: now, unix: wall.unix_at(now) };
        let nobody = Engine::unchecked(self.start_config().clone(), clock, Seed::predictable([0; 32]));
        self.is_up = false;
        encode(&std::mem::replace(&mut self.engine, nobody).hand_over(now))
    }

    fn take_over(&mut self, now: Instant, wall: WallClock, seed: Seed, state: State) {
        let clock = WallClock { at: now, unix: wall.unix_at(now) };
        self.engine = Engine::unchecked(self.start_config().clone(), clock, seed);
        self.is_up = true;
        let addresses = self.endpoints().map(|at| LocalAddress { address: at.ip(), interface: "eth0".to_owned() });
        let addresses = addresses.collect();
        self.control(now, |node| {
            node.import(now, state);
            node.set_local_addresses(addresses);
        });
    }
}

impl Node {
    fn opening_keys(&self) -> Vec<(Cipher, [u8; 32])> {
        let tunnels = self.forwarder().tunnels();
        let indexes = self.tunnels().into_iter().map(|tunnel| tunnel.local_index);
        let openings = indexes.filter_map(|index| Some(tunnels.by_index(index)?.session.to_opening()));
        openings.map(|opening| (opening.cipher, *opening.key)).collect()
    }
}

fn encode(state: &State) -> Vec<u8> {
    state.encode().expect("few peers and flows").to_vec()
}
