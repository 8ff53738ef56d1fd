//! Models of what lanes share, run in every interleaving (loom). `.ci/loom` runs them.

mod flows;
mod replay_window;
mod tunnels;

use std::sync::Arc;

use nebula_cert::VerifiedCertificate;

use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::Negotiated;
use crate::tunnel::cipher::Cipher;
use crate::tunnel::{SessionKeys, Tunnel};

/// Runs `model` in every interleaving of its threads with at most `switches` preemptions: known bugs of such code show
/// with two, and each further one multiplies the number of interleavings.
pub(crate) fn check(switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}

/// A tunnel to `peer`.
fn tunnel(local_index: LocalIndex, peer: VerifiedCertificate) -> Arc<Tunnel> {
    let done = Negotiated {
        local_index,
        remote_index: RemoteIndex(9),
        peer,
        keys: SessionKeys { cipher: Cipher::Aes256Gcm, send: [1; 32], receive: [2; 32] },
        initiator: true,
        own_version: nebula_cert::Version::V2,
        peer_time: 0,
    };
    Arc::new(Tunnel::new(done, None))
}
