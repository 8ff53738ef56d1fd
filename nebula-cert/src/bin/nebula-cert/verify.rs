//! `nebula-cert verify`: silent if every certificate is good.

use std::time::Duration;

use anyhow::{Context as _, bail};
use nebula_cert::{CaPool, Certificate, Error};

use crate::arguments::required;
use crate::file;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Required: file with one or more CA certificates to trust.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    ca: String,
    /// Required: file with one or more certificates to verify.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "PATH")]
    crt: String,
}

pub(crate) fn run(flags: &Flags, now: Duration) -> anyhow::Result<()> {
    required("ca", &flags.ca)?;
    required("crt", &flags.crt)?;
    file::check_inputs(&[("ca", &flags.ca), ("crt", &flags.crt)])?;
    let pool = CaPool::from_pem(&file::read("ca", &flags.ca)?).context("error while adding ca cert to pool")?;
    let certificates = Certificate::bundle_from_pem(&file::read_or("unable to read crt:", &flags.crt)?)
        .context("error while parsing crt")?;
    let mut faults = Vec::new();
    for certificate in certificates {
        let subject = format!("{} {}", certificate.version(), certificate.name().escape_debug());
        let fingerprint = certificate.fingerprint();
        match pool.verify(certificate, now.as_secs() as i64) {
            Ok(_) => {}
            Err(error @ Error::UnknownCa { issuer, .. }) => {
                faults.push(format!("error while verifying certificate {subject} with issuer {issuer}: {error}"));
            }
            Err(error) => {
                faults.push(format!(
                    "error while verifying certificate {subject} with fingerprint {fingerprint}: {error}"
                ));
            }
        }
    }
    if !faults.is_empty() {
        bail!(faults.join("\n"));
    }
    Ok(())
}
