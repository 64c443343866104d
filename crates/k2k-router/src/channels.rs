//! Channels whose senders wait for room: in a circle, all of them would wait for each other.

use std::collections::BTreeMap;

use crate::actor::ActorId;

/// The channels that were declared, from each actor to those it sends to.
#[derive(Debug, Default)]
pub(crate) struct Channels(BTreeMap<ActorId, Vec<ActorId>>);

impl Channels {
    /// Declares that `from` waits for room at `to`.
    ///
    /// # Errors
    ///
    /// The circle that it would close, which begins and ends with `from`.
    pub(crate) fn declare(&mut self, from: ActorId, to: ActorId) -> Result<(), Vec<ActorId>> {
        if let Some(way) = self.way(to, from) {
            return Err([from].into_iter().chain(way).collect());
        }
        let known = self.0.entry(from).or_default();
        if !known.contains(&to) {
            known.push(to);
        }
        Ok(())
    }

    /// Forgets an actor that ended.
    pub(crate) fn forget(&mut self, actor: ActorId) {
        self.0.remove(&actor);
        self.0.values_mut().for_each(|to| to.retain(|&known| known != actor));
    }

    /// The actors from one to another along declared channels, both included.
    fn way(&self, from: ActorId, to: ActorId) -> Option<Vec<ActorId>> {
        let (mut reached, mut todo) = (BTreeMap::from([(from, None)]), vec![from]);
        while let Some(at) = todo.pop() {
            if at == to {
                let mut way: Vec<_> =
                    std::iter::successors(Some(at), |actor| reached.get(actor).copied().flatten()).collect();
                way.reverse();
                return Some(way);
            }
            for &next in self.0.get(&at).into_iter().flatten() {
                reached.entry(next).or_insert_with(|| {
                    todo.push(next);
                    Some(at)
                });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declare(channels: &mut Channels, from: u32, to: u32) -> Result<(), Vec<u32>> {
        let ids = |circle: Vec<ActorId>| circle.into_iter().map(|actor| actor.0).collect();
        channels.declare(ActorId(from), ActorId(to)).map_err(ids)
    }

    #[test]
    fn a_circle_is_refused_by_name_and_leaves_no_trace() {
        let mut channels = Channels::default();
        for (from, to) in [(1, 2), (2, 3), (1, 3), (3, 4), (1, 2)] {
            assert_eq!(declare(&mut channels, from, to), Ok(()));
        }
        assert_eq!(declare(&mut channels, 4, 2), Err(vec![4, 2, 3, 4]));
        assert_eq!(declare(&mut channels, 5, 5), Err(vec![5, 5]));
        assert_eq!(declare(&mut channels, 5, 4), Ok(()));
        channels.forget(ActorId(3));
        assert_eq!(declare(&mut channels, 4, 2), Ok(()));
    }
}
