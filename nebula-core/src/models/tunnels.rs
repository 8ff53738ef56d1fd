//! Models of the tunnel table: a lane finds a whole tunnel or none, never a retired one's successor, and never the old
//! primary after the change.

use std::net::IpAddr;
use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

use super::check;
use crate::forward::testing::{self, tunnel};
use crate::tunnel::{Session, SessionKeys, TunnelHint, TunnelTable, cipher::Cipher};

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 1, 0, 2));

#[test]
fn after_a_change_of_primary_a_lane_finds_the_new_one_whatever_it_remembered() {
    let peer = testing::verified(&["10.1.0.2/16"]);
    check(2, move || {
        let table = Arc::new(TunnelTable::new(1));
        let old = tunnel(table.reserve(0).unwrap().keep(), peer.clone());
        table.publish(Arc::clone(&old));
        table.set_primary(&old);
        let changed = Arc::new(AtomicBool::new(false));
        let control = {
            let (table, changed, peer) = (Arc::clone(&table), Arc::clone(&changed), peer.clone());
            let old = old.local_index;
            thread::spawn(move || {
                let new = tunnel(table.reserve(0).unwrap().keep(), peer);
                table.publish(Arc::clone(&new));
                table.set_primary(&new);
                changed.store(true, Ordering::Release);
                table.retire(old);
                new.local_index
            })
        };
        let mut hint = TunnelHint::default();
        let mut found = Vec::new();
        for _ in 0..2 {
            let was_changed = changed.load(Ordering::Acquire);
            let lookup = hint.look_up(&table, PEER);
            found.push((was_changed, lookup.tunnel().map(|tunnel| tunnel.local_index)));
        }
        let new = control.join().unwrap();
        for (was_changed, index) in found {
            assert!(index == Some(new) || !was_changed && (index == Some(old.local_index) || index.is_none()));
        }
        assert_eq!(hint.look_up(&table, PEER).tunnel().map(|tunnel| tunnel.local_index), Some(new));
    });
}

#[test]
fn the_index_of_a_retired_tunnel_never_leads_to_the_one_that_took_its_slot() {
    let [first, second] = [testing::verified(&["10.1.0.2/16"]), testing::verified(&["10.1.0.3/16"])];
    check(2, move || {
        let table = Arc::new(TunnelTable::new(1));
        let old = table.reserve(0).unwrap().keep();
        table.publish(tunnel(old, first.clone()));
        let control = {
            let (table, second) = (Arc::clone(&table), second.clone());
            thread::spawn(move || {
                table.retire(old);
                let new = table.reserve(0).unwrap().keep();
                table.publish(tunnel(new, second));
                new
            })
        };
        let lookup = table.look_up(old);
        if let Some(tunnel) = lookup.tunnel() {
            assert_eq!((tunnel.local_index, tunnel.peer_addresses[0]), (old, PEER));
        }
        drop(lookup);
        let new = control.join().unwrap();
        assert_ne!(new, old);
        assert!(table.look_up(old).tunnel().is_none());
        assert_eq!(table.look_up(new).tunnel().map(|tunnel| tunnel.local_index), Some(new));
    });
}

#[test]
fn a_retired_tunnel_is_freed_with_the_last_look_at_it() {
    let peer = testing::verified(&["10.1.0.2/16"]);
    check(2, move || {
        let table = Arc::new(TunnelTable::new(1));
        let index = table.reserve(0).unwrap().keep();
        let only = tunnel(index, peer.clone());
        let left = Arc::downgrade(&only);
        table.publish(Arc::clone(&only));
        table.set_primary(&only);
        drop(only);
        let lane = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let mut hint = TunnelHint::default();
                hint.look_up(&table, PEER).tunnel().is_some() | hint.look_up(&table, PEER).tunnel().is_some()
            })
        };
        drop(table.retire(index));
        lane.join().unwrap();
        assert!(left.upgrade().is_none());
        assert!(table.primary(PEER).is_none());
    });
}

#[test]
fn no_two_runs_get_the_same_counter_and_none_beyond_the_last() {
    check(3, || {
        let session = Session::new(SessionKeys { cipher: Cipher::Aes256Gcm, send: [1; 32], receive: [2; 32] });
        session.skip_to(Session::REJECT_AFTER - 5);
        let (session, highest) = (Arc::new(session), Arc::new(AtomicU64::new(0)));
        let lanes: Vec<_> = (0..2)
            .map(|_| {
                let (session, highest) = (Arc::clone(&session), Arc::clone(&highest));
                thread::spawn(move || {
                    let first = session.reserve(3);
                    if let Some(first) = first {
                        highest.fetch_max(first + 2, Ordering::Relaxed);
                    }
                    first
                })
            })
            .collect();
        let mut taken: Vec<_> = session.reserve(2).map(|first| (first, 2)).into_iter().collect();
        taken.extend(lanes.into_iter().filter_map(|lane| lane.join().unwrap()).map(|first| (first, 3)));
        taken.sort_unstable();
        assert!(taken.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(highest.load(Ordering::Relaxed) <= Session::REJECT_AFTER);
    });
}
