use std::fs;
use std::path::{Path, PathBuf};

use super::*;

const HEAD: &str =
    "[cargo]\nfeatures = [\"--workspace\"]\nbinaries = [\"programs\"]\n[schedule]\nlanes_after = \"a\"\n";

fn read(rest: &str) -> Result<Parts, String> {
    Parts::read(&format!("{HEAD}[part.a]\nabout = \"a\"\nsteps = [{{ cargo = [] }}]\n{rest}"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn table() -> Parts {
    Parts::read(&fs::read_to_string(root().join("system-tests/parts.toml")).unwrap()).unwrap()
}

#[test]
fn sets_of_packages_are_expanded_and_each_package_is_there_once() {
    let parts = read(
        "[packages]\nx = [\"ip=iproute2\"]\ny = [\"@x\", \"nft=nftables\"]\n\
         [part.b]\nabout = \"b\"\npackages = [\"@x\", \"@y\"]\nsteps = [{ shell = \"f\" }]\n",
    )
    .unwrap();
    assert_eq!(parts.get("b").unwrap().packages, ["ip=iproute2", "nft=nftables"]);
}

#[test]
fn what_a_part_runs_under_is_for_its_tests_and_a_step_may_have_another() {
    let parts = read(
        "[part.b]\nabout = \"b\"\nunder = \"u\"\nsteps = [{ tests = \"programs\" }, { shell = \"f\" }, { tests = \"programs\", under = \"v\" }]\n",
    )
    .unwrap();
    let under: Vec<_> = parts.get("b").unwrap().steps.iter().map(|step| step.under.as_deref()).collect();
    assert_eq!(under, [Some("u"), None, Some("v")]);
}

#[test]
fn a_table_with_a_mistake_is_refused() {
    for (rest, said) in [
        ("[part.b]\nabout = \"b\"\n", "part b: missing field `steps`"),
        ("[part.b]\nabout = \"b\"\nsteps = []\n", "part b: no steps"),
        ("[part.b]\nsteps = [{ cargo = [] }]\n", "part b: missing field `about`"),
        ("[part.b]\nabout = \"b\"\nrot = true\nsteps = [{ cargo = [] }]\n", "part b: unknown field `rot`"),
        ("[part.b]\nabout = \"b\"\nsteps = [{ cargo = [], shell = \"f\" }]\n", "part b: a step is one of tests"),
        ("[part.b]\nabout = \"b\"\nsteps = [{ cargo = [], only = [\"x\"] }]\n", "part b: only and skip"),
        ("[part.b]\nabout = \"b\"\nsteps = [{ cargo = [], depth = \"deep\" }]\n", "part b: unknown variant `deep`"),
        ("[part.b]\nabout = \"b\"\nsteps = [{ cargo = [], dept = \"full\" }]\n", "part b: unknown field `dept`"),
        ("[part.b]\nabout = \"b\"\nsteps = [{ tests = \"other\" }]\n", "part b: other is not among the binaries"),
        ("[part.b]\nabout = \"b\"\npackages = [\"@x\"]\nsteps = [{ cargo = [] }]\n", "part b: no set of packages x"),
        ("[part.b]\nabout = \"b\"\npackages = [\"x\"]\nsteps = [{ cargo = [] }]\n", "part b: x is not PROGRAM=PACKAGE"),
        (
            "[part.b]\nabout = \"b\"\nlane = \"l\"\nalone = true\nsteps = [{ cargo = [] }]\n",
            "part b: its lane begins after a",
        ),
    ] {
        let error = read(rest).err().unwrap_or_else(|| panic!("accepted: {rest}"));
        assert!(error.starts_with(said), "{rest}: {error}");
    }
    let error = read("[other]\n").err().unwrap();
    assert!(error.contains("unknown field `other`"), "{error}");
}

#[test]
fn every_module_and_function_that_the_table_names_is_there() {
    let functions = fs::read_to_string(root().join("system-tests/parts.sh")).unwrap();
    for part in table().parts {
        for step in &part.steps {
            let named = [
                step.under.as_ref(),
                part.check.as_ref(),
                if let Run::Shell(name) = &step.run { Some(name) } else { None },
            ];
            for name in named.into_iter().flatten() {
                assert!(functions.contains(&format!("\n{name}() {{")), "{}: no function {name}", part.name);
            }
            let Run::Tests { binary, only, .. } = &step.run else { continue };
            let folder =
                root().join(if binary == "programs" { "system-tests/programs" } else { "cni-plugin/tests/plugin" });
            for module in only {
                let path = folder.join(module.replace("::", "/"));
                assert!(
                    path.with_extension("rs").exists() || path.join("mod.rs").exists(),
                    "{}: no module {module}",
                    part.name
                );
            }
        }
    }
}

#[test]
fn every_ignored_test_of_the_programs_is_run_by_a_part() {
    let programs = root().join("system-tests/programs");
    let parts = table();
    let only: Vec<_> = parts
        .parts
        .iter()
        .flat_map(|part| &part.steps)
        .filter_map(|step| if let Run::Tests { binary, only, .. } = &step.run { Some((binary, only)) } else { None })
        .filter(|(binary, _)| *binary == "programs")
        .flat_map(|(_, only)| only)
        .map(|module| module.replace("::", "/"))
        .collect();
    let mut files = Vec::new();
    rust_files(&programs, &mut files);
    assert!(files.len() > 100, "{}", files.len());
    for file in files {
        if !fs::read_to_string(&file).unwrap().contains("#[ignore") {
            continue;
        }
        let module = file.strip_prefix(&programs).unwrap().with_extension("").display().to_string();
        let module = module.trim_end_matches("/mod");
        let is_named = only.iter().any(|named| module == named || module.starts_with(&format!("{named}/")));
        assert!(is_named, "no part runs the tests of {module}");
    }
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}
