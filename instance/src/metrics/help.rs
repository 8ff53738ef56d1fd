//! What each metric says, for the page that Prometheus reads.

/// The text for a metric, by its name without namespace and subsystem.
pub(crate) fn of(name: &str) -> &'static str {
    let known = HELP.iter().find(|(known, _)| *known == name).map(|(_, help)| *help);
    known.or_else(|| of_socket(name)).unwrap_or_default()
}

/// The kernel's figures of UDP socket N, `udp_N_NAME`.
fn of_socket(name: &str) -> Option<&'static str> {
    let (number, figure) = name.strip_prefix("udp_")?.split_once('_')?;
    number.parse::<usize>().ok()?;
    OF_SOCKETS.iter().find(|(known, _)| *known == figure).map(|(_, help)| *help)
}

const OF_SOCKETS: &[(&str, &str)] = &[
    ("rmem_alloc", "Bytes in the receive buffer of this UDP socket."),
    ("rcvbuf", "Size of the receive buffer of this UDP socket, in bytes."),
    ("wmem_alloc", "Bytes in the send buffer of this UDP socket."),
    ("sndbuf", "Size of the send buffer of this UDP socket, in bytes."),
    ("fwd_alloc", "Bytes of memory that the kernel reserved for this UDP socket in advance."),
    ("wmem_queued", "Bytes queued for sending in this UDP socket."),
    ("optmem", "Bytes of memory for options of this UDP socket."),
    ("backlog", "Bytes in the backlog of this UDP socket."),
    ("drops", "Datagrams that the kernel dropped because the receive buffer of this UDP socket was full."),
];

