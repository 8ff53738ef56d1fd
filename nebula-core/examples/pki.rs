//! Makes a CA and the identity of one host, and writes them where other examples read them:
//!
//! ```sh
//! cargo run --example pki -- /tmp/pki 10.42.0.1/16
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

#[allow(dead_code, reason = "this example needs no trust pool")]
mod common;

use std::error::Error;
use std::path::Path;

use common::Authority;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(folder), Some(address)) = (arguments.next(), arguments.next()) else {
        return Err("usage: pki FOLDER ADDRESS/PREFIX".into());
    };
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;

    let authority = Authority::new("example CA")?;
    let identity = authority.identity("host", &address)?;
    std::fs::write(folder.join("ca.crt"), authority.certificate.to_pem())?;
    std::fs::write(folder.join("host.crt"), identity.primary().to_pem())?;
    std::fs::write(folder.join("host.key"), identity.private_key().to_pem().as_bytes())?;
    println!("wrote ca.crt, host.crt and host.key to {}", folder.display());
    Ok(())
}
