//! `tun.routes` and `tun.unsafe_routes`: routes through the tunnel beyond the node's own networks, with gateways, MTU
//! and metric.

use std::net::IpAddr;
use std::num::NonZeroU32;

use ipnet::IpNet;
use nebula_core::config::{Gateway, SubnetRoute};

use super::section::Section;
use super::{Invalid, Refused, Value};
use crate::go::netip;

/// Routes of the overlay device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routes {
    /// Parts of the node's own networks with an MTU of their own.
    pub own: Vec<OwnRoute>,
    /// Networks behind other nodes.
    pub subnets: Vec<UnsafeRoute>,
}

/// An entry of `tun.routes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnRoute {
    /// Part of one of the node's own networks.
    pub network: IpNet,
    /// MTU towards it.
    pub mtu: u32,
}

/// An entry of `tun.unsafe_routes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsafeRoute {
    /// Destinations and gateways.
    pub route: SubnetRoute,
    /// MTU towards them; `None`: the tunnel's.
    pub mtu: Option<u32>,
    /// Metric of the kernel's route; 0: the kernel's default.
    pub metric: u32,
    /// Whether to install a route in the kernel.
    pub install: bool,
}

impl Routes {
    /// `networks` are the node's own networks as far as they are known yet.
    pub(super) fn read(section: &Section<'_>, networks: &[IpNet]) -> Result<Self, Refused> {
        let own = entries(section, OWN)?;
        let own = own.iter().map(|entry| own_route(entry, networks)).collect::<Result<_, _>>()?;
        let subnets = entries(section, UNSAFE)?;
        let subnets = subnets.iter().map(|entry| unsafe_route(entry, networks)).collect::<Result<_, _>>()?;
        Ok(Self { own, subnets })
    }

    /// The routes as the forwarding plane needs them.
    #[must_use]
    pub fn subnet_routes(&self) -> Vec<SubnetRoute> {
        self.subnets.iter().map(|unsafe_route| unsafe_route.route.clone()).collect()
    }

    /// The largest MTU of all routes; 0 if none has one.
    #[must_use]
    pub fn largest_mtu(&self) -> u32 {
        let subnets = self.subnets.iter().filter_map(|route| route.mtu);
        self.own.iter().map(|route| route.mtu).chain(subnets).max().unwrap_or(0)
    }
}

const OWN: &str = "tun.routes";
const UNSAFE: &str = "tun.unsafe_routes";
const MIN_MTU: i64 = 500;
const MAX_NUMBER: i64 = i32::MAX as i64;

/// One map of a list; messages count entries from 1, as Go's do.
struct Entry<'a> {
    number: usize,
    list: &'static str,
    map: &'a Value,
}

fn refused(list: &'static str, cause: String) -> Refused {
    let message = if list == OWN { "Could not parse tun.routes" } else { "Could not parse tun.unsafe_routes" };
    Refused::new(message, cause)
}

fn entries<'a>(section: &Section<'a>, list: &'static str) -> Result<Vec<Entry<'a>>, Refused> {
    let items = match section.get(list) {
        None => return Ok(Vec::new()),
        Some(Value::List(items)) => items,
        Some(_) => return Err(refused(list, format!("{list} is not an array"))),
    };
    let entry = |(index, map): (usize, &'a Value)| match map {
        Value::Map(_) => Ok(Entry { number: index + 1, list, map }),
        _ => Err(refused(list, format!("entry {} in {list} is invalid", index + 1))),
    };
    items.iter().enumerate().map(entry).collect()
}

impl<'a> Entry<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.at(key)
    }
    fn fail(&self, key: &str, what: impl std::fmt::Display) -> Refused {
        refused(self.list, format!("entry {}.{key} in {} {what}", self.number, self.list))
    }
    fn integer(&self, key: &str, value: &Value) -> Result<i64, Refused> {
        value.int().ok_or_else(|| self.fail(key, format_args!("is not an integer: {}", shown(value))))
    }
    fn mtu(&self) -> Result<Option<u32>, Refused> {
        let Some(value) = self.get("mtu") else { return Ok(None) };
        match self.integer("mtu", value)? {
            // In Go, 0 means that the route has no MTU of its own.
            0 if self.list == UNSAFE => Ok(None),
            mtu if mtu < MIN_MTU => Err(self.fail("mtu", format_args!("is below {MIN_MTU}: {mtu}"))),
            mtu => u32::try_from(mtu).map(Some).map_err(|_| self.fail("mtu", format_args!("is too large: {mtu}"))),
        }
    }
    fn network(&self) -> Result<IpNet, Refused> {
        let value = self.get("route").ok_or_else(|| self.fail("route", "is not present"))?;
        let text = value.text().unwrap_or_default();
        netip::prefix(&text).ok_or_else(|| {
            self.fail("route", format_args!("failed to parse: {text:?} is not a prefix such as 192.168.0.0/16"))
        })
    }
}

