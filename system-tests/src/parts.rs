//! The table of parts: what each needs and runs.

use std::collections::BTreeMap;

use crate::toml::{self, Fields};

/// How much a part runs: what every change needs, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Arguments of cargo for every build of tests.
    pub(crate) features: Vec<String>,
    /// Test binaries that are run without cargo.
    pub(crate) binaries: Vec<String>,
    /// Arguments of `cargo build` for the release build.
    pub(crate) release: Vec<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) about: String,
    pub(crate) short: String,
    pub(crate) full: String,
    pub(crate) is_optional: bool,
    pub(crate) needs_root: bool,
    pub(crate) packages: Vec<String>,
    pub(crate) needs_peers: bool,
    pub(crate) check: Option<String>,
    pub(crate) needs_release: bool,
    pub(crate) env_short: Vec<(String, String)>,
    pub(crate) env_full: Vec<(String, String)>,
    pub(crate) lane: Option<String>,
    pub(crate) is_alone: bool,
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) run: Run,
    pub(crate) depth: Option<Depth>,
    pub(crate) env: Vec<(String, String)>,
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

impl Parts {
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut packages = BTreeMap::new();
        let mut found = Self {
            parts: Vec::new(),
            lanes_after: String::new(),
            features: Vec::new(),
            binaries: Vec::new(),
            release: Vec::new(),
        };
        for section in toml::read(text)? {
            let mut fields = Fields::new(section.name.clone(), section.entries);
            match section.name.as_str() {
                "cargo" => {
                    found.features = fields.texts("features")?.unwrap_or_default();
                    found.binaries = fields.texts("binaries")?.unwrap_or_default();
                    found.release = fields.texts("release")?.unwrap_or_default();
                }
                "schedule" => found.lanes_after = fields.text("lanes_after")?.unwrap_or_default(),
                "packages" => {
                    for name in fields.rest() {
                        let set = fields.texts(&name)?.unwrap_or_default();
                        packages.insert(name, set);
                    }
                }
                name => {
                    let name = name.strip_prefix("part.").ok_or_else(|| format!("[{name}] is not known"))?;
                    found.parts.push(part(name, &mut fields)?);
                }
            }
            fields.end()?;
        }
        for part in &mut found.parts {
            part.packages = expand(&part.name, &part.packages, &packages)?;
        }
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
                    && !self.binaries.contains(binary)
                {
                    return Err(format!("part {}: {binary} is not among the binaries", part.name));
                }
            }
        }
        Ok(())
    }
}

fn part(name: &str, fields: &mut Fields) -> Result<Part, String> {
    let under = fields.text("under")?;
    let part = Part {
        name: name.to_owned(),
        about: fields.text("about")?.ok_or_else(|| fields.problem("no about"))?,
        short: fields.text("short")?.unwrap_or_default(),
        full: fields.text("full")?.unwrap_or_default(),
        is_optional: fields.is_set("optional")?,
        needs_root: fields.is_set("root")?,
        packages: fields.texts("packages")?.unwrap_or_default(),
        needs_peers: fields.is_set("peers")?,
        check: fields.text("check")?,
        needs_release: fields.is_set("release")?,
        env_short: fields.pairs("env_short")?,
        env_full: fields.pairs("env_full")?,
        lane: fields.text("lane")?,
        is_alone: fields.is_set("alone")?,
        steps: fields
            .tables("steps")?
            .into_iter()
            .map(|entry| step(entry, under.as_deref()))
            .collect::<Result<_, _>>()?,
    };
    if part.steps.is_empty() { Err(fields.problem("no steps")) } else { Ok(part) }
}

fn step(mut fields: Fields, under: Option<&str>) -> Result<Step, String> {
    let tests = fields.text("tests")?;
    let (only, skip, skip_short) = (fields.texts("only")?, fields.texts("skip")?, fields.texts("skip_short")?);
    if tests.is_none() && (only.is_some() || skip.is_some() || skip_short.is_some()) {
        return Err(fields.problem("only and skip are for tests"));
    }
    let (only, skip, skip_short) = (only.unwrap_or_default(), skip.unwrap_or_default(), skip_short.unwrap_or_default());
    let mut kinds = vec![
        tests.map(|binary| Run::Tests { binary, only, skip, skip_short }),
        fields.texts("ignored")?.map(Run::Ignored),
        fields.texts("cargo")?.map(Run::Cargo),
        fields.text("shell")?.map(Run::Shell),
    ];
    kinds.retain(Option::is_some);
    let (1, Some(Some(run))) = (kinds.len(), kinds.pop()) else {
        return Err(fields.problem("not one of tests, ignored, cargo and shell"));
    };
    let own_under = fields.text("under")?;
    let is_tests = matches!(run, Run::Tests { .. });
    let step = Step {
        depth: fields.text("depth")?.map(|text| Depth::parse(&text)).transpose()?,
        env: fields.pairs("env")?,
        under: own_under.or_else(|| under.filter(|_| is_tests).map(str::to_owned)),
        is_shown: fields.is_set("nocapture")?,
        threads_per_processor: fields.number("threads_per_processor")?,
        starts_release: fields.is_set("starts_release")?,
        run,
    };
    fields.end()?;
    Ok(step)
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
