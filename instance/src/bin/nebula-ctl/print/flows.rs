//! The answer to `flows`.

use nebula_cni_contract::flow_records::{self, FlowRecords};

/// `now` in milliseconds since 1970.
pub(super) fn flows(answer: &FlowRecords, now: u64) -> String {
    if !answer.is_on && answer.records.is_empty() {
        return "flows are not recorded here: flows.records is false, or the daemon is ending\n".to_owned();
    }
    let mut text = flow_records::table(&answer.records, now);
    if answer.is_cut {
        text += "older ones are left out\n";
    }
    if answer.lost > 0 {
        text += &format!("{} more since the start had to give way (flows.ring)\n", answer.lost);
    }
    text
}
