//! What is wrong in a policy file, and the kinds of text in which it is found.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{MAX_NAME_BYTES, Template};
use crate::{
    pod::{is_name, is_namespace},
    time,
};

/// Errors in a file, each with the key that it is about.
#[derive(Default)]
pub(super) struct Findings(pub(super) Vec<String>);

impl Findings {
    pub(super) fn add(&mut self, key: &str, problem: impl std::fmt::Display) {
        self.0.push(format!("{key}: {problem}"));
    }

    /// Checks the service account of pods that have a role of their own.
    pub(super) fn account(&mut self, section: &str, account: &str) {
        if !account.split_once('/').is_some_and(|(space, name)| is_namespace(space) && is_name(name)) {
            self.add(
                &format!("{section}.account"),
                format!("write it as namespace/name of the {section}' service account"),
            );
        }
    }

    /// Checks a name in which `placeholder` stands for at most `room` characters.
    pub(super) fn name(&mut self, section: &str, name: &str, placeholder: &str, room: usize) {
        let key = format!("{section}.name");
        let fixed = name.replacen(placeholder, "", 1);
        if fixed == name || fixed.contains(['{', '}']) || fixed.chars().any(char::is_control) {
            self.add(&key, format!("it must have {placeholder} in it once, and no other placeholder"));
        }
        if fixed.len() + room > MAX_NAME_BYTES {
            self.add(&key, format!("longer than {} characters", MAX_NAME_BYTES - room));
        }
    }

    /// Checks groups that are the same for all.
    pub(super) fn groups(&mut self, section: &str, groups: &[String]) {
        if groups.iter().any(|group| group.is_empty() || group.contains(['{', '}', ',']) || group.len() > 253) {
            self.add(&format!("{section}.groups"), "a group is a fixed text, without placeholders and commas");
        }
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
