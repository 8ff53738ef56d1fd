//! The table of parts: what each needs and runs.

use std::collections::BTreeMap;

use serde::Deserialize;

/// How much a part runs: what every change needs, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Depth {
    Short,
    Full,
}

impl Depth {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "short" => Ok(Self::Short),
            "full" => Ok(Self::Full),
            other => Err(format!("DEPTH is {other}; it can be short or full")),
        }
    }
}

pub(crate) struct Parts {
    pub(crate) parts: Vec<Part>,
    pub(crate) lanes_after: String,
    pub(crate) cargo: Cargo,
}

/// How cargo is called.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Cargo {
    /// Arguments for every build of tests.
    pub(crate) features: Vec<String>,
    /// Test binaries that are run without cargo.
    pub(crate) binaries: Vec<String>,
    /// Arguments of `cargo build` for the release build.
    pub(crate) release: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) about: String,
    #[serde(default)]
    pub(crate) short: String,
    #[serde(default)]
    pub(crate) full: String,
    #[serde(rename = "optional", default)]
    pub(crate) is_optional: bool,
    #[serde(rename = "root", default)]
    pub(crate) needs_root: bool,
    #[serde(default)]
    pub(crate) packages: Vec<String>,
    #[serde(rename = "peers", default)]
    pub(crate) needs_peers: bool,
    pub(crate) check: Option<String>,
    #[serde(rename = "release", default)]
    pub(crate) needs_release: bool,
    #[serde(default)]
    pub(crate) env_short: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) env_full: BTreeMap<String, String>,
    pub(crate) lane: Option<String>,
    #[serde(rename = "alone", default)]
    pub(crate) is_alone: bool,
    under: Option<String>,
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "StepFields")]
pub(crate) struct Step {
    pub(crate) run: Run,
    pub(crate) depth: Option<Depth>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) under: Option<String>,
    pub(crate) is_shown: bool,
    pub(crate) threads_per_processor: Option<u32>,
    pub(crate) starts_release: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// The ignored tests of a binary.
    Tests { binary: String, only: Vec<String>, skip: Vec<String>, skip_short: Vec<String> },
    /// Ignored tests, by arguments of `cargo test`.
    Ignored(Vec<String>),
    /// `cargo test` with these arguments.
    Cargo(Vec<String>),
    /// A function of parts.sh.
    Shell(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    cargo: Cargo,
    schedule: Schedule,
    #[serde(default)]
    packages: BTreeMap<String, Vec<String>>,
    /// In the order of the file.
    part: toml::Table,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Schedule {
    lanes_after: String,
}

/// A step as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepFields {
    tests: Option<String>,
    only: Option<Vec<String>>,
    skip: Option<Vec<String>>,
    skip_short: Option<Vec<String>>,
    ignored: Option<Vec<String>>,
    cargo: Option<Vec<String>>,
    shell: Option<String>,
    depth: Option<Depth>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    under: Option<String>,
    #[serde(default)]
    nocapture: bool,
    threads_per_processor: Option<u32>,
    #[serde(default)]
    starts_release: bool,
}

impl Parts {
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let parts = file.part.into_iter().map(|(name, fields)| part(name, fields, &file.packages));
        let found =
            Self { parts: parts.collect::<Result<_, _>>()?, lanes_after: file.schedule.lanes_after, cargo: file.cargo };
        found.check()?;
        Ok(found)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Part> {
        self.parts.iter().find(|part| part.name == name)
    }

    /// The names of those that run without being named, in their order.
    pub(crate) fn usual(&self) -> Vec<String> {
        self.parts.iter().filter(|part| !part.is_optional).map(|part| part.name.clone()).collect()
    }

    fn check(&self) -> Result<(), String> {
        if self.get(&self.lanes_after).is_none_or(|part| part.lane.is_some()) {
            return Err(format!("lanes_after: {} is no part outside of lanes", self.lanes_after));
        }
        let after = self.parts.iter().position(|part| part.name == self.lanes_after);
        for (index, part) in self.parts.iter().enumerate() {
            if part.lane.is_some() && (part.is_alone || part.is_optional || Some(index) < after) {
                return Err(format!("part {}: its lane begins after {}", part.name, self.lanes_after));
            }
            for step in &part.steps {
                if let Run::Tests { binary, .. } = &step.run
                    && !self.cargo.binaries.contains(binary)
                {
                    return Err(format!("part {}: {binary} is not among the binaries", part.name));
                }
            }
        }
        Ok(())
    }
}

fn part(name: String, fields: toml::Value, packages: &BTreeMap<String, Vec<String>>) -> Result<Part, String> {
    let of = |problem: &str| format!("part {name}: {problem}");
    let mut part: Part = fields.try_into().map_err(|error: toml::de::Error| of(error.to_string().trim_end()))?;
    if part.steps.is_empty() {
        return Err(of("no steps"));
    }
    part.packages = expand(&name, &part.packages, packages)?;
    for step in part.steps.iter_mut().filter(|step| matches!(step.run, Run::Tests { .. })) {
        step.under = step.under.take().or_else(|| part.under.clone());
    }
    part.name = name;
    Ok(part)
}

impl TryFrom<StepFields> for Step {
    type Error = &'static str;

    fn try_from(fields: StepFields) -> Result<Self, Self::Error> {
        let has_filter = fields.only.is_some() || fields.skip.is_some() || fields.skip_short.is_some();
        let (only, skip) = (fields.only.unwrap_or_default(), fields.skip.unwrap_or_default());
        let skip_short = fields.skip_short.unwrap_or_default();
        let run = match (fields.tests, fields.ignored, fields.cargo, fields.shell) {
            (Some(binary), None, None, None) => Run::Tests { binary, only, skip, skip_short },
            (None, ..) if has_filter => return Err("only and skip are for tests"),
            (None, Some(arguments), None, None) => Run::Ignored(arguments),
            (None, None, Some(arguments), None) => Run::Cargo(arguments),
            (None, None, None, Some(function)) => Run::Shell(function),
            _ => return Err("a step is one of tests, ignored, cargo and shell"),
        };
        Ok(Self {
            run,
            depth: fields.depth,
            env: fields.env,
            under: fields.under,
            is_shown: fields.nocapture,
            threads_per_processor: fields.threads_per_processor,
            starts_release: fields.starts_release,
        })
    }
}

/// Packages with the sets that they name in their place, each once.
fn expand(part: &str, packages: &[String], sets: &BTreeMap<String, Vec<String>>) -> Result<Vec<String>, String> {
    let mut every = Vec::new();
    for package in packages {
        let more = match package.strip_prefix('@') {
            Some(name) => {
                let set = sets.get(name).ok_or_else(|| format!("part {part}: no set of packages {name}"))?;
                if set.contains(package) {
                    return Err(format!("part {part}: the set {name} contains itself"));
                }
                expand(part, set, sets)?
            }
            None if package.contains('=') => vec![package.clone()],
            None => return Err(format!("part {part}: {package} is not PROGRAM=PACKAGE")),
        };
        for package in more {
            if !every.contains(&package) {
                every.push(package);
            }
        }
    }
    Ok(every)
}

#[cfg(test)]
mod tests;
