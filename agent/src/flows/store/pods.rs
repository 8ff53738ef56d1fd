//! The pods that have records, and how much each of them has.

use std::collections::{BTreeMap, HashMap, HashSet};

use nebula_cni_contract::flow_records::FlowRecords;
use rusqlite::{Connection, params};

use super::StoreError;
use crate::flows::Attached;

/// By number.
#[derive(Debug, Default)]
pub(super) struct Pods {
    by_id: BTreeMap<i64, Pod>,
    ids: HashMap<String, i64>,
}

/// One attachment of a pod.
#[derive(Debug, Default)]
pub(super) struct Pod {
    attachment: String,
    uid: String,
    /// Flows are numbered from here: large numbers take more bytes.
    first_flow: i64,
    pub(super) next: u64,
    lost_now: u64,
    rows: u64,
    /// No flow in the file has a higher number.
    newest_flow: Option<i64>,
    /// Flows up to this one were evicted: what they carried was counted before.
    given_way: Option<i64>,
    /// Bytes of its words, and how many were in use when that was last looked at.
    words: u64,
    swept: u64,
}

impl Pod {
    /// What its records take, in records.
    fn cost(&self) -> u64 {
        self.rows + self.words / BYTES_OF_A_RECORD
    }
}

impl Pods {
    pub(super) fn read(connection: &Connection) -> Result<Self, StoreError> {
        let mut pods = Self::default();
        let mut statement = connection.prepare("SELECT id, attachment, uid, first_flow, next, lost_now FROM pods")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let pod = Pod {
                attachment: row.get(1)?,
                uid: row.get(2)?,
                first_flow: row.get(3)?,
                next: i64::cast_unsigned(row.get(4)?),
                lost_now: i64::cast_unsigned(row.get(5)?),
                ..Pod::default()
            };
            pods.ids.insert(pod.attachment.clone(), row.get(0)?);
            pods.by_id.insert(row.get(0)?, pod);
        }
        let sums = [
            "SELECT pod, count(*), min(flow), max(flow) FROM flows GROUP BY pod",
            "SELECT pod, sum(length(CAST(body AS BLOB))) FROM words GROUP BY pod",
        ];
        for (at, sql) in sums.into_iter().enumerate() {
            let mut statement = connection.prepare(sql)?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let Some(pod) = pods.by_id.get_mut(&row.get(0)?) else {
                    return Err(StoreError::Damaged("records of a pod that is not in it".to_owned()));
                };
                let sum = i64::cast_unsigned(row.get(1)?);
                if at == 0 {
                    let first: i64 = row.get(2)?;
                    (pod.rows, pod.given_way, pod.newest_flow) = (sum, first.checked_sub(1), Some(row.get(3)?));
                } else {
                    pod.words = sum;
                }
            }
        }
        Ok(pods)
    }

    pub(super) fn by_attachment(&self, attachment: &str) -> Option<(i64, &Pod)> {
        let id = *self.ids.get(attachment)?;
        Some((id, self.by_id.get(&id)?))
    }

    /// Whether an answer without records says something new.
    pub(super) fn is_news(&self, attachment: &str, answer: &FlowRecords) -> bool {
        self.by_attachment(attachment).is_some_and(|(_, pod)| (pod.next, pod.lost_now) != (answer.next, answer.lost))
    }

    /// Number of a pod, which is put into the file if it is new.
    pub(super) fn of(&mut self, connection: &Connection, attached: &Attached, first: i64) -> Result<i64, StoreError> {
        if let Some((id, _)) = self.by_attachment(&attached.attachment) {
            return Ok(id);
        }
        let sql = "INSERT INTO pods(attachment, namespace, name, uid, first_flow, next, lost, lost_now) VALUES(?,?,?,?,?,0,0,0)";
        let (of, key) = (&attached.pod, &attached.attachment);
        connection.prepare_cached(sql)?.execute(params![key, of.namespace, of.name, of.uid, first])?;
        let id = connection.last_insert_rowid();
        let pod = Pod { attachment: key.clone(), uid: of.uid.clone(), first_flow: first, ..Pod::default() };
        self.ids.insert(key.clone(), id);
        self.by_id.insert(id, pod);
        Ok(id)
    }

    /// Notes where an instance is asked from the next time. Returns how many records it lost since the last time.
    pub(super) fn answered(
        &mut self,
        connection: &Connection,
        id: i64,
        next: u64,
        lost: u64,
    ) -> Result<u64, StoreError> {
        let Some(pod) = self.by_id.get_mut(&id) else { return Ok(0) };
        // A new process counts from 0, so a smaller number is all of its own.
        let new = if lost >= pod.lost_now { lost - pod.lost_now } else { lost };
        if (pod.next, pod.lost_now) == (next, lost) {
            return Ok(0);
        }
        (pod.next, pod.lost_now) = (next, lost);
        // An instance may say any number.
        let new = new.min(MOST_LOST);
        let sql = "UPDATE pods SET next = ?, lost = lost + ?, lost_now = ? WHERE id = ?";
        connection.prepare_cached(sql)?.execute(params![
            next.cast_signed(),
            new.cast_signed(),
            lost.cast_signed(),
            id
        ])?;
        Ok(new)
    }

    /// Number of a flow as it is in the file.
    pub(super) fn short(&self, id: i64, flow: i64) -> i64 {
        flow.wrapping_sub(self.by_id.get(&id).map_or(0, |pod| pod.first_flow))
    }

    /// Adds `change` to the number of records.
    pub(super) fn changed_by(&mut self, id: i64, change: i64) {
        if let Some(pod) = self.by_id.get_mut(&id) {
            pod.rows = pod.rows.saturating_add_signed(change);
        }
    }

    /// Notes that a flow is in the file.
    pub(super) fn has(&mut self, id: i64, flow: i64) {
        if let Some(pod) = self.by_id.get_mut(&id) {
            pod.newest_flow = pod.newest_flow.max(Some(flow));
        }
    }

    /// Whether a flow may be in the file: most records are the first of their flow.
    pub(super) fn may_have(&self, id: i64, flow: i64) -> bool {
        self.by_id.get(&id).and_then(|pod| pod.newest_flow).is_some_and(|newest| flow <= newest)
    }

    /// This flow gave way.
    pub(super) fn gave_way(&mut self, id: i64, flow: i64) {
        if let Some(pod) = self.by_id.get_mut(&id) {
            pod.given_way = pod.given_way.max(Some(flow));
        }
    }

    /// Whether a flow that is not in the file may have been there.
    pub(super) fn has_given_way(&self, id: i64, flow: i64) -> bool {
        self.by_id.get(&id).and_then(|pod| pod.given_way).is_some_and(|last| flow <= last)
    }

    /// Adds to the bytes of words in use.
    pub(super) fn spoke(&mut self, id: i64, bytes: u64) {
        if let Some(pod) = self.by_id.get_mut(&id) {
            pod.words += bytes;
        }
    }

    /// Sets the bytes of its words that are in use, after the others were deleted.
    pub(super) fn swept(&mut self, id: i64, bytes: u64) {
        if let Some(pod) = self.by_id.get_mut(&id) {
            (pod.words, pod.swept) = (bytes, bytes);
        }
    }

    /// Whether many of its words may be out of use.
    pub(super) fn has_old_words(&self, id: i64) -> bool {
        self.by_id.get(&id).is_some_and(Self::is_wordy)
    }

    /// One of whose words many may be out of use.
    pub(super) fn with_old_words(&self) -> Option<i64> {
        self.by_id.iter().find(|(_, pod)| Self::is_wordy(pod)).map(|(id, _)| *id)
    }

    fn is_wordy(pod: &Pod) -> bool {
        pod.words > pod.swept.saturating_mul(2).saturating_add(SWEEP_FROM)
    }

    /// Of the pod that has most, the attachment that has most; `None` if there is nothing at all.
    pub(super) fn largest(&self) -> Option<i64> {
        let mut shares: HashMap<&str, u64> = HashMap::new();
        for pod in self.by_id.values() {
            *shares.entry(&pod.uid).or_default() += pod.cost();
        }
        let share = |pod: &Pod| shares.get(&*pod.uid).copied().unwrap_or_default();
        let largest = self.by_id.iter().max_by_key(|(_, pod)| (share(pod), pod.cost()))?;
        (largest.1.cost() > 0).then_some(*largest.0)
    }

    /// Those that have no records and are not attached.
    pub(super) fn gone(&self, attached: &HashSet<String>) -> Vec<i64> {
        let gone = self.by_id.iter().filter(|(_, pod)| pod.rows == 0 && !attached.contains(&pod.attachment));
        gone.map(|(id, _)| *id).collect()
    }

    pub(super) fn forget(&mut self, id: i64) {
        if let Some(pod) = self.by_id.remove(&id) {
            self.ids.remove(&pod.attachment);
        }
    }

    /// Records of all.
    pub(super) fn records(&self) -> u64 {
        self.by_id.values().map(|pod| pod.rows).sum()
    }
}

/// About, with its place in the index.
const BYTES_OF_A_RECORD: u64 = 80;
const SWEEP_FROM: u64 = 256 << 10;
const MOST_LOST: u64 = 1 << 32;
