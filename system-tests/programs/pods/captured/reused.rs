//! Another pod gets the address of an enrolled one at once, while programs go on sending what was for the former.

use std::io::ErrorKind;
use std::time::Duration;

use super::town::{DB, FAMILIES, Primary, Town, WEB};
use super::traffic;
use super::wiretap::SECRET;
use crate::world::chaos::number;

/// `CAPTURE_REUSES` says how often.
#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn what_was_for_an_enrolled_pod_does_not_go_to_the_next_one_with_its_address() {
    let rounds = number("CAPTURE_REUSES", 100);
    let mut town = Town::new(Primary::Links, |_| ());
    let wires = town.wiretaps();
    let (mut refused, mut reset) = (0, 0);
    for round in 0..rounds {
        town.write_table(&[DB]);
        town.open_guards_of_others();
        town.wait_for_table(WEB);
        let mut open: Vec<_> = FAMILIES
            .iter()
            .map(|family| {
                let target = DB.at(*family);
                town.converse(SECRET, "web", target);
                let datagrams = traffic::connected(town.world().namespace_of("web"), target).expect("a socket");
                let mut connection = town.open("web", target);
                connection.ask(SECRET).expect("it is sent");
                assert_eq!(connection.answer().expect("an answer"), "db", "round {round}");
                datagrams.send(SECRET).expect("it is sent");
                (datagrams, connection, false)
            })
            .collect();
        // From now on the guards would let everything pass: the instance alone is on watch.
        town.give_away(DB);
        for _ in 0..3 {
            for (datagrams, connection, is_broken) in &mut open {
                *is_broken |= connection.ask(SECRET).is_err();
                if datagrams.send(SECRET).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                    refused += 1;
                }
            }
        }
        town.wait_for_table(WEB);
        for (datagrams, mut connection, is_broken) in open {
            for _ in 0..3 {
                if datagrams.send(SECRET).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                    refused += 1;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            // The reset is told once, by whatever call comes first.
            let is_broken = is_broken || connection.ask(SECRET).is_err();
            reset += usize::from(is_broken || connection.is_reset());
        }
    }
    wires.heard_nothing_in_clear();
    println!(
        "{rounds} times in both families: {refused} datagrams refused, {reset} connections reset, 0 packets in clear"
    );
    assert!(refused >= 2 * rounds as usize && reset >= 2 * rounds as usize, "the programs are not told");
}
