//! Which nodes' agents read the directory: tokens that were checked a moment ago, and how many answers each node has
//! open.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nebula_cert::UnixTime;

use crate::proof::token::TokenHash;

/// Agents that proved who they are.
#[derive(Default)]
pub(crate) struct Agents(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// The node of a token, and the last second for which that is believed.
    nodes: HashMap<TokenHash, (String, UnixTime)>,
    /// Open answers by node.
    open: HashMap<String, usize>,
}

/// An answer that is being made or read, until dropped.
pub(crate) struct OpenAnswer {
    agents: Arc<Agents>,
    node: String,
}

impl Agents {
    /// The node of the agent with this token, if that was checked within the last [`GOOD_FOR`] seconds. An agent asks
    /// all the time, and each check is a request to the API server.
    pub(crate) fn node_of(&self, token: &TokenHash, now: UnixTime) -> Option<String> {
        let known = self.known();
        let (node, until) = known.nodes.get(token)?;
        // Also false when the clock was set back.
        (*until - GOOD_FOR..=*until).contains(&now).then(|| node.clone())
    }

    /// Notes that the token was checked.
    pub(crate) fn is_of(&self, token: TokenHash, node: &str, now: UnixTime) {
        let mut known = self.known();
        if known.nodes.len() >= MAX_TOKENS {
            known.nodes.retain(|_, (_, until)| (*until - GOOD_FOR..=*until).contains(&now));
        }
        if known.nodes.len() < MAX_TOKENS {
            known.nodes.insert(token, (node.to_owned(), now + GOOD_FOR));
        }
    }

    /// Opens an answer for the agent of `node`; `None` if it has as many as it may have.
    pub(crate) fn open(self: &Arc<Self>, node: &str) -> Option<OpenAnswer> {
        let mut known = self.known();
        let count = known.open.entry(node.to_owned()).or_default();
        // Without Kubernetes a node is known by its address, which others may share.
        let most = if node.starts_with("at ") { MAX_OPEN_AT_ADDRESS } else { MAX_OPEN };
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(OpenAnswer { agents: Arc::clone(self), node: node.to_owned() })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Counters stay usable after a panic elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        let mut known = self.agents.known();
        if let Some(count) = known.open.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                known.open.remove(&self.node);
            }
        }
    }
}

/// An agent that lost its rights reads on for so many seconds.
const GOOD_FOR: i64 = 60;
const MAX_TOKENS: usize = 8_192;
/// Agents ask one thing at a time; during an upgrade there are two. Each answer takes a quarter of a megabyte until
/// it is read.
const MAX_OPEN: usize = 4;
const MAX_OPEN_AT_ADDRESS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_believed_for_a_minute() {
        let (agents, token) = (Agents::default(), TokenHash::of("t"));
        assert_eq!(agents.node_of(&token, 100), None);
        agents.is_of(TokenHash::of("t"), "n1", 100);
        assert_eq!(agents.node_of(&token, 160).as_deref(), Some("n1"));
        assert_eq!(agents.node_of(&token, 161), None);
        assert_eq!(agents.node_of(&token, 99), None, "the clock was set back");
        assert_eq!(agents.node_of(&TokenHash::of("u"), 100), None);
    }

    #[test]
    fn tokens_and_answers_are_limited() {
        let agents = Arc::new(Agents::default());
        (0..2 * MAX_TOKENS).for_each(|number| agents.is_of(TokenHash::of(&number.to_string()), "n1", 100));
        assert_eq!(agents.known().nodes.len(), MAX_TOKENS);
        agents.is_of(TokenHash::of("later"), "n1", 200);
        assert_eq!(agents.known().nodes.len(), 1);
        let mut open: Vec<_> = (0..10).filter_map(|_| agents.open("n1")).collect();
        assert_eq!(open.len(), MAX_OPEN);
        assert!(agents.open("n2").is_some());
        let shared: Vec<_> = (0..100).filter_map(|_| agents.open("at 192.0.2.1")).collect();
        assert_eq!(shared.len(), MAX_OPEN_AT_ADDRESS);
        drop(shared);
        open.pop();
        assert!(agents.open("n1").is_some());
        drop(open);
        assert!(agents.known().open.is_empty());
    }
}
