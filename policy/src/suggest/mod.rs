//! Makes network policies of what pods were seen to do.
//!
//! | file | what |
//! | --- | --- |
//! | `suggested.rs` | makes policies of flows |
//! | `yaml.rs` | writes these down |

mod suggested;
mod yaml;

use nebula_cni_contract::seen::Seen;
use serde_json::{Value, json};

pub use self::suggested::Suggested;

/// The policies that allow what was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suggestion {
    /// One for each set of pods.
    pub policies: Vec<Suggested>,
    /// How many sets of pods have none, because a selector cannot name as many labels as they have.
    pub without: usize,
}

impl Suggestion {
    /// What was seen, and the policies as the API server takes them.
    #[must_use]
    pub fn document(&self, seen: &Seen) -> Value {
        let objects: Vec<Value> = self.policies.iter().map(Suggested::object).collect();
        json!({"seen": seen, "policies": objects})
    }
}
