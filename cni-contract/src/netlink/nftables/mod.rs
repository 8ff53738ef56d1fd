//! The few nf_tables messages that our tables need, sent as atomic transactions.

mod attribute;
mod chain;
mod endpoint_map;
mod interval_set;
mod listing;
mod rule;
mod set;
mod table;
mod transaction;

pub use chain::{Chain, Hook};
pub use endpoint_map::{EndpointMap, MapEntry, SLOTS};
pub use interval_set::{Interval, IntervalSet};
pub(crate) use listing::fuzz;
pub use listing::{
    Existing, ExistingSet, chain, chains, chains_on_link, contains, counts, generation, has_no_tables, sets,
    table_handle, tables, tables_if_any,
};
pub use rule::{Field, Header, Is, Match, Rule, Verdict};
pub use set::{AddressSet, Set};
pub use table::{Family, Table, remove};
pub use transaction::Transaction;
