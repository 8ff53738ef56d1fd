//! Operator queries to lighthouses. Their answers are shown and never dialled.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use super::KnownEndpoints;

/// The most recent queries, by the host they are about.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    asked: BTreeMap<IpAddr, Question>,
}

#[derive(Debug)]
struct Question {
    at: Instant,
    answers: BTreeMap<IpAddr, KnownEndpoints>,
    /// The lighthouses with a tunnel at that time, and the highest counter received from each.
    heard: BTreeMap<IpAddr, u64>,
}

impl Questions {
    /// Starts a query; the oldest one is evicted if there are too many. `heard`: the highest counter of each
    /// lighthouse.
    pub(crate) fn ask(&mut self, now: Instant, subject: IpAddr, heard: BTreeMap<IpAddr, u64>) {
        let oldest = self.asked.iter().min_by_key(|(_, question)| question.at).map(|(subject, _)| *subject);
        if let Some(oldest) = oldest.filter(|_| self.asked.len() >= MAX_QUESTIONS) {
            self.asked.remove(&oldest);
        }
        self.asked.insert(subject, Question { at: now, answers: BTreeMap::new(), heard });
    }

    /// Whether there is a query about `subject`.
    pub(crate) fn is_asked(&self, subject: IpAddr) -> bool {
        self.asked.contains_key(&subject)
    }

    /// Stores a lighthouse's answer if there is a query for it.
    pub(crate) fn answer(&mut self, subject: IpAddr, lighthouse: IpAddr, answer: impl FnOnce() -> KnownEndpoints) {
        let question = self.asked.get_mut(&subject);
        let room = question.filter(|question| question.answers.len() < MAX_ANSWERS_PER_QUESTION);
        if let Some(question) = room {
            question.answers.insert(lighthouse, answer());
        }
    }

    /// Lighthouses that have sent something since the query; `heard` holds the present counters, as in
    /// [`Questions::ask`].
    pub(crate) fn heard_since(&self, subject: IpAddr, heard: &BTreeMap<IpAddr, u64>) -> Vec<IpAddr> {
        let Some(question) = self.asked.get(&subject) else { return Vec::new() };
        let newer =
            heard.iter().filter(|(lighthouse, now)| question.heard.get(lighthouse).is_none_or(|then| then < now));
        newer.map(|(lighthouse, _)| *lighthouse).collect()
    }

    /// Answers by lighthouse.
    pub(crate) fn answers(&self, subject: IpAddr) -> BTreeMap<IpAddr, KnownEndpoints> {
        self.asked.get(&subject).map(|question| question.answers.clone()).unwrap_or_default()
    }
}

const MAX_QUESTIONS: usize = 8;
// More lighthouses than anybody has.
const MAX_ANSWERS_PER_QUESTION: usize = 64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "any moment will do as the beginning")]
    fn only_what_was_asked_lately_is_taken_down() {
        let (mut questions, start) = (Questions::default(), Instant::now());
        let host = |n: u8| IpAddr::from([10, 0, 0, n]);
        questions.answer(host(1), host(9), KnownEndpoints::default);
        assert!(questions.answers(host(1)).is_empty(), "nobody asked");
        for n in 1..=9 {
            questions.ask(start + Duration::from_secs(n.into()), host(n), BTreeMap::new());
            questions.answer(host(n), host(99), KnownEndpoints::default);
        }
        assert!(questions.answers(host(1)).is_empty(), "the oldest one made room");
        assert_eq!(questions.answers(host(2)).len(), 1);
        questions.ask(start + Duration::from_secs(99), host(2), BTreeMap::new());
        assert!(questions.answers(host(2)).is_empty(), "a new question has no answer yet");
    }
}
