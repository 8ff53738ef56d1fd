//! How far each exporter is, in the store itself: a number is one of this file and of no other.

use rusqlite::{Connection, params};

use super::StoreError;
use crate::flows::export::Target;

/// The number of the record that each exporter sent last.
#[derive(Debug, Default)]
pub(super) struct Exports([Option<Position>; Target::ALL.len()]);

#[derive(Debug, Clone, Copy)]
struct Position {
    seq: i64,
    /// As it is in the file.
    kept: i64,
}

impl Exports {
    pub(super) fn read(connection: &Connection) -> Result<Self, StoreError> {
        let mut exports = Self::default();
        let mut statement = connection.prepare("SELECT target, seq FROM exports")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let (name, seq): (String, i64) = (row.get(0)?, row.get(1)?);
            if let Some(target) = Target::ALL.into_iter().find(|target| target.name() == name) {
                exports.0[target as usize] = Some(Position { seq, kept: seq });
            }
        }
        Ok(exports)
    }

    /// The highest number of all.
    pub(super) fn last(&self) -> i64 {
        self.0.iter().flatten().map(|position| position.seq).max().unwrap_or(0)
    }

    /// These are all there are. One that is not in the file begins after `newest`.
    pub(super) fn follow(
        &mut self,
        connection: &Connection,
        targets: &[Target],
        newest: u64,
    ) -> Result<Vec<(Target, u64)>, StoreError> {
        let mut positions = Vec::new();
        for target in Target::ALL {
            let known = &mut self.0[target as usize];
            if !targets.contains(&target) {
                if known.take().is_some() {
                    connection.execute("DELETE FROM exports WHERE target = ?", params![target.name()])?;
                }
                continue;
            }
            let seq = match known {
                Some(known) => known.seq,
                None => {
                    let seq = newest.cast_signed();
                    connection.execute("INSERT INTO exports VALUES(?, ?)", params![target.name(), seq])?;
                    *known = Some(Position { seq, kept: seq });
                    seq
                }
            };
            positions.push((target, seq.cast_unsigned()));
        }
        Ok(positions)
    }

    pub(super) fn exported(&mut self, target: Target, number: u64) {
        if let Some(position) = &mut self.0[target as usize] {
            position.seq = position.seq.max(number.cast_signed());
        }
    }

    /// Writes what has changed.
    pub(super) fn keep(&mut self, connection: &Connection) -> Result<(), StoreError> {
        for target in Target::ALL {
            if let Some(position) = self.0[target as usize].as_mut().filter(|position| position.seq != position.kept) {
                let sql = "UPDATE exports SET seq = ? WHERE target = ?";
                connection.prepare_cached(sql)?.execute(params![position.seq, target.name()])?;
                position.kept = position.seq;
            }
        }
        Ok(())
    }

    /// Counts a record that is gone, for the exporters that had not sent it.
    pub(super) fn gone(&self, seq: i64, unexported: &mut [u64; Target::ALL.len()]) {
        for (position, count) in self.0.iter().zip(unexported) {
            *count += u64::from(position.is_some_and(|position| position.seq < seq));
        }
    }
}
