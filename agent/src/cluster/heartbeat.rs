//! Which agents are gone: each renews a Lease, and the leader sees which are not renewed any more. Pure: the leader
//! compares what it saw at its own times, since the clocks of nodes differ.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The leases of the agents as the leader saw them, by node.
#[derive(Debug, Default)]
pub struct Heartbeats(BTreeMap<String, Beat>);

#[derive(Debug)]
struct Beat {
    renewed: String,
    since: Instant,
}

impl Heartbeats {
    /// Takes what was listed at `now`: for each node the time of its last renewal, as text. Returns the nodes whose
    /// lease has not been renewed for `grace`. Nodes without a lease never had an agent, or were uninstalled.
    pub fn overdue(&mut self, listed: &BTreeMap<String, String>, now: Instant, grace: Duration) -> Vec<String> {
        self.0.retain(|node, _| listed.contains_key(node));
        for (node, renewed) in listed {
            match self.0.get_mut(node) {
                Some(beat) if beat.renewed == *renewed => {}
                Some(beat) => *beat = Beat { renewed: renewed.clone(), since: now },
                None => {
                    self.0.insert(node.clone(), Beat { renewed: renewed.clone(), since: now });
                }
            }
        }
        let is_overdue = |beat: &Beat| now.saturating_duration_since(beat.since) >= grace;
        self.0.iter().filter(|(_, beat)| is_overdue(beat)).map(|(node, _)| node.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn a_lease_that_is_not_renewed_for_the_grace_period_is_overdue() {
        let (mut beats, start, grace) = (Heartbeats::default(), Instant::now(), Duration::from_secs(60));
        let after = |seconds| start + Duration::from_secs(seconds);
        let listed = |times: &[(&str, &str)]| {
            times.iter().map(|(node, time)| ((*node).to_owned(), (*time).to_owned())).collect::<BTreeMap<_, _>>()
        };
        // A new leader waits for a whole grace period, whatever the times in the leases say.
        assert!(beats.overdue(&listed(&[("a", "1970"), ("b", "2")]), start, grace).is_empty());
        assert!(beats.overdue(&listed(&[("a", "1970"), ("b", "3")]), after(59), grace).is_empty());
        assert_eq!(beats.overdue(&listed(&[("a", "1970"), ("b", "3")]), after(60), grace), ["a"]);
        assert!(beats.overdue(&listed(&[("a", "1971"), ("b", "3")]), after(61), grace).is_empty());
        assert!(beats.overdue(&listed(&[("b", "4")]), after(200), grace).is_empty(), "uninstalled");
    }
}
