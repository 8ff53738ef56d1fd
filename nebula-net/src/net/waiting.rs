//! Waits for the stack as one of several: each has its turn, and hands it on when it gives up.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::driver::Shared;
use crate::stack::{Stack, Ticket, Waiter};

/// A future that asks the stack each time that it is woken.
pub(crate) struct Waiting<'a, P, L>
where
    L: FnMut(&mut Stack, &mut Ticket),
{
    shared: &'a Shared,
    ticket: Ticket,
    poll: P,
    leave: L,
}

/// Waits until `poll` has a result. `leave` gives up the place that it took.
pub(crate) fn wait_for<T, P, L>(shared: &Shared, poll: P, leave: L) -> Waiting<'_, P, L>
where
    P: FnMut(&mut Stack, Instant, Waiter<'_>) -> Poll<T>,
    L: FnMut(&mut Stack, &mut Ticket),
{
    Waiting { shared, ticket: Ticket::default(), poll, leave }
}

impl<T, P, L> Future for Waiting<'_, P, L>
where
    P: FnMut(&mut Stack, Instant, Waiter<'_>) -> Poll<T> + Unpin,
    L: FnMut(&mut Stack, &mut Ticket) + Unpin,
{
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Self { shared, ticket, poll, .. } = &mut *self;
        shared.with(|stack, now| poll(stack, now, (context, ticket).into()))
    }
}

impl<P, L> Drop for Waiting<'_, P, L>
where
    L: FnMut(&mut Stack, &mut Ticket),
{
    fn drop(&mut self) {
        if self.ticket.is_taken() {
            let Self { shared, ticket, leave, .. } = self;
            shared.with(|stack, _| leave(stack, ticket));
        }
    }
}
