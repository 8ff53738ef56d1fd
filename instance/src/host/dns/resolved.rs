//! Tells systemd-resolved of the host's resolver. What it is told belongs to the overlay device and ends with it,
//! also after `kill -9`.

use super::command::{Error, run};
use super::registration::Registration;

/// Tells systemd-resolved.
pub(super) fn register(registration: &Registration) -> Result<(), Error> {
    let Registration { device, server, domain, zones } = registration;
    let zones: Vec<_> = zones.iter().map(|zone| format!("~{zone}")).collect();
    let zones = zones.iter().map(String::as_str);
    let domains: Vec<_> = ["domain", device, domain].into_iter().chain(zones).collect();
    resolvectl(&["dns", device, &server.to_string()])?;
    resolvectl(&domains)?;
    // Other names keep their servers.
    resolvectl(&["default-route", device, "false"])
}

/// For a resolver that ends while the device stays.
pub(super) fn revert(device: &str) -> Result<(), Error> {
    resolvectl(&["revert", device])
}

fn resolvectl(arguments: &[&str]) -> Result<(), Error> {
    run("resolvectl", arguments).map(drop)
}