fn own_route(entry: &Entry<'_>, networks: &[IpNet]) -> Result<OwnRoute, Refused> {
    let mtu = entry.mtu()?.ok_or_else(|| entry.fail("mtu", "is not present"))?;
    let network = entry.network()?;
    if !networks.is_empty() && !networks.iter().any(|own| own.contains(&network)) {
        let own: Vec<_> = networks.iter().map(ToString::to_string).collect();
        let own = own.join(" ");
        let what = format!("is not contained within the configured vpn networks; route: {network}, networks: [{own}]");
        return Err(entry.fail("route", what));
    }
    Ok(OwnRoute { network, mtu })
}

fn unsafe_route(entry: &Entry<'_>, networks: &[IpNet]) -> Result<UnsafeRoute, Refused> {
    let mtu = entry.mtu()?;
    let metric = match entry.get("metric") {
        None => 0,
        Some(value) => {
            let metric = entry.integer("metric", value)?;
            u32::try_from(metric)
                .ok()
                .filter(|metric| i64::from(*metric) <= MAX_NUMBER)
                .ok_or_else(|| entry.fail("metric", format_args!("is not in range (0-{MAX_NUMBER}) : {metric}")))?
        }
    };
    let gateways = gateways(entry)?;
    let boolean = |key: &str, otherwise: bool| match entry.get(key) {
        None => Ok(otherwise),
        Some(value) => {
            value.boolean().ok_or_else(|| entry.fail(key, format_args!("is not a boolean: {}", shown(value))))
        }
    };
    // Not in Go, which refuses such a route.
    let inside = boolean("inside", false)?;
    // The route of the own network leads to the device already.
    let install = boolean("install", !inside)?;
    let network = entry.network()?;
    if inside {
        let is_part = |own: &IpNet| own.contains(&network) && own.prefix_len() < network.prefix_len();
        if !networks.is_empty() && !networks.iter().any(is_part) {
            let own: Vec<_> = networks.iter().map(ToString::to_string).collect();
            let what = format!(
                "is \"inside\" and no part of the configured vpn networks; route: {network}, networks: [{}]",
                own.join(" ")
            );
            return Err(entry.fail("route", what));
        }
        let route = SubnetRoute::new(network, gateways).inside();
        return Ok(UnsafeRoute { route, mtu, metric, install });
    }
    if let Some(own) = networks.iter().find(|own| own.contains(&network.addr())) {
        let what = format!("is contained within the configured vpn networks; route: {network}, network: {own}");
        return Err(entry.fail("route", what));
    }
    Ok(UnsafeRoute { route: SubnetRoute::new(network, gateways), mtu, metric, install })
}

fn gateways(entry: &Entry<'_>) -> Result<Vec<Gateway>, Refused> {
    match entry.get("via") {
        None => Err(entry.fail("via", "is not present")),
        Some(Value::String(text)) => {
            let address = parse_address(text).map_err(|cause| entry.fail("via", cause))?;
            Ok(vec![Gateway::new(address)])
        }
        Some(Value::List(items)) => {
            items.iter().enumerate().map(|(index, item)| gateway(entry.number, index + 1, item)).collect()
        }
        Some(other) => {
            let found = match other {
                Value::Bool(_) => "bool",
                Value::Int(_) | Value::Uint(_) => "int",
                Value::Float(_) => "float64",
                Value::Mixed(_) => "map[interface {}]interface {}",
                Value::Null | Value::String(_) | Value::List(_) | Value::Map(_) => "map[string]interface {}",
            };
            Err(entry.fail("via", format_args!("is not a string or list of gateways: found {found}")))
        }
    }
}

