//! `listen.*`: the underlay socket.

use nebula_core::config::RecvErrorPolicy;
use nebula_core::io::SocketOptions;

use super::Refused;
use super::section::Section;

/// `listen.*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// Address or name to bind.
    pub host: String,
    /// Port; 0: the system chooses one.
    pub port: u16,
    /// Receive buffer in bytes; `None`: the program's choice, 0: the system's.
    pub read_buffer: Option<usize>,
    /// Send buffer.
    pub write_buffer: Option<usize>,
    /// Firewall mark of sent packets, for policy routing; 0: none.
    pub so_mark: u32,
    /// UDP GSO and GRO.
    pub offloads: bool,
    /// Whether to answer datagrams of unknown tunnels with `recv_error`.
    pub send_recv_error: RecvErrorPolicy,
    /// Whether to believe such answers.
    pub accept_recv_error: RecvErrorPolicy,
}

impl Listen {
    pub(super) fn read(section: &Section<'_>) -> Result<Self, Refused> {
        let port = match section.get("listen.port") {
            None => 0,
            Some(value) => value.int().and_then(|port| u16::try_from(port).ok()).ok_or_else(|| {
                Refused::new("Failed to open udp listener", "listen.port must be a number from 0 to 65535")
            })?,
        };
        let host =
            section.string("listen.host").filter(|host| !host.is_empty()).unwrap_or_else(|| "0.0.0.0".to_owned());
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host).to_owned();
        let buffer = |path: &str| section.int(path, 0..=i64::from(i32::MAX)).and_then(|n| usize::try_from(n).ok());
        Ok(Self {
            host,
            port,
            read_buffer: buffer("listen.read_buffer"),
            write_buffer: buffer("listen.write_buffer"),
            so_mark: section
                .int("listen.so_mark", 0..=i64::from(u32::MAX))
                .and_then(|n| u32::try_from(n).ok())
                .unwrap_or(0),
            offloads: section.boolean("listen.udp_offloads", true),
            send_recv_error: recv_error(section, "listen.send_recv_error"),
            accept_recv_error: recv_error(section, "listen.accept_recv_error"),
        })
    }

    /// Settings of the sockets that are bound to this address.
    #[must_use]
    pub fn socket_options(&self) -> SocketOptions {
        let mut options = SocketOptions::default();
        options.read_buffer = self.read_buffer.unwrap_or(options.read_buffer);
        options.write_buffer = self.write_buffer.unwrap_or(options.write_buffer);
        options.offloads = self.offloads;
        options
    }
}

fn recv_error(section: &Section<'_>, path: &str) -> RecvErrorPolicy {
    let Some(value) = section.get(path) else { return RecvErrorPolicy::Always };
    match value.text().as_deref() {
        Some("private") => RecvErrorPolicy::Private,
        Some("never") => RecvErrorPolicy::Never,
        _ if value.boolean() == Some(false) => RecvErrorPolicy::Never,
        Some("always") => RecvErrorPolicy::Always,
        _ if value.boolean() == Some(true) => RecvErrorPolicy::Always,
        _ => {
            section.warn(path, format!("{path} must be always, never or private; using always"));
            RecvErrorPolicy::Always
        }
    }
}
