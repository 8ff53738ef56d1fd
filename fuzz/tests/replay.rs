//! Replays every committed corpus input on stable Rust.

use std::path::Path;

#[test]
fn every_committed_input_is_survived() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut inputs = 0;
    for (name, run) in nebula_fuzz::TARGETS {
        run(&[]);
        let folder = corpus.join(name);
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|_| panic!("no corpus for {name}"));
        let mut here = 0;
        for entry in entries {
            let data = std::fs::read(entry.expect("a corpus entry").path()).expect("a readable input");
            run(&data);
            here += 1;
        }
        assert!(here > 0, "the corpus of {name} is empty");
        inputs += here;
    }
    assert!(inputs > 0);
}
