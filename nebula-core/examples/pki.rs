//! Makes a CA and the identities of hosts, and writes them where other examples read them:
//!
//! ```sh
//! cargo run --example pki -- /tmp/pki 10.42.0.1/16
//! cargo run --example pki -- . server=10.42.0.1/16 client=10.42.0.2/16
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

#[allow(dead_code, reason = "this example needs no trust pool")]
mod common;

use std::error::Error;
use std::path::Path;

use common::Authority;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (folder, hosts) = (arguments.next(), arguments.collect::<Vec<_>>());
    let Some(folder) = folder.filter(|_| !hosts.is_empty()) else {
        return Err("usage: pki FOLDER [NAME=]ADDRESS/PREFIX...".into());
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;

    let authority = Authority::new("example CA")?;
    std::fs::write(folder.join("ca.crt"), authority.certificate.to_pem())?;
    for host in hosts {
        let (name, address) = host.split_once('=').unwrap_or(("host", &host));
        let identity = authority.identity(name, address)?;
        std::fs::write(folder.join(format!("{name}.crt")), identity.primary().to_pem())?;
        std::fs::write(folder.join(format!("{name}.key")), identity.private_key().to_pem().as_bytes())?;
        println!("wrote ca.crt, {name}.crt and {name}.key to {}", folder.display());
    }
    Ok(())
}
