//! The order in which parts and jobs run, and what runs beside what.

use crate::jobs::{Job, Jobs};
use crate::parts::Parts;

/// A part and a job may have the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Task {
    Part(String),
    Job(String),
}

impl Task {
    pub(crate) fn name(&self) -> &str {
        let (Self::Part(name) | Self::Job(name)) = self;
        name
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Turn {
    /// One after the other.
    Run(Task),
    /// From here on these run beside the rest.
    Start(Vec<Lane>),
    /// Waits until nothing runs beside the rest.
    Wait,
    /// What is one thing in the results, with its parts.
    Group(String, Vec<Self>),
}

/// Things that run one after the other, beside the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) tasks: Vec<Task>,
    /// At the lowest priority, and no part of the group.
    pub(crate) is_idle: bool,
}

/// Parts in the order in which they are asked for. Lanes are for all parts: whoever names some wants to see them one
/// by one.
pub(crate) fn of_parts(table: &Parts, asked: &[String], beside: &[String]) -> Vec<Turn> {
    let has_lanes = asked == table.usual();
    let mut turns = Vec::new();
    for part in asked.iter().filter_map(|name| table.get(name)) {
        if has_lanes && part.lane.is_some() {
            continue;
        }
        if part.is_alone {
            turns.push(Turn::Wait);
        }
        turns.push(Turn::Run(Task::Part(part.name.clone())));
        if has_lanes && part.name == table.lanes_after {
            turns.push(Turn::Start(lanes(table, beside)));
        }
    }
    turns.push(Turn::Wait);
    turns
}

fn lanes(table: &Parts, beside: &[String]) -> Vec<Lane> {
    let mut lanes: Vec<(&str, Lane)> = Vec::new();
    for part in &table.parts {
        let Some(lane) = part.lane.as_deref() else { continue };
        let task = Task::Part(part.name.clone());
        match lanes.iter_mut().find(|(name, _)| *name == lane) {
            Some((_, lane)) => lane.tasks.push(task),
            None => lanes.push((lane, Lane { tasks: vec![task], is_idle: false })),
        }
    }
    let mut lanes: Vec<_> = lanes.into_iter().map(|(_, lane)| lane).collect();
    if !beside.is_empty() {
        lanes.push(Lane { tasks: beside.iter().cloned().map(Task::Job).collect(), is_idle: true });
    }
    lanes
}

/// Jobs in the order in which they are asked for; with the tests, some run beside these once all is built.
pub(crate) fn of_jobs(jobs: &Jobs, asked: &[String], parts: &Parts) -> Vec<Turn> {
    let beside: Vec<_> = beside(jobs, asked).into_iter().map(|job| job.name.clone()).collect();
    let others = asked.iter().filter(|name| !beside.contains(name)).filter_map(|name| jobs.get(name));
    let turns = others.map(|job| {
        if job.is_parts {
            Turn::Group(job.name.clone(), of_parts(parts, &parts.usual(), &beside))
        } else {
            Turn::Run(Task::Job(job.name.clone()))
        }
    });
    turns.collect()
}

/// Those that run beside the tests.
pub(crate) fn beside<'a>(jobs: &'a Jobs, asked: &[String]) -> Vec<&'a Job> {
    let chosen: Vec<_> = asked.iter().filter_map(|name| jobs.get(name)).collect();
    let has_tests = chosen.iter().any(|job| job.is_parts);
    chosen.into_iter().filter(|job| has_tests && job.is_beside).collect()
}

/// Refuses names that are not there.
pub(crate) fn check_names<'a>(
    kind: &str,
    asked: &[String],
    known: impl Iterator<Item = &'a str>,
) -> Result<(), String> {
    let known: Vec<_> = known.collect();
    match asked.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(format!("no {kind} named {name}; there are: {}", known.join(" "))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Parts {
        let mut text = "[schedule]\nlanes_after = \"driver\"\n".to_owned();
        for (name, more) in [
            ("unit", ""),
            ("driver", ""),
            ("swap", "lane = \"two\""),
            ("soak", ""),
            ("cni", "lane = \"one\""),
            ("cri", "lane = \"two\""),
            ("load", "alone = true"),
            ("kube", "optional = true"),
        ] {
            text += &format!("[part.{name}]\nabout = \"x\"\nsteps = [{{ cargo = [] }}]\n{more}\n");
        }
        Parts::read(&text).unwrap()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn run(name: &str) -> Turn {
        Turn::Run(Task::Part(name.to_owned()))
    }

    fn job(name: &str) -> Turn {
        Turn::Run(Task::Job(name.to_owned()))
    }

    fn lane(of: &[&str]) -> Lane {
        Lane { tasks: names(of).into_iter().map(Task::Part).collect(), is_idle: false }
    }

    #[test]
    fn with_all_parts_lanes_start_after_their_part_and_load_waits_for_them() {
        let parts = parts();
        let lanes = vec![lane(&["swap", "cri"]), lane(&["cni"])];
        assert_eq!(
            of_parts(&parts, &parts.usual(), &[]),
            [run("unit"), run("driver"), Turn::Start(lanes), run("soak"), Turn::Wait, run("load"), Turn::Wait]
        );
    }

    #[test]
    fn parts_that_are_named_run_one_after_the_other_in_the_order_of_their_names() {
        let turns = of_parts(&parts(), &names(&["cni", "driver", "kube"]), &[]);
        assert_eq!(turns, [run("cni"), run("driver"), run("kube"), Turn::Wait]);
    }

    #[test]
    fn jobs_run_beside_the_tests_where_there_are_tests() {
        let text = "[job.fmt]\nabout = \"x\"\n[job.test]\nabout = \"x\"\nparts = true\n\
            [job.fuzz]\nabout = \"x\"\nbeside = true\n[job.demo]\nabout = \"x\"\n";
        let (jobs, parts) = (Jobs::read(text).unwrap(), parts());
        let turns = of_jobs(&jobs, &names(&["fmt", "test", "fuzz", "demo"]), &parts);
        let [first, Turn::Group(name, inner), last] = turns.as_slice() else { panic!("{turns:?}") };
        assert_eq!((first, name.as_str(), last), (&job("fmt"), "test", &job("demo")));
        let Turn::Start(lanes) = &inner[2] else { panic!("{inner:?}") };
        assert_eq!(lanes[2], Lane { tasks: vec![Task::Job("fuzz".to_owned())], is_idle: true });
        assert_eq!(of_jobs(&jobs, &names(&["fuzz", "demo"]), &parts), [job("fuzz"), job("demo")]);
    }

    #[test]
    fn a_name_that_is_not_there_is_refused_with_those_that_are() {
        let known = || ["unit", "cert"].into_iter();
        assert_eq!(check_names("part", &names(&["cert"]), known()), Ok(()));
        let error = check_names("part", &names(&["cert", "uni"]), known()).unwrap_err();
        assert_eq!(error, "no part named uni; there are: unit cert");
    }
}