fn gateway(route: usize, number: usize, item: &Value) -> Result<Gateway, Refused> {
    if !matches!(item, Value::Map(_)) {
        return Err(refused(UNSAFE, format!("entry {number} in {UNSAFE}[{route}].via is invalid")));
    }
    let fail =
        |key: &str, what: String| refused(UNSAFE, format!("entry .{key} in {UNSAFE}[{route}].via[{number}] {what}"));
    let address = match item.at("gateway") {
        None => return Err(fail("gateway", "is not present".to_owned())),
        Some(Value::String(text)) => parse_address(text).map_err(|cause| fail("gateway", cause.to_string()))?,
        Some(_) => return Err(fail("gateway", "is not a string".to_owned())),
    };
    let weight = match item.at("weight") {
        None => NonZeroU32::MIN,
        Some(value) => {
            let weight = value.int().ok_or_else(|| fail("weight", "is not an integer".to_owned()))?;
            let in_range = u32::try_from(weight).ok().filter(|weight| i64::from(*weight) <= MAX_NUMBER);
            in_range
                .and_then(NonZeroU32::new)
                .ok_or_else(|| fail("weight", format!("is not in range (1-{MAX_NUMBER}) : {weight}")))?
        }
    };
    // Not in Go, which ignores it.
    let priority = match item.at("priority") {
        None => 0,
        Some(value) => {
            let priority = value.int().ok_or_else(|| fail("priority", "is not an integer".to_owned()))?;
            let in_range = u32::try_from(priority).ok().filter(|priority| i64::from(*priority) <= MAX_NUMBER);
            in_range.ok_or_else(|| fail("priority", format!("is not in range (0-{MAX_NUMBER}) : {priority}")))?
        }
    };
    Ok(Gateway::new(address).weighing(weight).with_priority(priority))
}

fn parse_address(text: &str) -> Result<IpAddr, Invalid> {
    let address = text.parse::<IpAddr>();
    address
        .map(|address| address.to_canonical())
        .map_err(|_| format!("failed to parse address: {text:?} is not an IP address").into())
}

