//! Who hears of a change of the trust: which holders of certificates follow it, and when the others asked last. It is
//! in memory only: whoever follows the service asks again within a minute of its start.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use nebula_cert::{Fingerprint, UnixTime, issuance::MAX_WAIT_SECONDS};
use serde::{Deserialize, Serialize};

use crate::{address::Subject, issuer::Issuer, refusal::Refusal, store::IssuedRecord};

/// All who said who they are when they asked.
pub(crate) struct Followers {
    since: UnixTime,
    /// By [`Subject::identity`].
    heard: Mutex<HashMap<String, Heard>>,
}

/// The questions of one holder.
struct Heard {
    last: UnixTime,
    /// Whether the last one waits for the next change.
    waits: bool,
    /// Seconds between the last two that were apart.
    every: Option<i64>,
}

/// Holders of valid certificates that do not hear of a change at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unaware {
    /// Who, those that hear of it last first.
    pub holders: Vec<ListedHolder>,
    /// How many more there are.
    pub more: usize,
    /// How many holders there are in all.
    pub of: usize,
    /// When this service began to listen.
    pub since: UnixTime,
    /// Whether replicas may know of others.
    pub is_partial: bool,
}

/// A holder of a certificate as listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedHolder {
    /// Name of the certificate.
    pub name: String,
    /// Who holds it.
    pub subject: String,
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// When it asked whom to trust; `None`: it has not since [`Unaware::since`], or did not say who it is.
    pub last_asked: Option<UnixTime>,
    /// When it hears of the change at the latest, if it is not away.
    pub hears_by: UnixTime,
    /// How it hears of it.
    pub hears: Hears,
}

/// How a holder hears of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hears {
    /// It asks again, as it does regularly.
    WhenItAsks,
    /// It renews its certificate.
    WhenItRenews,
    /// Never: it is late with both. Its own certificate ends.
    Never,
}

impl Followers {
    /// Nobody was heard before `now`.
    pub(crate) fn new(now: UnixTime) -> Self {
        Self { since: now, heard: Mutex::default() }
    }

    /// Notes that the holder with this [`Subject::identity`] asks; `waits` says whether its request stays open.
    pub(crate) fn asks(&self, id: &str, waits: bool, now: UnixTime) {
        let mut all = self.heard();
        if all.len() >= MOST && !all.contains_key(id) {
            all.retain(|_, heard| heard.last >= now - FORGOTTEN_AFTER);
        }
        let first = Heard { last: now, waits, every: None };
        let heard = all.entry(id.to_owned()).or_insert(first);
        let apart = now.saturating_sub(heard.last);
        if apart >= APART {
            heard.every = Some(apart);
        }
        (heard.last, heard.waits) = (now, waits);
    }

    /// The holders of valid certificates but for these that do not follow the trust at `now`.
    pub(crate) fn unaware(
        &self,
        issuer: &Issuer,
        except: &HashSet<Fingerprint>,
        now: UnixTime,
    ) -> Result<Unaware, Refusal> {
        let mut newest: HashMap<String, Certified> = HashMap::new();
        issuer.each_valid(now, |fingerprint, issued| {
            if except.contains(&fingerprint) {
                return;
            }
            let certified = Certified::of(issued);
            let id = certified.subject.identity();
            if newest.get(&id).is_none_or(|known| known.issued <= certified.issued) {
                newest.insert(id, certified);
            }
        })?;
        let (of, heard) = (newest.len(), self.heard());
        let listed = |(id, certified): (String, Certified)| certified.listed(heard.get(&id), now);
        let mut holders: Vec<ListedHolder> = newest.into_iter().filter_map(listed).collect();
        holders.sort_by(|a, b| (b.hears_by, &a.name).cmp(&(a.hears_by, &b.name)));
        let more = holders.len().saturating_sub(MOST_LISTED);
        holders.truncate(MOST_LISTED);
        Ok(Unaware { holders, more, of, since: self.since, is_partial: issuer.store.is_shared() })
    }

