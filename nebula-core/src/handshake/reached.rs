//! Who can have got a message.

use crate::Origin;

/// Where a message was sent. Who shows that it got a message that was sent to one place only is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Reached {
    /// Not yet sent.
    #[default]
    Nowhere,
    /// This place.
    Only(Origin),
    /// Several places.
    Several,
}

impl Reached {
    /// It is sent there.
    pub(crate) fn note(&mut self, to: Origin) {
        *self = match *self {
            Self::Nowhere => Self::Only(to),
            Self::Only(other) if other == to => Self::Only(to),
            Self::Only(_) | Self::Several => Self::Several,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_went_to_two_places_proves_nothing() {
        let [here, there] = [1, 2].map(|host| Origin::from(std::net::SocketAddr::from(([192, 0, 2, host], 4242))));
        let mut reached = Reached::default();
        reached.note(here);
        reached.note(here);
        assert_eq!(reached, Reached::Only(here));
        reached.note(there);
        reached.note(here);
        assert_eq!(reached, Reached::Several);
    }
}
