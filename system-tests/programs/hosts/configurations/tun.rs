//! `tun`: Go's `-test` does not check it, so our program reports as a remark what would stop a start.

use super::bench::{Case, good, remarked};

pub(super) const CASES: &[Case] = &[
    good(
        "tun",
        "tun: {disabled: false, dev: nebula1, mtu: 1300, tx_queue: 500, drop_local_broadcast: false, \
         drop_multicast: false}",
    ),
    good("tun disabled", "tun: {disabled: true}"),
    remarked("tun disabled as a word", "tun: {disabled: off-ish}", "tun.disabled"),
    remarked("tun as a scalar", "tun: nebula1", "tun"),
    remarked("device name too long", "tun: {dev: abcdefghijklmnopqrst}", "tun.dev"),
    remarked("device as a list", "tun: {dev: [a]}", "tun.dev"),
    remarked("mtu as a word", "tun: {mtu: large}", "tun.mtu"),
    good("path MTU discovery", "tun: {path_mtu_discovery: true}"),
    good("kept tunnels", "tunnels: {keep: [10.42.0.9], keep_groups: [database]}"),
    good("mtu quoted", "tun: {mtu: '1400'}"),
    remarked("tx_queue as a word", "tun: {tx_queue: long}", "tun.tx_queue"),
    good("routes", "tun: {routes: [{mtu: 8800, route: 10.42.0.0/24}]}"),
    good("routes empty", "tun: {routes: [], unsafe_routes: []}"),
    remarked("routes as a map", "tun: {routes: {mtu: 8800, route: 10.42.0.0/24}}", "tun.routes is not an array"),
    remarked("route without mtu", "tun: {routes: [{route: 10.42.0.0/24}]}", "entry 1.mtu in tun.routes is not present"),
    remarked("route with a small mtu", "tun: {routes: [{mtu: 400, route: 10.42.0.0/24}]}", "tun.routes is below 500"),
    remarked("route outside our networks", "tun: {routes: [{mtu: 1400, route: 10.99.0.0/24}]}", "tun.routes"),
    good(
        "unsafe route",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: 10.42.0.9, mtu: 1300, metric: 100, install: \
         true}]}",
    ),
    good(
        "unsafe route by weight",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: [{gateway: 10.42.0.9, weight: 10}, {gateway: 10.42.0.10}]}]}",
    ),
    good(
        "unsafe route with a quoted metric",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: 10.42.0.9, metric: '77'}]}",
    ),
    remarked(
        "unsafe route without via",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24}]}",
        "entry 1.via in tun.unsafe_routes is not present",
    ),
    remarked(
        "unsafe route inside our networks",
        "tun: {unsafe_routes: [{route: 10.42.1.0/24, via: 10.42.0.9}]}",
        "tun.unsafe_routes",
    ),
    remarked("unsafe route as a scalar", "tun: {unsafe_routes: 192.168.1.0/24}", "tun.unsafe_routes"),
    remarked(
        "unsafe route with a bad metric",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: 10.42.0.9, metric: -1}]}",
        "tun.unsafe_routes",
    ),
    remarked(
        "unsafe route with a bad install",
        "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: 10.42.0.9, install: perhaps}]}",
        "tun.unsafe_routes",
    ),
    good("system routes", "tun: {use_system_route_table: true, use_system_route_table_buffer_size: 262144}"),
    remarked("system routes as a word", "tun: {use_system_route_table: sometimes}", "tun.use_system_route_table"),
    good(
        "keys of other platforms",
        "tun: {network_category: private, windows_bypass_wdf: true}\nlisten: \
         {rebind_on_network_change: true, windows_bypass_wdf: true}",
    ),
];
