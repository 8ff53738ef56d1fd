//! Ledgers of other releases.

use std::path::Path;

use nebula_cni_contract::recorded::hold;

use super::rows::{Database, META, get_in, put};
use super::*;
use crate::address::Holder;

/// One record of each table, and each kind of subject.
#[derive(Serialize, Deserialize)]
struct Records {
    token: TokenRecord,
    pod: PodRecord,
    address: Holder,
    kept: KeptAddresses,
    kept_out: KeptOut,
    lighthouse: LighthouseRecord,
    issued: IssuedRecord,
    subject: Subject,
    change: MemberChange,
    position: Position,
}

#[test]
fn the_records_of_each_release_are_read_and_keep_their_keys() {
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
    hold::<Records>(&documents, env!("CARGO_PKG_VERSION"), "ledger.json").unwrap();
}

#[test]
fn a_ledger_of_a_newer_service_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    let says = |error: StoreError| error.to_string();
    let of_a_newer_service = "by a newer nebula-ca (format 2, this one knows 1)";
    {
        let store = RedbStore::open_file(&path, Beginning::Allowed).unwrap();
        store.check().unwrap();
        // As a newer service does that shares the database.
        store.database().write(|rows| put(rows, META, b"format", &2)).unwrap();
        assert!(says(store.check().unwrap_err()).contains(of_a_newer_service));
        let format: Option<u64> = store.database().write(|rows| get_in(rows, META, b"format")).unwrap();
        assert_eq!(format, Some(2), "an older service does not put it back");
    }
    let refused = RedbStore::open_file(&path, Beginning::Allowed).map(drop).map_err(says).unwrap_err();
    assert!(refused.contains(of_a_newer_service), "{refused}");
    let refused = RedbStore::open_file(&path, Beginning::Allowed).map(drop).map_err(says).unwrap_err();
    assert!(refused.contains(of_a_newer_service), "{refused}");
}
