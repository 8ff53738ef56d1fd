//! `kubectl nebula check`: looks for what is wrong, and says what to do.
//!
//! | file | what |
//! | --- | --- |
//! | `report.rs` | findings by category, and how they are printed |
//! | `before.rs` | whether Nebula can be installed |
//! | `installed.rs` | whether it works |

mod before;
mod installed;
mod report;

pub use self::report::Category;
use self::report::Report;
use crate::cli::{Check, Cli};
use crate::cluster::Cluster;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

pub async fn run(
    cluster: &Cluster,
    cli: &Cli,
    options: &Check,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let mut report = Report::default();
    if options.pre {
        before::look(cluster, &mut report).await;
    } else {
        installed::look(cluster, &cli.place, &mut report).await;
    }
    report.retain(&options.only);
    report.show(printer)
}
