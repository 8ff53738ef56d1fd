//! Whether datagrams of this node reach the instances on other nodes, at the endpoints where the cluster table expects
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::probe::ask;
use super::{MAX_ENDPOINTS, RETRY, SILENT_ROUNDS, TEST_EVERY};
use crate::readiness::{Part, Readiness, Standing};

/// Address of each other node, and UDP ports of some instances there.
pub(crate) type Ports = BTreeMap<IpAddr, BTreeSet<u16>>;

/// Tests the way to some other nodes each time, to all of them in turn, for ever.
pub(crate) async fn watch(readiness: &Readiness, mut known: watch::Receiver<Ports>) {
    let mut tests = Tests::default();
    loop {
        let ports = known.borrow_and_update().clone();
        readiness.set(Part::Nodes, tests.standing(&ports));
        if ports.is_empty() {
            if known.changed().await.is_err() {
                return;
            }
            continue;
        }
        let round = tests.next_round(&ports);
        tests.note(ask_all(round).await);
        readiness.set(Part::Nodes, tests.standing(&ports));
        sleep(if tests.silent.is_empty() { TEST_EVERY } else { RETRY }).await;
    }
}

/// What is known of the way to other nodes.
#[derive(Debug, Default)]
struct Tests {
    /// Those at which an instance answered last.
    answering: BTreeSet<IpAddr>,
    /// Those at which none did, in so many rounds in a row.
    silent: BTreeMap<IpAddr, u32>,
    /// The last one of the round before, apart from silent ones.
    last: Option<IpAddr>,
}

impl Tests {
    /// Nodes to test now: a part of those that were silent, and the next ones of the others.
    fn next_round(&mut self, ports: &Ports) -> Vec<(IpAddr, BTreeSet<u16>)> {
        let is_there = |node: &IpAddr| ports.contains_key(node);
        self.silent.retain(|node, _| is_there(node));
        self.answering.retain(is_there);
        let silent = self.silent.keys().take(MAX_ENDPOINTS / 2).copied();
        let others = ports.keys().copied().filter(|node| !self.silent.contains_key(node));
        let (before, after): (Vec<IpAddr>, Vec<IpAddr>) = others.partition(|node| Some(*node) <= self.last);
        let mut round: Vec<IpAddr> = silent.collect();
        let others: Vec<IpAddr> = after.into_iter().chain(before).take(MAX_ENDPOINTS - round.len()).collect();
        self.last = others.last().copied().or(self.last);
        round.extend(others);
        round.into_iter().filter_map(|node| Some((node, ports.get(&node)?.clone()))).collect()
    }

    fn note(&mut self, answers: Vec<(IpAddr, bool)>) {
        for (node, has_answered) in answers {
            if has_answered {
                self.silent.remove(&node);
                self.answering.insert(node);
            } else {
                *self.silent.entry(node).or_default() += 1;
                self.answering.remove(&node);
            }
        }
    }

    fn standing(&self, ports: &Ports) -> Standing {
        let silent: Vec<String> = self
            .silent
            .iter()
            .filter(|(node, rounds)| **rounds >= SILENT_ROUNDS && ports.contains_key(node))
            .map(|(node, _)| endpoints(*node, ports.get(node)))
            .collect();
        let (answering, failed) = (self.answering.len(), silent.len());
        let named = || {
            let more = failed.saturating_sub(NAMED);
            let some = silent.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
            if more == 0 { some } else { format!("{some}; and {more} more") }
        };
        match (answering, failed) {
            (_, 0) if ports.is_empty() => Standing::good("no captured pod of another node is known, so none is tested"),
            (0, 0) => Standing::good("is tested for the first time"),
            (_, 0) => Standing::good(format!("instances on {answering} of {} other nodes answered", ports.len())),
            // A node that is down is no reason to warn of all others.
            _ if failed < answering => {
                Standing::good(format!("instances on {answering} other nodes answered; not on {failed}: {}", named()))
            }
            _ => Standing::bad(format!(
                "no instance answers datagrams of this node on {failed} of {} other nodes: {}",
                answering + failed,
                named()
            ))
            .advice(
                "pods there are not reached from here; does a firewall or a security group keep UDP on the ports of \
                         instances (\"agent.entry.portRange\", 61000 to 65535) from going between nodes?",
            ),
        }
    }
}

