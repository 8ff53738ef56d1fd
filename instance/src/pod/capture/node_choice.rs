//! Where the node led connections of a pod to Services before the pod was captured: kube-proxy chose an endpoint, and
//! the node's connection tracking keeps it (ctnetlink). A connection goes on only with that one.

use std::io;
use std::net::{IpAddr, SocketAddr};

use nebula_cni_contract::netlink::{self, attribute, octets, push_attribute};
use nebula_core::FlowKey;
use nebula_core::capture::OpenedBefore;
use nix::libc;
use nix::sys::socket::SockProtocol;

/// Adds the node's choices to connections of a pod, as far as it has made any. To be called in the node's network
/// namespace. Needs CAP_NET_ADMIN.
pub(crate) fn of(flows: Vec<FlowKey>) -> Vec<OpenedBefore> {
    let mut socket = netlink::connect(SockProtocol::NetlinkNetFilter).ok();
    let mut opened = Vec::with_capacity(flows.len());
    for flow in flows {
        let led_to = socket.as_ref().filter(|_| opened.len() < MAX_ASKED).map(|socket| ask(socket, &flow));
        let led_to = led_to.unwrap_or(Ok(None)).unwrap_or_else(|error| {
            // A kernel without it translates nothing.
            tracing::info!(%error, "Cannot ask the node where it led the pod's connections: some of those to Services end");
            socket = None;
            None
        });
        opened.push(OpenedBefore { flow, led_to });
    }
    opened
}

/// The other end of a connection after translation; `None`: the node does not know it, or does not translate it.
fn ask(socket: &std::os::fd::OwnedFd, flow: &FlowKey) -> io::Result<Option<SocketAddr>> {
    let mut request = Vec::new();
    netlink::push_message(&mut request, GET, libc::NLM_F_ACK, 1, &body(flow));
    match netlink::dump(socket, &request) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        answer => Ok(answer?.first().and_then(|reply| sender(reply)).filter(|end| end.ip() != flow.remote)),
    }
}

fn body(flow: &FlowKey) -> Vec<u8> {
    let (family, kinds) = match flow.local {
        IpAddr::V4(_) => (libc::AF_INET, [1, 2]),
        IpAddr::V6(_) => (libc::AF_INET6, [3, 4]),
    };
    let mut addresses = Vec::new();
    for (kind, address) in kinds.into_iter().zip([flow.local, flow.remote]) {
        push_attribute(&mut addresses, kind, &octets(address));
    }
    let mut ports = Vec::new();
    push_attribute(&mut ports, PROTOCOL, &[flow.protocol]);
    push_attribute(&mut ports, SOURCE_PORT, &flow.local_port.to_be_bytes());
    push_attribute(&mut ports, DESTINATION_PORT, &flow.remote_port.to_be_bytes());
    let mut tuple = Vec::new();
    push_attribute(&mut tuple, ADDRESSES | NESTED, &addresses);
    push_attribute(&mut tuple, PORTS | NESTED, &ports);
    // struct nfgenmsg.
    let mut body = vec![family as u8, 0, 0, 0];
    push_attribute(&mut body, ORIGINAL | NESTED, &tuple);
    body
}

/// Who answers, in a message about a connection.
fn sender(message: &[u8]) -> Option<SocketAddr> {
    let reply = attribute(message.get(4..)?, REPLY)?;
    let addresses = attribute(reply, ADDRESSES)?;
    let address = attribute(addresses, 1).or_else(|| attribute(addresses, 3)).and_then(netlink::address)?;
    let port = attribute(attribute(reply, PORTS)?, SOURCE_PORT)?;
    Some(SocketAddr::new(address, u16::from_be_bytes(port.try_into().ok()?)))
}

/// More connections than a pod has to Services.
const MAX_ASKED: usize = 16_384;
/// IPCTNL_MSG_CT_GET of NFNL_SUBSYS_CTNETLINK, and attributes (linux/netfilter/nfnetlink_conntrack.h).
const GET: u16 = 1 << 8 | 1;
const NESTED: u16 = 0x8000;
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const ADDRESSES: u16 = 1;
const PORTS: u16 = 2;
const PROTOCOL: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(local: &str, remote: &str) -> FlowKey {
        let [local, remote]: [SocketAddr; 2] = [local, remote].map(|text| text.parse().unwrap());
        FlowKey {
            local: local.ip(),
            remote: remote.ip(),
            local_port: local.port(),
            remote_port: remote.port(),
            protocol: 6,
            fragment: false,
        }
    }

    #[test]
    fn the_sender_of_answers_is_read_in_both_families_and_nothing_from_a_torn_message() {
        for (client, server) in [("10.0.0.1:4000", "10.0.0.9:80"), ("[fd00::1]:4000", "[fd00::9]:80")] {
            // A question about the way back has the form of an answer.
            let mut message = body(&flow(server, client));
            message[6] = REPLY as u8;
            assert_eq!(sender(&message), Some(server.parse().unwrap()));
            // The last attribute is the port that does not count.
            assert!((0..message.len() - 8).all(|length| sender(&message[..length]).is_none()));
        }
    }

    #[test]
    fn a_flow_that_the_node_does_not_know_was_led_nowhere() {
        let flow = flow("192.0.2.1:4000", "192.0.2.9:80");
        assert_eq!(of(vec![flow]), [OpenedBefore { flow, led_to: None }]);
    }
}
