//! What Go Nebula before 1.11 does with a test request that has a body: it writes the header of its reply over it.

use crate::Engine;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// Turns a datagram of a host with this engine into that of such a peer.
pub(super) fn garble(engine: &Engine, datagram: &mut Vec<u8>) {
    let Ok(header) = Header::parse(datagram) else { return };
    let len = datagram.len().saturating_sub(HEADER_LEN + TAG_LEN);
    if header.kind != MessageType::TestReply || len == 0 {
        return;
    }
    assert!(len <= HEADER_LEN, "this release panics at a body of {len} bytes");
    let tunnels = engine.node.tunnels();
    let index = tunnels.iter().find(|tunnel| tunnel.remote_index.0 == header.index).map(|tunnel| tunnel.local_index);
    let tunnel = index.and_then(|index| engine.forwarder.tunnels().by_index(index)).expect("the tunnel of the reply");
    let head = header.to_bytes();
    let mut body = head[..len].to_vec();
    let tag = tunnel.session.send_key.seal(header.counter, &head, &mut body);
    *datagram = [&head[..], &body, &tag].concat();
}