    fn heard(&self) -> MutexGuard<'_, HashMap<String, Heard>> {
        // Each entry is whole after a panic elsewhere.
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What counts of a certificate: records with their PEM are ten times as large.
struct Certified {
    name: String,
    subject: Subject,
    networks: Vec<IpNet>,
    issued: UnixTime,
    not_after: UnixTime,
}

impl Certified {
    fn of(issued: IssuedRecord) -> Self {
        let IssuedRecord { name, subject, networks, issued, not_after, .. } = issued;
        Self { name, subject, networks, issued, not_after }
    }

    /// `None`: it follows the trust.
    fn listed(self, heard: Option<&Heard>, now: UnixTime) -> Option<ListedHolder> {
        if heard.is_some_and(|heard| heard.waits && heard.last >= now - BACK_WITHIN) {
            return None;
        }
        let next = heard.filter(|heard| !heard.waits).and_then(|heard| Some(heard.last + heard.every?));
        // When `nebula-enrol -renew` has a renewal for due; others are earlier.
        let renewal = self.issued + (self.not_after - self.issued) / 3 * 2;
        let expected = [(next, Hears::WhenItAsks), (Some(renewal), Hears::WhenItRenews)];
        let expected = expected.into_iter().filter_map(|(at, hears)| Some((at.filter(|at| *at >= now)?, hears)));
        let (hears_by, hears) = expected.min_by_key(|(at, _)| *at).unwrap_or((self.not_after, Hears::Never));
        let Self { name, subject, networks, .. } = self;
        let (subject, last_asked) = (subject.to_string(), heard.map(|heard| heard.last));
        Some(ListedHolder { name, subject, networks, last_asked, hears_by, hears })
    }
}

/// Questions of one run of a program are not apart.
const APART: i64 = 60;
/// Whoever follows the trust asks again within a long poll, and a while for a connection that broke.
const BACK_WITHIN: i64 = MAX_WAIT_SECONDS.cast_signed() + 20;
/// Beyond this many holders, those that were away for long are forgotten.
const MOST: usize = 100_000;
const FORGOTTEN_AFTER: i64 = 86_400;
/// They fit into an answer of the control socket.
const MOST_LISTED: usize = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    const EDGE: &str = "host edge";

    fn certified(issued: UnixTime, not_after: UnixTime) -> Certified {
        let subject = Subject::Host { name: "edge".to_owned() };
        Certified { name: "edge".to_owned(), subject, networks: Vec::new(), issued, not_after }
    }

    /// When a holder of a certificate of 0 to 9,000 hears of a change at `now`, and how.
    fn hears(followers: &Followers, now: UnixTime) -> Option<(UnixTime, Hears)> {
        let listed = certified(0, 9_000).listed(followers.heard().get(EDGE), now);
        listed.map(|listed| (listed.hears_by, listed.hears))
    }

    #[test]
    fn whoever_waits_hears_at_once_and_others_when_they_ask_again_or_renew() {
        let followers = Followers::new(0);
        assert_eq!(hears(&followers, 10), Some((6_000, Hears::WhenItRenews)), "it never asked");
        followers.asks(EDGE, true, 100);
        assert_eq!(hears(&followers, 170), None, "its request is open, or comes back");
        assert_eq!(hears(&followers, 171), Some((6_000, Hears::WhenItRenews)), "it is away");
        // A timer asks twice in one run, and an hour later.
        followers.asks(EDGE, false, 200);
        followers.asks(EDGE, false, 3_800);
        followers.asks(EDGE, false, 3_802);
        assert_eq!(hears(&followers, 3_810), Some((6_000, Hears::WhenItRenews)), "that is before its next question");
        followers.asks(EDGE, false, 4_100);
        assert_eq!(hears(&followers, 4_110), Some((4_398, Hears::WhenItAsks)));
        assert_eq!(hears(&followers, 5_000), Some((6_000, Hears::WhenItRenews)), "it did not ask when it should have");
        assert_eq!(hears(&followers, 7_000), Some((9_000, Hears::Never)));
    }
}
