//! `nebula-cert verify`: verifies certificates; prints nothing if all are valid.

use std::thread::Builder;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nebula_cert::{CaPool, Certificate, Error, UnixTime};

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
    let faults = faults(&pool, &certificates, now.as_secs() as i64);
    if !faults.is_empty() {
        bail!(faults.join("\n"));
    }
    Ok(())
}

/// Lists what is wrong, in the order of the file. A long file is split among all processors.
fn faults(pool: &CaPool, certificates: &[Certificate], at: UnixTime) -> Vec<String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let share = certificates.len().div_ceil(processors).max(WORTH_A_THREAD);
    let check = |part: &[Certificate]| part.iter().filter_map(|certificate| fault(pool, certificate, at)).collect();
    std::thread::scope(|scope| {
        let (own, others) = certificates.split_at(share.min(certificates.len()));
        let threads: Vec<_> = others
            .chunks(share)
            .map(|part| (part, Builder::new().spawn_scoped(scope, move || check(part)).ok()))
            .collect();
        let mut faults: Vec<String> = check(own);
        for (part, thread) in threads {
            // If a thread could not be started or panicked, do its share here.
            faults.extend(thread.and_then(|thread| thread.join().ok()).unwrap_or_else(|| check(part)));
        }
        faults
    })
}

fn fault(pool: &CaPool, certificate: &Certificate, at: UnixTime) -> Option<String> {
    let error = pool.verify(certificate.clone(), at).err()?;
    let detail = match error {
        Error::UnknownCa { issuer, .. } => format!("issuer {issuer}"),
        _ => format!("fingerprint {}", certificate.fingerprint()),
    };
    let (version, name) = (certificate.version(), certificate.name().escape_debug());
    Some(format!("error while verifying certificate {version} {name} with {detail}: {error}"))
}

// Minimum number of certificates per thread: starting a thread takes about as long as verifying one signature.
const WORTH_A_THREAD: usize = 32;
