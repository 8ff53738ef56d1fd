//! Hosts of one network by name: their overlay addresses, and configurations with one lighthouse.

use std::net::IpAddr;

use super::World;

/// The members of a network, in the order of their addresses; the lighthouse is called `l`.
#[derive(Debug, Clone, Copy)]
pub struct Mesh<'a> {
    pub members: &'a [&'a str],
    /// The third octet is 0, the fourth the member's position.
    pub network: [u8; 2],
    /// `lighthouse.interval`, in seconds.
    pub interval: u32,
}

impl Mesh<'_> {
    /// The overlay address of a member.
    pub fn overlay(&self, name: &str) -> IpAddr {
        let number = self.members.iter().position(|member| *member == name).expect("a member") + 1;
        IpAddr::from([self.network[0], self.network[1], 0, u8::try_from(number).expect("a small number")])
    }

    /// Writes `NAME.yml`, where everything is allowed. `lighthouse` is the underlay address of `l`; `more` are further
    /// sections.
    pub fn configure(&self, world: &World, name: &str, lighthouse: IpAddr, more: &str) {
        let (dir, is_lighthouse, address) = (world.dir().display(), name == "l", self.overlay("l"));
        let known = if is_lighthouse { String::new() } else { format!("\"{address}\": [\"{lighthouse}:4242\"]") };
        let hosts = if is_lighthouse { String::new() } else { address.to_string() };
        let interval = self.interval;
        let text = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key}}
static_host_map: {{{known}}}
lighthouse: {{am_lighthouse: {is_lighthouse}, interval: {interval}, hosts: [{hosts}]}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0, mtu: 1300}}
firewall:
  outbound: [{{port: any, proto: any, host: any}}]
  inbound: [{{port: any, proto: any, host: any}}]
{more}"
        );
        world.write(&format!("{name}.yml"), &text);
    }
}