fn shown(value: &Value) -> String {
    value.text().map_or_else(|| value.kind().to_owned(), |text| format!("{text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Routes, String> {
        let tree = super::super::parse(&format!("tun: {{{text}}}")).unwrap();
        let networks: Vec<IpNet> = ["10.99.0.1/24", "fd99::1/64"].iter().map(|text| text.parse().unwrap()).collect();
        Routes::read(&Section::new(&tree), &networks).map_err(|refused| refused.to_string())
    }

    #[test]
    fn every_form_of_a_gateway_is_read() {
        let routes = read(
            "unsafe_routes: [{route: 192.168.1.0/24, via: 10.99.0.2}, {route: 192.168.2.0/24, mtu: 1000, metric: 7, \
             install: false, via: [{gateway: 10.99.0.2, weight: 10}, {gateway: 10.99.0.3, priority: 20}]}], \
             routes: [{route: 10.99.0.128/25, mtu: 8000}]",
        )
        .unwrap();
        let [plain, weighted] = routes.subnets.as_slice() else { panic!("{routes:?}") };
        assert_eq!((plain.mtu, plain.metric, plain.install), (None, 0, true));
        assert_eq!(plain.route.gateways, [Gateway::new("10.99.0.2".parse().unwrap())]);
        assert_eq!((weighted.mtu, weighted.metric, weighted.install), (Some(1000), 7, false));
        let weights: Vec<_> = weighted.route.gateways.iter().map(|gateway| gateway.weight.get()).collect();
        assert_eq!(weights, [10, 1]);
        let priorities: Vec<_> = weighted.route.gateways.iter().map(|gateway| gateway.priority).collect();
        assert_eq!(priorities, [0, 20]);
        assert_eq!(routes.own, [OwnRoute { network: "10.99.0.128/25".parse().unwrap(), mtu: 8000 }]);
        assert_eq!(routes.largest_mtu(), 8000);
    }

    #[test]
    fn a_part_of_an_own_network_is_a_route_only_where_it_is_said_to_be_inside() {
        let routes = read("unsafe_routes: [{route: 10.99.0.128/25, via: 10.99.0.129, inside: true}]").unwrap();
        let [inside] = routes.subnets.as_slice() else { panic!("{routes:?}") };
        assert!(inside.route.inside && !inside.install, "the network's own route leads to the device already");
        for route in ["10.99.0.0/24", "10.99.0.0/16", "192.168.1.0/24"] {
            let refused =
                read(&format!("unsafe_routes: [{{route: {route}, via: 10.99.0.2, inside: true}}]")).unwrap_err();
            assert!(refused.contains("no part of the configured vpn networks"), "{refused}");
        }
    }

    #[test]
    fn quoted_numbers_are_numbers() {
        let routes =
            read("unsafe_routes: [{route: 1.0.0.0/8, metric: '77', via: [{gateway: 10.99.0.2, weight: '5'}]}]")
                .unwrap();
        assert_eq!((routes.subnets[0].metric, routes.subnets[0].route.gateways[0].weight.get()), (77, 5));
    }

    #[test]
    fn mistakes_are_refused_in_the_words_of_go() {
        for (text, cause) in [
            ("unsafe_routes: 5", "tun.unsafe_routes is not an array"),
            ("unsafe_routes: [5]", "entry 1 in tun.unsafe_routes is invalid"),
            ("unsafe_routes: [{via: 10.99.0.2}]", "entry 1.route in tun.unsafe_routes is not present"),
            ("unsafe_routes: [{route: 1.0.0.0/8}]", "entry 1.via in tun.unsafe_routes is not present"),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: 5}]",
                "entry 1.via in tun.unsafe_routes is not a string or list of gateways: found int",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: x}]",
                "entry 1.via in tun.unsafe_routes failed to parse address: ",
            ),
            ("unsafe_routes: [{route: x, via: 10.99.0.2}]", "entry 1.route in tun.unsafe_routes failed to parse: "),
            ("unsafe_routes: [{route: 1.0.0.0/8, via: [5]}]", "entry 1 in tun.unsafe_routes[1].via is invalid"),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{weight: 1}]}]",
                "entry .gateway in tun.unsafe_routes[1].via[1] is not present",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{gateway: 10.99.0.2}, {gateway: 5}]}]",
                "entry .gateway in tun.unsafe_routes[1].via[2] is not a string",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{gateway: 10.99.0.2, weight: x}]}]",
                "entry .weight in tun.unsafe_routes[1].via[1] is not an integer",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{gateway: 10.99.0.2, weight: 0}]}]",
                "entry .weight in tun.unsafe_routes[1].via[1] is not in range (1-2147483647) : 0",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{gateway: 10.99.0.2, priority: first}]}]",
                "entry .priority in tun.unsafe_routes[1].via[1] is not an integer",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: [{gateway: 10.99.0.2, priority: -1}]}]",
                "entry .priority in tun.unsafe_routes[1].via[1] is not in range (0-2147483647) : -1",
            ),
            (
                "unsafe_routes: [{route: 10.99.0.0/16, via: 10.99.0.2}]",
                "entry 1.route in tun.unsafe_routes is contained within the configured vpn networks; \
                 route: 10.99.0.0/16, network: 10.99.0.1/24",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: 10.99.0.2, mtu: 100}]",
                "entry 1.mtu in tun.unsafe_routes is below 500: 100",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: 10.99.0.2, metric: -1}]",
                "entry 1.metric in tun.unsafe_routes is not in range (0-2147483647) : -1",
            ),
            (
                "unsafe_routes: [{route: 1.0.0.0/8, via: 10.99.0.2, install: maybe}]",
                "entry 1.install in tun.unsafe_routes is not a boolean: ",
            ),
            (
                "unsafe_routes: [{route: 10.99.0.128/25, via: 10.99.0.2, inside: 7x}]",
                "entry 1.inside in tun.unsafe_routes is not a boolean: ",
            ),
            ("routes: 5", "tun.routes is not an array"),
            ("routes: [{route: 10.99.0.0/25}]", "entry 1.mtu in tun.routes is not present"),
            ("routes: [{mtu: 1000}]", "entry 1.route in tun.routes is not present"),
            ("routes: [{mtu: 400, route: 10.99.0.0/25}]", "entry 1.mtu in tun.routes is below 500: 400"),
            ("routes: [{mtu: x, route: 10.99.0.0/25}]", "entry 1.mtu in tun.routes is not an integer: "),
            (
                "routes: [{mtu: 1000, route: 10.99.0.0/16}]",
                "entry 1.route in tun.routes is not contained within the configured vpn networks; \
                 route: 10.99.0.0/16, networks: [10.99.0.1/24 fd99::1/64]",
            ),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(cause), "{text}: {refused}");
        }
    }
}
