//! Who waits for one thing: any number of tasks and threads, each woken in its turn.

use std::task::{Context, Poll, Waker};

/// Tasks that wait, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    waiting: Vec<(u64, Waker)>,
    last: u64,
}

/// The place of a task among those who wait for the same. One that is dropped while it waits has to be given up, so
/// that the next one gets its turn: [`Stack::leave_accept`](super::Stack::leave_accept) and so on.
#[derive(Debug, Default)]
pub struct Ticket(Option<u64>);

/// How a task waits.
///
/// A [`Context`] alone takes the one place that whatever polls by hand shares: as with tokio's `poll_` functions,
/// only the last of those is woken. With a [`Ticket`], a task has a place of its own.
#[derive(Debug)]
pub struct Waiter<'w> {
    waker: &'w Waker,
    ticket: Option<&'w mut Ticket>,
}

/// The place of those who poll by hand.
const BY_HAND: u64 = 0;

impl<'w> From<&'w mut Context<'_>> for Waiter<'w> {
    fn from(context: &'w mut Context<'_>) -> Self {
        Self { waker: context.waker(), ticket: None }
    }
}

impl<'w> From<(&'w mut Context<'_>, &'w mut Ticket)> for Waiter<'w> {
    fn from((context, ticket): (&'w mut Context<'_>, &'w mut Ticket)) -> Self {
        Self { waker: context.waker(), ticket: Some(ticket) }
    }
}

impl Waiter<'_> {
    /// What it waited for is there.
    pub(crate) fn served<T>(self, result: T) -> Poll<T> {
        if let Some(ticket) = self.ticket {
            ticket.0 = None;
        }
        Poll::Ready(result)
    }
}

impl Ticket {
    /// Whether its task waits, or was woken and has not looked yet.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.0.is_some()
    }
}

impl Waiters {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Lets a task wait, which keeps its place if it has one.
    pub(crate) fn wait<T>(&mut self, waiter: Waiter<'_>) -> Poll<T> {
        let place = match waiter.ticket {
            None => BY_HAND,
            Some(ticket) => *ticket.0.get_or_insert_with(|| {
                self.last += 1;
                self.last
            }),
        };
        match self.waiting.iter_mut().find(|(known, _)| *known == place) {
            Some((_, waker)) => waker.clone_from(waiter.waker),
            None => self.waiting.push((place, waiter.waker.clone())),
        }
        Poll::Pending
    }

    /// Wakes the task that has waited longest. One that polls by hand may have lost interest without a word, so it
    /// counts for nothing.
    pub(crate) fn wake_one(&mut self) {
        while !self.waiting.is_empty() {
            let (place, waker) = self.waiting.remove(0);
            waker.wake();
            if place != BY_HAND {
                break;
            }
        }
        if self.waiting.is_empty() {
            self.waiting = Vec::new();
        }
    }

    pub(crate) fn wake_all(&mut self) {
        std::mem::take(&mut self.waiting).into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// A task waits no longer. If it was woken already, the next one is.
    pub(crate) fn leave(&mut self, ticket: &mut Ticket) {
        let Some(place) = ticket.0.take() else { return };
        match self.waiting.iter().position(|(known, _)| *known == place) {
            Some(at) => _ = self.waiting.remove(at),
            None => self.wake_one(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Three tasks that wait; how often each was woken.
    struct Tasks {
        waiters: Waiters,
        tickets: [Ticket; 3],
        counts: [Arc<Count>; 3],
    }

    impl Tasks {
        fn new() -> Self {
            let mut tasks =
                Self { waiters: Waiters::default(), tickets: Default::default(), counts: Default::default() };
            (0..3).for_each(|task| tasks.wait(task));
            tasks
        }

        fn wait(&mut self, task: usize) {
            let waker = Waker::from(Arc::clone(&self.counts[task]));
            let mut context = Context::from_waker(&waker);
            let _: Poll<()> = self.waiters.wait((&mut context, &mut self.tickets[task]).into());
        }

        fn woken(&self) -> [usize; 3] {
            self.counts.each_ref().map(|count| count.0.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn each_is_woken_in_its_turn() {
        let mut tasks = Tasks::new();
        tasks.waiters.wake_one();
        // Looking again does not change the order, nor make a second place.
        tasks.wait(1);
        tasks.waiters.wake_one();
        assert_eq!(tasks.woken(), [1, 1, 0]);
        // The first one found nothing, and waits again behind the third.
        tasks.wait(0);
        tasks.waiters.wake_one();
        assert_eq!(tasks.woken(), [1, 1, 1]);
        tasks.waiters.wake_all();
        assert_eq!((tasks.woken(), tasks.waiters.is_empty()), ([2, 1, 1], true));
    }

    #[test]
    fn who_leaves_hands_on_the_turn_that_it_got() {
        let mut tasks = Tasks::new();
        tasks.waiters.leave(&mut tasks.tickets[0]);
        assert_eq!(tasks.woken(), [0, 0, 0]);
        tasks.waiters.wake_one();
        assert_eq!(tasks.woken(), [0, 1, 0]);
        tasks.waiters.leave(&mut tasks.tickets[1]);
        assert_eq!(tasks.woken(), [0, 1, 1]);
        assert!(!tasks.tickets[1].is_taken());
        // Who was served has nothing to hand on.
        tasks.wait(0);
        let mut context = Context::from_waker(Waker::noop());
        assert!(Waiter::from((&mut context, &mut tasks.tickets[2])).served(()).is_ready());
        tasks.waiters.leave(&mut tasks.tickets[2]);
        assert_eq!(tasks.woken(), [0, 1, 1]);
    }

    #[test]
    fn one_that_polls_by_hand_takes_no_turn_of_others() {
        let mut waiters = Waiters::default();
        let _: Poll<()> = waiters.wait((&mut Context::from_waker(Waker::noop())).into());
        let mut tasks = Tasks { waiters, tickets: Default::default(), counts: Default::default() };
        tasks.wait(0);
        tasks.waiters.wake_one();
        assert_eq!(tasks.woken(), [1, 0, 0]);
    }
}