fn endpoints(node: IpAddr, ports: Option<&BTreeSet<u16>>) -> String {
    let ports: Vec<String> = ports.into_iter().flatten().map(u16::to_string).collect();
    format!("{node}, UDP {}", ports.join(", "))
}

/// Whether any of the ports of each node answers.
async fn ask_all(nodes: Vec<(IpAddr, BTreeSet<u16>)>) -> Vec<(IpAddr, bool)> {
    let mut tests = JoinSet::new();
    for (node, ports) in nodes {
        tests.spawn(async move {
            for port in ports {
                if ask(&SocketAddr::new(node, port).to_string()).await.is_ok() {
                    return (node, true);
                }
            }
            (node, false)
        });
    }
    tests.join_all().await
}

/// More silent nodes are only counted.
const NAMED: usize = 4;

#[cfg(test)]
mod tests {
    use tokio::net::UdpSocket;

    use super::super::probe::tests::host;
    use super::*;

    fn node(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    fn ports(nodes: std::ops::RangeInclusive<u8>) -> Ports {
        nodes.map(|n| (node(n), BTreeSet::from([61_000 + u16::from(n)]))).collect()
    }

    #[tokio::test]
    async fn one_instance_that_answers_is_enough_for_its_node() {
        let port = |at: String| at.parse::<SocketAddr>().unwrap().port();
        let good = port(host(|_| {}).await);
        let gone = port(UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string());
        let (here, nowhere) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
        let asked = vec![(here, BTreeSet::from([gone, good])), (nowhere, BTreeSet::from([gone]))];
        let mut answers = ask_all(asked).await;
        answers.sort_unstable();
        assert_eq!(answers, [(here, true), (nowhere, false)]);
    }

    #[test]
    fn all_nodes_are_tested_in_turn_and_silent_ones_more_often() {
        let ports = ports(1..=40);
        let mut tests = Tests::default();
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for _ in 0..10 {
            let round = tests.next_round(&ports);
            assert!(round.len() <= MAX_ENDPOINTS, "{}", round.len());
            round.iter().for_each(|(node, _)| *counts.entry(*node).or_default() += 1);
            tests.note(round.into_iter().map(|(at, _)| (at, at != node(7))).collect());
        }
        assert_eq!((counts.len(), counts[&node(7)]), (40, 10), "{counts:?}");
        assert!(counts.values().all(|count| *count >= 3), "{counts:?}");
    }

    #[test]
    fn silence_of_half_the_nodes_is_told_after_two_rounds_and_names_them() {
        let (all, mut tests) = (ports(1..=3), Tests::default());
        let round = |tests: &mut Tests, good: &[u8]| {
            tests.note((1..=3).map(|n| (node(n), good.contains(&n))).collect());
            tests.standing(&all)
        };
        assert!(round(&mut tests, &[1, 2, 3]).ok);
        assert!(round(&mut tests, &[1]).ok, "after one round");
        let standing = round(&mut tests, &[1]);
        assert!(
            !standing.ok && standing.reason.contains("2 of 3 other nodes: 192.0.2.2, UDP 61002; 192.0.2.3"),
            "{standing:?}"
        );
        assert!(standing.advice.contains("portRange"));
        let standing = round(&mut tests, &[1, 2]);
        assert!(standing.ok && standing.reason.contains("not on 1: 192.0.2.3"), "{standing:?}");
        // A node that is gone from the table is forgotten.
        tests.next_round(&ports(1..=2));
        assert!(!tests.standing(&ports(1..=2)).reason.contains("192.0.2.3"));
        assert!(tests.standing(&Ports::new()).ok && !Part::Nodes.is_required());
    }
}
