//! STATUS: tells whether an ADD could succeed. Only problems that make every ADD on this node fail count, because an
//! error here keeps all new pods off the node.

use std::path::Path;

use crate::host::Host;
use crate::primary::network;
use crate::primary::settings::Primary;
use crate::reply::{Error, code};
use crate::request::NetworkConfig;
use crate::settings::Settings;

/// Checks the configuration, the instance binary and the tun driver; of an entry with `primary`, that addresses are
/// free.
///
/// # Errors
/// Returns code 50 with the reason.
pub fn run(config: &NetworkConfig, host: &Host<'_>) -> Result<(), Error> {
    let unavailable = |e: Error| Error { code: code::NOT_AVAILABLE, ..e };
    if let Some(primary) = Primary::read(config).map_err(unavailable)? {
        network::status(config, &primary)?;
        if !primary.has_tunnels {
            return Ok(());
        }
    }
    let settings = Settings::read(config).map_err(unavailable)?;
    settings.instance_binary(host.plugin_dir.as_deref()).map_err(unavailable)?;
    if !Path::new(TUN).exists() {
        return Err(Error::new(code::NOT_AVAILABLE, format!("{TUN} is missing"))
            .details("load the kernel module \"tun\", or give the container that runs the runtime this device"));
    }
    Ok(())
}

const TUN: &str = "/dev/net/tun";
