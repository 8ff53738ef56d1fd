//! Which peer a name stands for where several show it: certificates may have the same name, and names are looked up.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The peers by the names in their certificates, in order of arrival. A name stands for the first of them, and still
/// for [`HELD_FOR`] after its last tunnel ended: who waits for a host to restart does not get its name.
#[derive(Debug, Default)]
pub(super) struct NameHolders {
    by_name: BTreeMap<String, Vec<Holder>>,
    /// Peers without a tunnel, by when the last one ended.
    left: VecDeque<(Instant, String)>,
    /// The last peers that left, with their names as they were: an operator asks by name for hosts that are gone.
    gone: VecDeque<(String, IpAddr)>,
}

#[derive(Debug)]
struct Holder {
    address: IpAddr,
    tunnels: usize,
    left: Option<Instant>,
}

impl Holder {
    fn holds(&self, now: Instant) -> bool {
        self.left.is_none_or(|left| now < left + HELD_FOR)
    }
}

impl NameHolders {
    /// There is one more tunnel with the peer at `address`.
    pub(super) fn arrived(&mut self, now: Instant, name: &str, address: IpAddr) {
        self.forget(now);
        let holders = self.by_name.entry(name.to_ascii_lowercase()).or_default();
        match holders.iter_mut().find(|holder| holder.address == address) {
            Some(holder) => (holder.tunnels, holder.left) = (holder.tunnels + 1, None),
            None => holders.push(Holder { address, tunnels: 1, left: None }),
        }
    }

    /// One tunnel with the peer has ended.
    pub(super) fn left(&mut self, now: Instant, name: &str, address: IpAddr) {
        let name = name.to_ascii_lowercase();
        let mut holders = self.by_name.get_mut(&name).into_iter().flatten();
        if let Some(holder) = holders.find(|holder| holder.address == address) {
            holder.tunnels = holder.tunnels.saturating_sub(1);
            if holder.tunnels == 0 {
                holder.left = Some(now);
                self.left.push_back((now, name.clone()));
                self.gone.retain(|(_, other)| *other != address);
                self.gone.truncate(MAX_GONE - 1);
                self.gone.push_front((name, address));
            }
        }
        self.forget(now);
    }

    /// The peer of this name that was the last to leave.
    pub(super) fn gone(&self, name: &str) -> Option<IpAddr> {
        self.gone.iter().find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, address)| *address)
    }

    /// Whether the name stands for the peer at `address`.
    pub(super) fn holds(&self, now: Instant, name: &str, address: IpAddr) -> bool {
        let holders = self.by_name.get(&name.to_ascii_lowercase());
        holders.and_then(|all| all.iter().find(|one| one.holds(now))).is_some_and(|holder| holder.address == address)
    }

    fn forget(&mut self, now: Instant) {
        while self.left.front().is_some_and(|(left, _)| now >= *left + HELD_FOR) {
            let Some((_, name)) = self.left.pop_front() else { return };
            if let Some(holders) = self.by_name.get_mut(&name) {
                holders.retain(|holder| holder.holds(now));
                if holders.is_empty() {
                    self.by_name.remove(&name);
                }
            }
        }
    }
}

/// A daemon restarts in less; who has moved to another address has its name again soon after.
const HELD_FOR: Duration = Duration::from_secs(30);
const MAX_GONE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 42, 0, last].into()
    }

    fn names() -> (NameHolders, Instant) {
        #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
        let now = Instant::now();
        let mut names = NameHolders::default();
        names.arrived(now, "DB", address(7));
        names.arrived(now, "db", address(66));
        (names, now)
    }

    #[test]
    fn a_name_stands_for_who_came_first_also_after_that_one_shook_hands_again() {
        let (mut names, now) = names();
        let later = now + Duration::from_secs(3600);
        names.arrived(later, "db", address(7));
        names.left(later, "Db", address(7));
        names.arrived(later, "db", address(67));
        assert!(names.holds(later, "dB", address(7)));
        assert!(!names.holds(later, "db", address(66)) && !names.holds(later, "db", address(67)));
        assert!(!names.holds(later, "web", address(7)));
    }

    #[test]
    fn who_restarts_has_its_name_again_and_who_stays_away_leaves_it_to_the_next() {
        let (mut names, now) = names();
        names.left(now, "db", address(7));
        let soon = now + HELD_FOR - Duration::from_millis(1);
        assert!(!names.holds(soon, "db", address(66)), "the name stands for nobody who is there");
        names.arrived(soon, "db", address(7));
        assert!(names.holds(soon, "db", address(7)));
        names.left(soon, "db", address(7));
        let late = soon + HELD_FOR;
        assert!(names.holds(late, "db", address(66)));
        names.arrived(late, "db", address(7));
        assert!(names.holds(late, "db", address(66)) && !names.holds(late, "db", address(7)));
    }

    #[test]
    fn the_last_peers_that_left_are_found_by_name_and_no_more_of_them_than_fit() {
        let (mut names, now) = names();
        assert_eq!(names.gone("db"), None, "it is there");
        names.left(now, "DB", address(7));
        assert_eq!(names.gone("Db"), Some(address(7)));
        names.left(now, "db", address(66));
        assert_eq!(names.gone("db"), Some(address(66)));
        for n in 0..1000_u32 {
            let (name, at) = (format!("host-{n}"), IpAddr::from((0x0a2b_0000 + n).to_be_bytes()));
            names.arrived(now, &name, at);
            names.left(now, &name, at);
        }
        assert_eq!((names.gone.len(), names.gone("db")), (MAX_GONE, None));
        assert!(names.gone("host-999").is_some());
    }

    #[test]
    fn nothing_is_left_of_peers_that_are_gone() {
        let (mut names, now) = names();
        for last in [7, 66] {
            names.left(now, "db", address(last));
        }
        names.left(now, "web", address(9));
        names.arrived(now + HELD_FOR, "x", address(1));
        assert_eq!(names.by_name.keys().collect::<Vec<_>>(), ["x"]);
        assert!(names.left.is_empty());
    }
}
