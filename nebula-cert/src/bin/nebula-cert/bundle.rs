//! `-path`: the input file of the modes that only show certificates.

use anyhow::Context as _;
use nebula_cert::Certificate;

use crate::arguments::required;
use crate::file;

#[derive(clap::Args)]
pub(crate) struct Bundle {
    /// Required: file with one or more certificates.
    #[arg(long, default_value = "", hide_default_value = true)]
    path: String,
}

impl Bundle {
    pub(crate) fn read(&self) -> anyhow::Result<Vec<Certificate>> {
        let text = file::read_or("unable to read cert;", required("path", &self.path)?)?;
        Certificate::bundle_from_pem(&text).context("error while unmarshaling cert")
    }
}
