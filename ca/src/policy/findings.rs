//! What is wrong in a policy file, and the kinds of text in which it is found.

use std::net::IpAddr;

use ipnet::IpNet;

use super::Template;
use crate::time;

/// Errors in a file, each with the key that it is about.
#[derive(Default)]
pub(super) struct Findings(pub(super) Vec<String>);

impl Findings {
    pub(super) fn add(&mut self, key: &str, problem: impl std::fmt::Display) {
        self.0.push(format!("{key}: {problem}"));
    }

    pub(super) fn template(&mut self, key: &str, text: &str, with_kubernetes: bool) -> Template {
        match Template::parse(text) {
            Ok(template) => {
                if template.needs_kubernetes() && !with_kubernetes {
                    self.add(key, format!("template {text:?} takes facts that only a \"kubernetes\" section gives"));
                }
                template
            }
            Err(problem) => {
                self.add(key, format!("template {text:?}: {problem}"));
                Template::default()
            }
        }
    }

    pub(super) fn templates(&mut self, key: &str, texts: &[String], with_kubernetes: bool) -> Vec<Template> {
        texts.iter().map(|text| self.template(key, text, with_kubernetes)).collect()
    }

    /// Parses networks and single addresses.
    pub(super) fn networks(&mut self, key: &str, texts: &[String]) -> Vec<IpNet> {
        let mut networks = Vec::new();
        for text in texts {
            match text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)) {
                Ok(network) => networks.push(network.trunc()),
                Err(_) => self.add(key, format!("{text:?} is no network such as 10.42.0.0/16")),
            }
        }
        networks
    }

    pub(super) fn life(&mut self, key: &str, text: &str) -> i64 {
        time::parse_duration(text).unwrap_or_else(|error| {
            self.add(key, error);
            0
        })
    }
}
