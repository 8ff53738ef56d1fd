//! Why a flow between two pods does not pass: each link of the chain between them, up to the first that is broken.
//!
//! | file | what |
//! | --- | --- |
//! | `question.rs` | the flow, as it is written on the command line |
//! | `facts.rs` | what the API server and the agents of both nodes know |
//! | `chain.rs` | what that says of each link |
//! | `causes.rs` | the causes, and what to do |
//! | `report.rs` | the answer, for people and for programs |

mod causes;
mod chain;
mod facts;
mod question;
mod report;
#[cfg(test)]
mod tests;

pub use causes::{AtEnd, Cause, End, Link};
pub use facts::{Facts, InTable, Listener, PodEnd, PodTunnel, PolicySays, Service, Target, Way, Workload};
pub(crate) use question::destination;
pub use question::{Asked, BadQuestion, Kind, Question};
pub use report::{Document, Report, Standing, Step};