const HELP: &[(&str, &str)] = &[
    ("info", "Version of this program."),
    ("certificate_ttl_seconds", "Seconds until the first certificate of this host expires."),
    (
        "certificate_renewal_failing_seconds",
        "For how long this host has failed to renew its certificate; 0: it has not.",
    ),
    ("config_missing_listeners", "Configured listeners (metrics, DNS, resolver, SSH, control) that cannot listen."),
    ("config_at_next_start", "Settings that a reload changed and that only a start takes over."),
    ("certificate_initiating_version", "Version of the certificate that this host begins handshakes with."),
    ("certificate_max_version", "Highest version among the certificates of this host."),
    ("firewall_rules_hash", "Hash of the firewall rules in force."),
    ("firewall_rules_version", "How often the firewall rules were replaced."),
    ("routines", "Threads that move packets (routines)."),
    (
        "firewall_incoming_dropped_local_addr",
        "Received packets to an address that is not in the certificate of this host.",
    ),
    (
        "firewall_incoming_dropped_remote_addr",
        "Received packets from an address that is not in the certificate of the peer.",
    ),
    ("firewall_incoming_dropped_no_rule", "Received packets that no firewall rule allows."),
    ("firewall_outgoing_dropped_local_addr", "Packets of this host from an address that is not in its certificate."),
    (
        "firewall_outgoing_dropped_remote_addr",
        "Packets of this host to an address that is not in the certificate of the peer.",
    ),
    ("firewall_outgoing_dropped_no_rule", "Packets of this host that no firewall rule allows."),
    ("firewall_conntrack_count", "Flows that connection tracking remembers."),
    ("hostinfo_cached_packets_sent", "Packets that waited for a tunnel and were sent."),
    ("hostinfo_cached_packets_dropped", "Packets that found too many others waiting for the tunnel."),
    ("hostmap_main_hosts", "Overlay addresses with a tunnel."),
    ("hostmap_main_indexes", "Tunnels."),
    ("hostmap_main_remoteIndexes", "Tunnels, by the index of the peer."),
    ("hostmap_main_relayIndexes", "Hops through relays that this host is part of."),
    ("hostmap_pending_hosts", "Handshakes of this host that are under way."),
    ("hostmap_pending_indexes", "Handshakes of this host that are under way, by index."),
    ("handshake_manager_initiated", "Handshakes of this host that ended with a tunnel or without one."),
    ("handshake_manager_timed_out", "Handshakes of this host that ended without a tunnel."),
    ("handshakes", "Time of the last 1028 handshakes of this host, in nanoseconds."),
    ("messages_rx_recv_error", "Received recv_errors: the sender does not know the tunnel."),
    ("messages_rx_handshake_ixpsk0", "Received handshake messages."),
    ("messages_rx_lighthouse", "Received lighthouse messages."),
    ("messages_rx_test_request", "Received test requests."),
    ("messages_rx_test_response", "Received test responses."),
    ("messages_rx_close_tunnel", "Received messages that close a tunnel."),
    ("messages_rx_invalid", "Received datagrams that are shorter than a header and its tag."),
    ("messages_rx_other", "Received relay control messages."),
    ("messages_tx_recv_error", "Sent recv_errors."),
    ("messages_tx_punchy", "Sent datagrams that keep a NAT mapping open."),
    ("messages_tx_holepunch", "Sent datagrams that open a NAT mapping."),
    ("messages_tx_handshake_ixpsk0", "Sent handshake messages."),
    ("messages_tx_lighthouse", "Sent lighthouse messages."),
    ("messages_tx_test_request", "Sent test requests."),
    ("messages_tx_test_response", "Sent test responses."),
    ("messages_tx_close_tunnel", "Sent messages that close a tunnel."),
    ("messages_tx_other", "Sent relay control messages."),
    ("network_packets_lost", "Datagrams of tunnels that never came."),
    ("network_packets_duplicate", "Replayed datagrams."),
    ("network_packets_out_of_window", "Datagrams too old to tell whether they are replays."),
    ("lighthouse_rx_HostQuery", "Received queries for a host."),
    ("lighthouse_tx_HostQuery", "Sent queries for a host."),
    ("lighthouse_rx_HostQueryReply", "Received answers to queries."),
    ("lighthouse_tx_HostQueryReply", "Sent answers to queries."),
    ("lighthouse_rx_HostUpdateNotification", "Received reports of hosts about where they are."),
    ("lighthouse_tx_HostUpdateNotification", "Sent reports about where this host is."),
    ("lighthouse_rx_HostPunchNotification", "Received requests to open a NAT mapping towards a host."),
    ("lighthouse_tx_HostPunchNotification", "Sent requests to open a NAT mapping towards a host."),
    ("lighthouse_rx_HostUpdateNotificationAck", "Received acknowledgements of reports."),
    ("lighthouse_tx_HostUpdateNotificationAck", "Sent acknowledgements of reports."),
    ("lighthouse_rx_other", "Received lighthouse messages of an unknown kind."),
    ("lighthouse_tx_other", "Sent lighthouse messages of an unknown kind."),
    ("packets_in_total", "Overlay packets delivered to the device, before they are joined."),
    ("bytes_in_total", "Bytes of overlay packets delivered to the device."),
    ("packets_out_total", "Overlay packets sealed, after super-packets are cut."),
    ("bytes_out_total", "Bytes of overlay packets sealed."),
    ("datagrams_in_total", "Underlay datagrams received, hole punches included."),
    ("datagram_bytes_in_total", "Bytes of underlay datagrams received."),
    (
        "datagrams_lost_total",
        "Datagrams of tunnels that never came, counted once the replay window has moved past them.",
    ),
    ("hole_punches_in_total", "Received datagrams that only open a NAT mapping."),
    ("handshakes_in_total", "Received handshake messages."),
    ("lighthouse_in_total", "Received lighthouse messages."),
    ("test_requests_in_total", "Received test requests."),
    ("test_replies_in_total", "Received test responses."),
    ("close_tunnel_in_total", "Received messages that close a tunnel."),
    ("control_in_total", "Received relay control messages."),
    ("recv_errors_in_total", "Received recv_errors: the sender does not know the tunnel."),
    ("no_tunnel_total", "Packets of this host that began a handshake because there was no tunnel."),
    ("coalesced_total", "Super-packets delivered to the device in place of several packets."),
    ("rejected_total", "Refused packets that were answered with a reset or an ICMP error."),
    ("relayed_datagrams_total", "Datagrams that this host relayed for others."),
    ("relayed_bytes_total", "Bytes that this host relayed for others."),
    ("lighthouse_query_in_total", "Received queries for a host."),
    ("lighthouse_query_out_total", "Sent queries for a host."),
    ("lighthouse_reply_in_total", "Received answers to queries."),
    ("lighthouse_reply_out_total", "Sent answers to queries."),
    ("lighthouse_update_in_total", "Received reports of hosts about where they are."),
    ("lighthouse_update_out_total", "Sent reports about where this host is."),
    ("lighthouse_punch_in_total", "Received requests to open a NAT mapping towards a host."),
    ("lighthouse_punch_out_total", "Sent requests to open a NAT mapping towards a host."),
    ("lighthouse_ack_in_total", "Received acknowledgements of reports."),
    ("lighthouse_ack_out_total", "Sent acknowledgements of reports."),
    ("lighthouse_other_in_total", "Received lighthouse messages of an unknown kind."),
    ("lighthouse_other_out_total", "Sent lighthouse messages of an unknown kind."),
    ("handshakes_out_total", "Sent handshake messages, repeated ones included."),
    ("lighthouse_out_total", "Sent lighthouse messages."),
    ("test_requests_out_total", "Sent test requests."),
    ("test_replies_out_total", "Sent test responses."),
    ("close_tunnel_out_total", "Sent messages that close a tunnel."),
    ("control_out_total", "Sent relay control messages."),
    ("recv_errors_out_total", "Sent recv_errors."),
    ("frames_out_total", "Messages of this host that went through a relay."),
    ("keepalives_out_total", "Sent datagrams that keep a NAT mapping open."),
    ("hole_punches_out_total", "Sent datagrams that open a NAT mapping."),
    ("waiting_out_total", "Packets that waited for a tunnel and were sent."),
    ("translated_flows_total", "Capture: flows to Services whose addresses or ports are translated."),
    ("bypassed_total", "Capture: packets for the primary network."),
    ("looped_back_total", "Capture: packets of this host to itself by way of a Service."),
    ("held_for_directory_total", "Capture: packets kept until more is known about their destination."),
    ("path_probes_out_total", "Test requests that find out how large a packet the path to a peer carries."),
    ("path_probes_answered_total", "Answers to test requests about the size of a path."),
    ("too_big_answered_total", "Packets too large for the path to their peer, whose sender was told."),
    ("segment_size_lowered_total", "Connections whose maximum segment size was lowered when they were opened."),
    ("address_conflicts_total", "Handshakes with an overlay address that a host of another name has."),
    ("lost_no_device_total", "Packets lost because there is no device."),
    ("lost_tun_write_total", "Packets that the device did not take."),
    ("lost_send_full_total", "Datagrams lost because the send buffer was full."),
    ("lost_send_refused_total", "Datagrams that the system refused to send."),
    ("lost_bypass_full_total", "Capture: packets for the primary network lost because a buffer or queue was full."),
    ("lost_bypass_refused_total", "Capture: packets for the primary network that the system refused to send."),
    ("lost_events_total", "Events that nobody read in time, and that are missing in the log."),
    ("half_open_handshakes", "Handshakes that this host answered and whose initiator is not confirmed yet."),
    ("tunnels", "Tunnels, by whether an ML-KEM secret is part of their keys."),
    ("dropped_packets_total", "Dropped packets by direction and reason."),
    ("link_repairs_total", "What somebody else took from the tun device and was put back."),
    ("gateway_up", "Whether this gateway of an unsafe route takes flows."),
    ("gateway_state_seconds", "For how long this gateway of an unsafe route has been in its state."),
    ("gateway_weight", "Weight of this gateway of an unsafe route."),
    ("moved_flows", "Flows that stay at the gateway to which they moved while their own was dead."),
    ("peer_bytes_sent_total", "Bytes of overlay packets sent in the tunnel in use with this peer."),
    ("peer_bytes_received_total", "Bytes of overlay packets delivered from the tunnel in use with this peer."),
    ("peer_messages_sent_total", "Datagrams sent in the tunnel in use with this peer."),
    ("peer_messages_received_total", "Datagrams received in the tunnel in use with this peer, by its counter."),
    ("peer_direct", "Whether this peer is reached directly (1) or through a relay (0)."),
    ("peer_path_mtu_bytes", "The largest overlay packet that is known to reach this peer."),
    ("peers_not_listed", "Peers beyond stats.max_peers, which have no series of their own."),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{GO_COUNTERS, HALF_OPEN, REPAIRS, TUNNELS};

    #[test]
    fn every_counter_has_a_text_and_no_name_has_two() {
        let mut counters = std::collections::BTreeMap::new();
        nebula_core::internals::Counters::default().add_to(&mut counters);
        let own = counters.keys().filter(|name| !name.starts_with("dropped_")).map(|name| format!("{name}_total"));
        let of_go = GO_COUNTERS.iter().map(|(name, _)| name.replace('.', "_"));
        let others = [HALF_OPEN.to_owned(), TUNNELS.to_owned(), format!("{REPAIRS}_total"), "udp_3_drops".to_owned()];
        let silent: Vec<_> = own.chain(of_go).chain(others).filter(|name| of(name).is_empty()).collect();
        assert!(silent.is_empty(), "no text for {silent:?}");
        let mut names: Vec<_> = HELP.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(HELP.iter().chain(OF_SOCKETS).all(|(_, help)| help.ends_with('.') && !help.contains('\n')));
        assert_eq!((of("udp_x_drops"), of("udp_0_other")), ("", ""));
    }
}
