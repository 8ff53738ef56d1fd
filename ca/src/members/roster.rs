//! The members and their last changes in memory, and answers about them. No I/O.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    net::IpAddr,
    ops::Bound,
    sync::Arc,
};

use nebula_cert::{
    UnixTime,
    directory::{Member, PAGE_BYTES},
    hex,
};

use crate::store::{KEPT_CHANGES, MemberChange, Position};

/// All members at one position of the log.
pub(crate) struct Roster {
    epoch: String,
    at: u64,
    members: BTreeMap<Arc<str>, Entry>,
    /// UIDs of the last changes, oldest first; the last one has the number `at`.
    log: VecDeque<Arc<str>>,
    /// Number of the last change that is news.
    last_news: u64,
}

struct Entry {
    /// As it is sent: an answer is made by concatenation.
    json: Box<str>,
    addresses: Box<[IpAddr]>,
    until: UnixTime,
}

/// What a caller asks.
#[derive(Debug, Default, Clone)]
pub(crate) struct Question {
    /// The version that it has.
    pub(crate) since: Option<String>,
    /// UID after which its page begins.
    pub(crate) from: Option<String>,
}

/// A change does not follow the last one.
#[derive(Debug)]
pub(crate) struct Gap;

impl Roster {
    pub(crate) fn new(position: &Position, members: Vec<Member>) -> Self {
        let members = members.into_iter().map(|member| (Arc::from(member.uid.as_str()), Entry::new(&member))).collect();
        Self { epoch: position.epoch.clone(), at: position.at, members, log: VecDeque::new(), last_news: position.at }
    }

