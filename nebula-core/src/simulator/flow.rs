//! A record of the datagrams on the simulated underlay, for readers of a failed test.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use crate::wire::header::Header;

/// One datagram that was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Time since the start of the simulation.
    pub at: Duration,
    /// Name of the sender; `stranger` for datagrams that a test put onto the underlay itself.
    pub sender: String,
    /// Name of the receiver, if a host has this endpoint.
    pub receiver: Option<String>,
    /// Source as the receiver sees it.
    pub from: SocketAddr,
    /// Destination as the sender wrote it.
    pub to: SocketAddr,
    /// The whole UDP payload.
    pub datagram: Vec<u8>,
    /// Number of copies that arrive.
    pub copies: usize,
}

impl Step {
    /// Type, index and counter, or a short description of anything else.
    #[must_use]
    pub fn describe(&self) -> String {
        match (&self.datagram[..], Header::parse(&self.datagram)) {
            ([byte], _) => format!("punch {byte}"),
            (_, Ok(header)) => format!("{:?} {:08x} #{}", header.kind, header.index, header.counter),
            (other, Err(_)) => format!("{} bytes", other.len()),
        }
    }
}

/// The most recent datagrams.
#[derive(Debug)]
pub(super) struct Flow {
    steps: VecDeque<Step>,
    kept: usize,
}

impl Default for Flow {
    fn default() -> Self {
        Self { steps: VecDeque::new(), kept: MAX_STEPS_KEPT }
    }
}

impl Flow {
    pub(super) fn push(&mut self, step: Step) {
        self.steps.push_back(step);
        self.keep(self.kept);
    }

    /// Keeps so many steps from now on.
    pub(super) fn keep(&mut self, count: usize) {
        self.kept = count;
        while self.steps.len() > count {
            self.steps.pop_front();
        }
    }

    pub(super) fn steps(&self) -> impl DoubleEndedIterator<Item = &Step> {
        self.steps.iter()
    }

    /// One column per host, one arrow per datagram; `x` marks a lost one.
    pub(super) fn diagram(&self, names: &[&str]) -> String {
        let skipped = self.steps.len().saturating_sub(MAX_STEPS_SHOWN);
        let mut names = names.to_vec();
        if self.steps.iter().skip(skipped).any(|step| step.sender == STRANGER) {
            names.push(STRANGER);
        }
        let mut text = format!("{:>11}", "");
        for name in &names {
            let _ = write!(text, "{name:^COLUMN_WIDTH$}");
        }
        let _ = writeln!(text, " type, index, counter, bytes, from -> to");
        if skipped > 0 {
            let _ = writeln!(text, "{:>10} ({skipped} earlier datagrams left out)", "");
        }
        for step in self.steps.iter().skip(skipped) {
            let _ = writeln!(text, "{}", step.line(&names));
        }
        text
    }
}

impl Step {
    fn line(&self, names: &[&str]) -> String {
        let column = |wanted: &str| names.iter().position(|name| *name == wanted);
        let mut arrow = vec![' '; COLUMN_WIDTH * names.len()];
        for at in 0..names.len() {
            arrow[at * COLUMN_WIDTH + COLUMN_WIDTH / 2] = '|';
        }
        let sender = column(&self.sender).unwrap_or(0);
        let receiver = self.receiver.as_deref().and_then(column).unwrap_or(sender);
        let [left, right] = [sender.min(receiver), sender.max(receiver)].map(|at| at * COLUMN_WIDTH + COLUMN_WIDTH / 2);
        arrow[left..right].fill('-');
        let head = if receiver > sender { '>' } else { '<' };
        arrow[receiver * COLUMN_WIDTH + COLUMN_WIDTH / 2] = if self.copies == 0 { 'x' } else { head };
        if receiver != sender || self.copies > 0 {
            arrow[sender * COLUMN_WIDTH + COLUMN_WIDTH / 2] = 'o';
        }
        let fate = match (self.copies, &self.receiver) {
            (0, None) => " nobody there",
            (0, Some(_)) => " lost",
            (1, _) => "",
            _ => " twice",
        };
        let arrow: String = arrow.into_iter().collect();
        let (at, what) = (self.at.as_secs_f64(), self.describe());
        format!("{at:>9.3}s {arrow} {what}, {} B, {} -> {}{fate}", self.datagram.len(), self.from, self.to)
    }
}

/// Sender of datagrams that come from no host.
pub(super) const STRANGER: &str = "stranger";
const MAX_STEPS_KEPT: usize = 100_000;
const MAX_STEPS_SHOWN: usize = 200;
const COLUMN_WIDTH: usize = 14;
