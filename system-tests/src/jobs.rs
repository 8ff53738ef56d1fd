//! The table of jobs of continuous integration; what each does is a function of `.ci/jobs.sh` of its name.

use crate::toml::{self, Fields};

pub(crate) struct Jobs {
    pub(crate) jobs: Vec<Job>,
}

pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) about: String,
    pub(crate) is_optional: bool,
    /// Runs beside the tests.
    pub(crate) is_beside: bool,
    /// What a job beside the tests needs, PROGRAM=PACKAGE: installed before them.
    pub(crate) packages: Vec<String>,
    /// Runs all parts of the tests.
    pub(crate) is_parts: bool,
}

impl Jobs {
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let jobs = toml::read(text)?.into_iter().map(|section| {
            let name = section.name.strip_prefix("job.").ok_or_else(|| format!("[{}] is not known", section.name))?;
            let mut fields = Fields::new(section.name.clone(), section.entries);
            let job = Job {
                name: name.to_owned(),
                about: fields.text("about")?.ok_or_else(|| fields.problem("no about"))?,
                is_optional: fields.is_set("optional")?,
                is_beside: fields.is_set("beside")?,
                packages: fields.texts("packages")?.unwrap_or_default(),
                is_parts: fields.is_set("parts")?,
            };
            fields.end().map(|()| job)
        });
        Ok(Self { jobs: jobs.collect::<Result<_, String>>()? })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Job> {
        self.jobs.iter().find(|job| job.name == name)
    }

    /// The names of those that run without being named, in their order.
    pub(crate) fn usual(&self) -> Vec<String> {
        self.jobs.iter().filter(|job| !job.is_optional).map(|job| job.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_job_has_its_function() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let jobs = Jobs::read(&fs::read_to_string(root.join(".ci/jobs.toml")).unwrap()).unwrap();
        let functions = fs::read_to_string(root.join(".ci/jobs.sh")).unwrap();
        assert!(jobs.jobs.len() > 20);
        for job in jobs.jobs.iter().filter(|job| !job.is_parts) {
            let name = &job.name;
            assert!(functions.contains(&format!("\n{name}() ")), "no function {name}");
        }
    }

    #[test]
    fn a_job_that_says_what_nobody_knows_is_refused() {
        let error = Jobs::read("[job.fmt]\nabout = \"x\"\noptinal = true\n").err();
        assert_eq!(error.as_deref(), Some("job.fmt: optinal is not known"));
    }
}
