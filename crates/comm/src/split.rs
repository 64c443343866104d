//! How the ranks of a split find each other.

use warpweft_bootstrap::{Bind, Group, Host, JoinConfig, ParseUniqueIdError, Rank, Rendezvous, UniqueId};
use warpweft_core_types::Deadline;

use crate::CommError;

/// How this rank joins the group of its colour.
pub(crate) fn part(
    group: &Group,
    color: Option<u32>,
    key: i32,
    deadline: Deadline,
) -> Result<Option<(Rendezvous, JoinConfig)>, CommError> {
    let own = group.rank();
    let wish = postcard::to_allocvec(&(color, key)).unwrap_or_default();
    let wishes = group.all_gather("colours of a split", &wish, deadline)?;
    let mut peers: Vec<(i32, Rank)> = Rank::all(group.size())
        .zip(&wishes)
        .filter_map(|(rank, wish)| {
            let (other, key): (Option<u32>, i32) = postcard::from_bytes(wish).ok()?;
            (color.is_some() && other == color).then_some((key, rank))
        })
        .collect();
    peers.sort_unstable();
    let leads = peers.first().is_some_and(|(_, rank)| *rank == own);
    // A leader that cannot host says so by an id that is none.
    let host = leads.then(|| Host::new(&bind(group))).transpose();
    let own_id = host.as_ref().ok().and_then(Option::as_ref).map(|host| host.id().as_bytes().to_vec());
    let ids = group.all_gather("ids of a split", &own_id.unwrap_or_default(), deadline)?;
    let host = host?;
    let (Some((_, leader)), Some(place)) = (peers.first(), peers.iter().position(|(_, rank)| *rank == own))
    else {
        return Ok(None);
    };
    let rendezvous = match host {
        Some(host) => Rendezvous::Hosting(host),
        None => {
            let id = ids.get(leader.index()).map(Vec::as_slice).unwrap_or_default();
            let id = UniqueId::from_bytes(id);
            let wrong = |error: ParseUniqueIdError| CommError::NoEngine {
                reason: format!("rank {leader} made no id: {error}"),
            };
            Rendezvous::Id(id.map_err(wrong)?)
        }
    };
    let config = JoinConfig::new(Rank(to_u32(place)), to_u32(peers.len()));
    Ok(Some((rendezvous, JoinConfig { bind: bind(group), ..config })))
}

/// Where a new group listens: as this one does.
fn bind(group: &Group) -> Bind {
    group.bind().clone()
}

/// Groups have fewer members than this holds.
pub(crate) fn to_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
