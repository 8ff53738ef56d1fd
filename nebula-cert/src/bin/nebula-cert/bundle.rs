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
        let (certificates, rest) = self.read_readable()?;
        rest.map(|()| certificates)
    }

    /// Those up to the first that cannot be read, and the outcome for the rest of the file.
    pub(crate) fn read_readable(&self) -> anyhow::Result<(Vec<Certificate>, anyhow::Result<()>)> {
        let text = file::read_or("unable to read cert;", required("path", &self.path)?)?;
        let (certificates, error) = Certificate::readable_from_pem(&text);
        Ok((certificates, error.map_or(Ok(()), Err).context("error while unmarshaling cert")))
    }
}
