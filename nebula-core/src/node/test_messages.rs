//! Test requests and their replies: hands each to the part that answers it, or that asked.

use std::time::Instant;

use super::Node;
use crate::Origin;
use crate::tunnel::Tunnel;
use crate::wire::challenge::ChallengeReply;
use crate::wire::size_probe::SizeProbe;
use crate::wire::test_body::{TestReply, TestRequest};

impl Node {
    pub(super) fn handle_test_request(&mut self, now: Instant, tunnel: &Tunnel, from: Origin, body: &[u8]) {
        self.tunnels.note_test(tunnel.local_index);
        match TestRequest::read(body) {
            TestRequest::Path(probe) if self.config.measure_paths => {
                self.paths(now).answer_probe(tunnel, from, probe);
                let load = self.paths(now).load_before(tunnel, from, probe);
                self.note_carried(now, tunnel, load);
                self.note_gateway_by(tunnel, from);
            }
            TestRequest::Challenge => {
                self.paths(now).note_challenge(tunnel, from);
                self.paths(now).answer_test(tunnel, from, body);
            }
            TestRequest::Size => {
                self.paths(now).examine_with_peer(tunnel);
                self.paths(now).answer_test(tunnel, from, &SizeProbe::reply(body));
            }
            TestRequest::Plain | TestRequest::Path(_) => self.paths(now).answer_test(tunnel, from, body),
        }
    }

    pub(super) fn handle_test_reply(&mut self, now: Instant, tunnel: &Tunnel, from: Origin, body: &[u8]) {
        self.tunnels.note_answer(tunnel.local_index);
        match (TestReply::read(body), from) {
            (TestReply::Challenge(ChallengeReply::Returned(challenge)), Origin::Direct(at)) => {
                self.paths(now).handle_challenge_reply(tunnel, at, challenge);
            }
            (TestReply::Challenge(ChallengeReply::Garbled), Origin::Direct(at)) => {
                self.validate_by_call(now, tunnel, at);
            }
            // What came through a relay says nothing about where the peer is.
            (TestReply::Plain | TestReply::Challenge(_), _) => self.note_sign_of_life(now, tunnel, from),
            (TestReply::Size(reply), _) => {
                self.note_sign_of_life(now, tunnel, from);
                self.paths(now).handle_size_reply(tunnel, from, reply);
            }
            (TestReply::Relay(reply), _) => {
                if !self.note_relay_answer(now, tunnel, from, reply.number) {
                    self.note_gateway_by(tunnel, from);
                }
            }
            (TestReply::Path(reply), _) => {
                let load = self.paths(now).handle_measured(tunnel, from, reply);
                self.note_carried(now, tunnel, load);
                self.note_gateway_by(tunnel, from);
            }
        }
    }

    /// A reply without a number of its own: it may answer any request.
    fn note_sign_of_life(&mut self, now: Instant, tunnel: &Tunnel, from: Origin) {
        self.note_relay_alive(now, tunnel, from);
        self.paths(now).handle_test_reply(tunnel, from);
    }
}
