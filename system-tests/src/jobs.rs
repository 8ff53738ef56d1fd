//! The table of jobs of continuous integration; what each does is a function of `.ci/jobs.sh` of its name.

use serde::Deserialize;

pub(crate) struct Jobs {
    pub(crate) jobs: Vec<Job>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Job {
    #[serde(skip)]
    pub(crate) name: String,
    pub(crate) about: String,
    #[serde(rename = "optional", default)]
    pub(crate) is_optional: bool,
    /// Runs beside the tests.
    #[serde(rename = "beside", default)]
    pub(crate) is_beside: bool,
    /// What a job beside the tests needs, PROGRAM=PACKAGE: installed before them.
    #[serde(default)]
    pub(crate) packages: Vec<String>,
    /// Runs all parts of the tests.
    #[serde(rename = "parts", default)]
    pub(crate) is_parts: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// In the order of the file.
    job: toml::Table,
}

impl Jobs {
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let jobs = file.job.into_iter().map(|(name, fields)| {
            let problem = |error: toml::de::Error| format!("job {name}: {}", error.to_string().trim_end());
            let mut job: Job = fields.try_into().map_err(problem)?;
            job.name = name;
            Ok(job)
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
        let error = Jobs::read("[job.fmt]\nabout = \"x\"\noptinal = true\n").err().unwrap();
        assert!(error.starts_with("job fmt: unknown field `optinal`"), "{error}");
    }
}
