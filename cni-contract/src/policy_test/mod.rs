//! What network policies say of a flow, without a packet: `policy test` of agents and of kubectl's plugin.
//!
//! | file | what |
//! | --- | --- |
//! | `ends.rs` | the flow, as it is written on the command line |
//! | `answer.rs` | what the programs of one node say |
//! | `tested.rs` | what the agents of both nodes say together |

mod answer;
mod ends;
mod tested;
#[cfg(test)]
mod tests;

pub use answer::{Answer, Explained, Outcome, Said};
pub use ends::{BadEnd, Destination, End, question};
pub use tested::{Document, OfNode, Tested};