    /// Notes changes up to its position that are already in the members; their numbers follow each other.
    pub(crate) fn remember(&mut self, changes: impl Iterator<Item = MemberChange>) {
        for change in changes {
            let uid = self.uid(&change.uid);
            self.log.push_back(uid);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Number of the last change.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Applies the next change; returns whether it is news. That a certificate was renewed is none: it wakes nobody,
    /// and goes with the next answer.
    pub(crate) fn apply(&mut self, change: MemberChange) -> Result<bool, Gap> {
        if change.at != self.at + 1 {
            return Err(Gap);
        }
        let uid = self.uid(&change.uid);
        let is_news = match change.member {
            Some(member) => {
                let entry = Entry::new(&member);
                let before = self.members.insert(Arc::clone(&uid), entry);
                before.is_none_or(|before| *before.addresses != *member.addresses)
            }
            None => self.members.remove(&uid).is_some(),
        };
        self.at = change.at;
        self.log.push_back(uid);
        if self.log.len() as u64 > KEPT_CHANGES {
            self.log.pop_front();
        }
        if is_news {
            self.last_news = self.at;
        }
        Ok(is_news)
    }

    /// At most `limit` members whose certificates have expired.
    pub(crate) fn expired(&self, now: UnixTime, limit: usize) -> Vec<String> {
        let over = self.members.iter().filter(|(_, entry)| entry.until < now);
        over.map(|(uid, _)| uid.to_string()).take(limit).collect()
    }

    /// At most `limit` members that are not as here in `members`.
    pub(crate) fn differing(&self, members: &[Member], limit: usize) -> Vec<String> {
        let theirs: HashMap<&str, &Member> = members.iter().map(|member| (member.uid.as_str(), member)).collect();
        let missing = self.members.keys().filter(|uid| !theirs.contains_key(&***uid)).map(|uid| uid.to_string());
        let is_same =
            |member: &Member, entry: &Entry| entry.until == member.until && *entry.addresses == *member.addresses;
        let other = members
            .iter()
            .filter(|member| self.members.get(member.uid.as_str()).is_none_or(|entry| !is_same(member, entry)));
        missing.chain(other.map(|member| member.uid.clone())).take(limit).collect()
    }

    /// The answer; `None` if there is no news and the caller has not waited.
    pub(crate) fn answer(&self, question: &Question, has_waited: bool) -> Option<String> {
        let since = question.since.as_ref().filter(|_| question.from.is_none()).and_then(|known| self.number(known));
        let oldest = self.at - self.log.len() as u64;
        match since {
            // Another replica is ahead of this one, for a moment. If not, the ledger was put back to an earlier state.
            Some(since) if since > self.at => has_waited.then(|| self.page(None)),
            Some(since) if since >= oldest => (has_waited || self.last_news > since).then(|| self.delta(since)),
            _ => Some(self.page(question.from.as_deref())),
        }
    }

    /// What changed after number `since`, or the first part of it, in which case the version says how far it goes.
    fn delta(&self, since: u64) -> String {
        let known = usize::try_from(self.at - since).unwrap_or(usize::MAX).min(self.log.len());
        let (mut pods, mut gone, mut at) = (String::new(), String::new(), since);
        let mut told = HashSet::new();
        for uid in self.log.range(self.log.len() - known..) {
            if pods.len() + gone.len() >= PAGE_BYTES {
                break;
            }
            at += 1;
            // Once, as it is now.
            if told.insert(uid) {
                match self.members.get(uid) {
                    Some(entry) => push(&mut pods, &entry.json),
                    None => push(&mut gone, &quoted(uid)),
                }
            }
        }
        self.body(at, false, &pods, &gone, None)
    }

    /// The members after the one with the UID `from`, as many as fit into a page.
    fn page(&self, from: Option<&str>) -> String {
        let start = from.map_or(Bound::Unbounded, Bound::Excluded);
        let (mut pods, mut last, mut next) = (String::new(), None, None);
        for (uid, entry) in self.members.range::<str, _>((start, Bound::Unbounded)) {
            if pods.len() >= PAGE_BYTES {
                next = last;
                break;
            }
            push(&mut pods, &entry.json);
            last = Some(uid);
        }
        self.body(self.at, true, &pods, "", next)
    }

    fn body(&self, at: u64, is_full: bool, pods: &str, gone: &str, next: Option<&Arc<str>>) -> String {
        let (epoch, next) = (&self.epoch, next.map(|uid| format!(r#","next":"{}""#, hex::encode(uid.as_bytes()))));
        let next = next.unwrap_or_default();
        format!(r#"{{"version":"{epoch}-{at}","full":{is_full},"pods":[{pods}],"gone":[{gone}]{next}}}"#)
    }

    fn number(&self, version: &str) -> Option<u64> {
        version.strip_prefix(&self.epoch)?.strip_prefix('-')?.parse().ok()
    }

    /// The UID, in the memory that a member has for it if there is one.
    fn uid(&self, uid: &str) -> Arc<str> {
        self.members.get_key_value(uid).map_or_else(|| Arc::from(uid), |(known, _)| Arc::clone(known))
    }
}

impl Entry {
    fn new(member: &Member) -> Self {
        // Text and numbers always make JSON.
        let json = serde_json::to_string(member).unwrap_or_default().into_boxed_str();
        Self { json, addresses: member.addresses.clone().into_boxed_slice(), until: member.until }
    }
}

fn push(list: &mut String, item: &str) {
    if !list.is_empty() {
        list.push(',');
    }
    list.push_str(item);
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use nebula_cert::directory::{Directory, MAX_PAGE_BYTES};

    use super::*;

    fn member(number: u32, last: u8) -> Member {
        let [_, a, b, c] = number.to_be_bytes();
        Member {
            addresses: vec![[10, a, b, c].into(), IpAddr::from([10, 99, 0, last])],
            namespace: "shop".into(),
            name: format!("web-{number}"),
            service_account: "app".into(),
            node: "node-1".into(),
            uid: format!("00000000-0000-4000-8000-{number:012}"),
            until: 1_000,
        }
    }

    fn roster(count: u32) -> Roster {
        let members = (0..count).map(|number| member(number, 1)).collect();
        Roster::new(&Position { epoch: "e".into(), at: 100 }, members)
    }

    fn change(roster: &mut Roster, number: u32, member: Option<Member>) -> bool {
        let uid = format!("00000000-0000-4000-8000-{number:012}");
        roster.apply(MemberChange { at: roster.at() + 1, uid, member }).unwrap()
    }

    fn ask(roster: &Roster, since: Option<&str>, from: Option<&str>, has_waited: bool) -> Option<Directory> {
        let question = Question { since: since.map(str::to_owned), from: from.map(str::to_owned) };
        let text = roster.answer(&question, has_waited)?;
        assert!(text.len() <= MAX_PAGE_BYTES, "{}", text.len());
        Some(serde_json::from_str(&text).unwrap())
    }

    #[test]
    fn a_delta_says_each_change_once_as_it_is_now() {
        let mut roster = roster(3);
        assert!(ask(&roster, Some("e-100"), None, false).is_none(), "no news");
        assert!(change(&mut roster, 7, Some(member(7, 1))));
        assert!(change(&mut roster, 1, None));
        assert!(change(&mut roster, 7, Some(member(7, 2))));
        let answer = ask(&roster, Some("e-100"), None, false).unwrap();
        assert_eq!((answer.version.as_str(), answer.full), ("e-103", false));
        assert_eq!(answer.pods, [member(7, 2)]);
        assert_eq!(answer.gone, ["00000000-0000-4000-8000-000000000001"]);
        let rest = ask(&roster, Some("e-102"), None, false).unwrap();
        assert_eq!((rest.pods, rest.gone.len()), (vec![member(7, 2)], 0));
        let nothing = ask(&roster, Some("e-103"), None, true).unwrap();
        assert_eq!((nothing.version.as_str(), nothing.full, nothing.pods.len()), ("e-103", false, 0));
    }

    #[test]
    fn a_renewal_wakes_nobody_and_goes_with_the_next_answer() {
        let mut roster = roster(1);
        let renewed = Member { until: 2_000, ..member(0, 1) };
        assert!(!change(&mut roster, 0, Some(renewed.clone())));
        assert!(!change(&mut roster, 9, None), "it was not there");
        assert!(ask(&roster, Some("e-100"), None, false).is_none());
        assert_eq!(ask(&roster, Some("e-100"), None, true).unwrap().pods, [renewed]);
    }

    #[test]
    fn an_unknown_an_old_or_a_future_version_gets_a_full_answer() {
        let mut roster = roster(2);
        for number in 0..2 * u32::try_from(KEPT_CHANGES).unwrap() {
            change(&mut roster, 50_000, (number % 2 == 0).then(|| member(50_000, 1)));
        }
        assert_eq!(roster.log.len() as u64, KEPT_CHANGES);
        for old in ["other-100", "e-100", "e-", "e", "", "e--1", "e-x", "e-99999999999999999999999"] {
            assert!(ask(&roster, Some(old), None, false).unwrap().full, "{old}");
        }
        let oldest = roster.at() - KEPT_CHANGES;
        assert!(!ask(&roster, Some(&format!("e-{oldest}")), None, false).unwrap().full);
        assert!(ask(&roster, Some(&format!("e-{}", oldest - 1)), None, false).unwrap().full);
        let ahead = format!("e-{}", roster.at() + 1);
        assert!(ask(&roster, Some(&ahead), None, false).is_none(), "this replica may catch up");
        assert!(ask(&roster, Some(&ahead), None, true).unwrap().full);
    }

    #[test]
    fn a_change_out_of_order_is_a_gap() {
        let mut roster = roster(1);
        for at in [100, 102] {
            assert!(roster.apply(MemberChange { at, uid: "u".into(), member: None }).is_err(), "{at}");
        }
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "prints what it costs")]
    fn fifty_thousand_members_come_in_pages_and_changes_meanwhile_come_after() {
        let mut roster = roster(50_000);
        let (began, mut pages, mut bytes) = (Instant::now(), 0, 0);
        let (mut seen, mut from, mut first) = (BTreeMap::new(), None::<String>, None);
        loop {
            let question = Question { since: None, from: from.clone() };
            let text = roster.answer(&question, true).unwrap();
            (pages, bytes) = (pages + 1, bytes + text.len());
            let page: Directory = serde_json::from_str(&text).unwrap();
            first.get_or_insert(page.version);
            seen.extend(page.pods.into_iter().map(|member| (member.uid.clone(), member)));
            let Some(next) = page.next else { break };
            from = Some(String::from_utf8(hex::decode(&next).unwrap()).unwrap());
            if pages == 3 {
                // In a part that was read, and in one that was not.
                change(&mut roster, 5, None);
                change(&mut roster, 49_999, Some(member(49_999, 7)));
            }
        }
        println!("{pages} pages, {bytes} bytes, read back in {:?}", began.elapsed());
        assert_eq!(seen.len(), 50_000);
        let rest = ask(&roster, first.as_deref(), None, false).unwrap();
        assert_eq!((rest.gone.len(), rest.pods), (1, vec![member(49_999, 7)]));
        let began = Instant::now();
        let all: usize = (0..pages).map(|_| roster.answer(&Question::default(), true).unwrap().len()).sum();
        println!("as many pages made in {:?}: {all} bytes", began.elapsed());
    }

    #[test]
    fn a_long_delta_is_cut_and_goes_on_where_it_ended() {
        let mut roster = roster(0);
        for number in 0..5_000 {
            change(&mut roster, number, Some(member(number, 1)));
        }
        let (mut known, mut seen) = ("e-100".to_owned(), HashSet::new());
        while let Some(answer) = ask(&roster, Some(&known), None, false) {
            assert!(!answer.full && answer.version != known);
            seen.extend(answer.pods.into_iter().map(|member| member.uid));
            known = answer.version;
        }
        assert_eq!((seen.len(), known.as_str()), (5_000, "e-5100"));
    }

    #[test]
    fn what_has_expired_or_differs_is_named() {
        let roster = roster(3);
        assert!(roster.expired(1_000, 10).is_empty());
        assert_eq!((roster.expired(1_001, 10).len(), roster.expired(1_001, 2).len()), (3, 2));
        let theirs = [member(0, 1), member(1, 9), member(7, 1)];
        let differing: Vec<String> = roster.differing(&theirs, 10).iter().map(|uid| uid[34..].to_owned()).collect();
        assert_eq!(differing, ["02", "01", "07"]);
    }
}
