//! `--help`, made of the tables.

use crate::jobs::Jobs;
use crate::parts::Parts;

pub(crate) fn of_parts(parts: &Parts) -> Vec<String> {
    let mut lines = texts(&[
        "./test              all parts but the optional ones, at the depth that every change needs",
        "./test PART...      these at full depth. DEPTH=short or DEPTH=full says otherwise.",
        "./test --list       names of all parts",
        "./test --dry-run [PART...]   the commands of the steps",
        "",
    ]);
    for part in &parts.parts {
        let optional = if part.is_optional { ", optional" } else { "" };
        lines.push(format!("{:<9} {}{optional}", part.name, part.about));
        for (depth, text) in [("short", &part.short), ("full", &part.full)] {
            if !text.is_empty() {
                lines.push(format!("          {depth:<5} {text}"));
            }
        }
    }
    lines.extend(texts(&[
        "",
        "What a part needs is installed on Debian 12. A part that cannot run fails, and so does one that runs no test. Results, time and",
        "CPU time of every part are listed at the end.",
    ]));
    let lanes = parts.parts.iter().filter(|part| part.lane.is_some()).map(|part| part.name.as_str());
    let lanes = lanes.collect::<Vec<_>>().join(", ");
    lines.push(format!("With all parts, after {} these run beside the others: {lanes}.", parts.lanes_after));
    lines
}

pub(crate) fn of_jobs(jobs: &Jobs) -> Vec<String> {
    let mut lines = texts(&[
        ".ci/run             all jobs but the optional ones",
        ".ci/run JOB...      some",
        ".ci/run --list      names of all jobs",
        "",
    ]);
    for job in &jobs.jobs {
        let optional = if job.is_optional { ", optional" } else { "" };
        let beside = if job.is_beside { "; beside the tests, at the lowest priority" } else { "" };
        lines.push(format!("{:<12} {}{beside}{optional}", job.name, job.about));
    }
    lines.extend(texts(&[
        "",
        "Every job is listed at the end with its result, its time and its CPU time, the job `test` by part; a job that cannot run fails.",
    ]));
    lines
}

fn texts(lines: &[&str]) -> Vec<String> {
    lines.iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_and_job_of_the_tables_is_in_the_help() {
        let text = "[schedule]\nlanes_after = \"unit\"\n[part.unit]\nabout = \"units\"\nsteps = [{ cargo = [] }]\n\
            [part.cni]\nabout = \"chains\"\nshort = \"few\"\nfull = \"many\"\nlane = \"x\"\nsteps = [{ cargo = [] }]\n";
        let lines = of_parts(&Parts::read(text).unwrap());
        for line in [
            "unit      units",
            "cni       chains",
            "          short few",
            "          full  many",
            "With all parts, after unit these run beside the others: cni.",
        ] {
            assert!(lines.iter().any(|one| one == line), "{line}\n{lines:#?}");
        }
        let text =
            "[job.fuzz]\nabout = \"corpora\"\nbeside = true\n[job.deny]\nabout = \"licences\"\noptional = true\n";
        let lines = of_jobs(&Jobs::read(text).unwrap());
        for line in
            ["fuzz         corpora; beside the tests, at the lowest priority", "deny         licences, optional"]
        {
            assert!(lines.iter().any(|one| one == line), "{line}\n{lines:#?}");
        }
    }
}
