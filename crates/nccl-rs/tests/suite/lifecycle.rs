//! How communicators come to be, are derived from each other, and end.

use std::time::{Duration, Instant};

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Error, ReduceOp, Shrink};

use crate::rig::{LIMIT, Rig, dst, src};

fn sum_of_ones(rig: &Rig, comm: Communicator) -> i32 {
    let rank = rig.rank(comm);
    let mut sum = [1];
    rank.comm.all_reduce_in_place(&mut dst(&mut sum), ReduceOp::Sum, &rank.stream()).unwrap();
    rank.synchronize();
    sum[0]
}

#[test]
fn ranks_know_themselves() {
    let rig = Rig::new();
    let places = rig.ranks(3, &CommunicatorConfig::new(), |rank| {
        assert!(!rank.comm.is_blocking() && rank.comm.check().is_ok());
        (rank.comm.rank(), rank.comm.size(), rank.comm.device())
    });
    assert_eq!(places, [(0, 3, 0), (1, 3, 0), (2, 3, 0)]);
}

#[test]
fn a_communicator_is_split_by_colour_and_key() {
    let rig = Rig::new();
    let found = rig.ranks(4, &CommunicatorConfig::new(), |rank| {
        let own = rank.comm.rank();
        let key = -i32::try_from(own).unwrap();
        let color = (own < 3).then_some(7);
        let child = rank.comm.split(color, key, &CommunicatorConfig::new()).unwrap()?;
        let place = (child.rank(), child.size());
        Some((place, sum_of_ones(&rig, child)))
    });
    assert_eq!(found, [Some(((2, 3), 3)), Some(((1, 3), 3)), Some(((0, 3), 3)), None]);
}

#[test]
fn what_is_left_after_a_rank_is_gone_works_on() {
    let rig = Rig::new();
    let found = rig.ranks(3, &CommunicatorConfig::new(), |rank| {
        if rank.comm.rank() == 1 {
            return None;
        }
        // Never ends, since a rank is missing.
        let mut lost = [1];
        rank.comm.all_reduce_in_place(&mut dst(&mut lost), ReduceOp::Sum, &rank.stream()).unwrap();
        let child = rank.comm.shrink(&[1], Shrink::Abort, &CommunicatorConfig::new()).unwrap();
        let place = (child.rank(), child.size());
        rank.synchronize();
        Some((place, sum_of_ones(&rig, child)))
    });
    assert_eq!(found, [Some(((0, 2), 2)), None, Some(((1, 2), 2))]);
}

#[test]
fn a_communicator_grows_by_a_rank() {
    let rig = Rig::new();
    let id = std::sync::OnceLock::new();
    let (first, grown) = (rig.nccl.unique_id().unwrap(), &id);
    let sums = rig.threads(2, |number| {
        let comm = if number == 0 {
            let old = Communicator::init(&rig.nccl, &CommunicatorDesc::new(first, 0, 1)).unwrap();
            let id = *grown.get_or_init(|| old.grow_id().unwrap());
            old.grow(2, Some(id), &CommunicatorConfig::new()).unwrap()
        } else {
            Communicator::join(&rig.nccl, &CommunicatorDesc::new(*grown.wait(), 1, 2)).unwrap()
        };
        assert_eq!((comm.rank(), comm.size()), (number, 2));
        sum_of_ones(&rig, comm)
    });
    assert_eq!(sums, [2, 2]);
}

#[test]
fn all_ranks_finalize() {
    let rig = Rig::new();
    for config in [CommunicatorConfig::new(), CommunicatorConfig::new().blocking(true)] {
        rig.ranks(2, &config, |rank| rank.comm.finalize(LIMIT).unwrap());
    }
    assert_eq!((rig.library.calls("ncclCommDestroy"), rig.library.calls("ncclCommAbort")), (4, 0));
}

#[test]
fn a_rank_that_finalizes_alone_gets_its_time_back() {
    let rig = Rig::new();
    let ended = rig.ranks(2, &CommunicatorConfig::new(), |rank| {
        if rank.comm.rank() == 0 {
            rank.comm.finalize(Duration::from_millis(20))
        } else {
            rank.comm.abort(LIMIT)
        }
    });
    assert!(matches!(ended[0], Err(Error::TimedOut { what: "ncclCommFinalize", .. })));
    assert_eq!(ended[1], Ok(()));
}

#[test]
fn communicators_dropped_in_another_order_on_each_rank_hang_nobody() {
    let rig = Rig::new();
    for blocking in [true, false] {
        let config = CommunicatorConfig::new().blocking(blocking);
        let (a, b) = (rig.nccl.unique_id().unwrap(), rig.nccl.unique_id().unwrap());
        let start = Instant::now();
        rig.threads(2, |number| {
            let make = |id| {
                let desc = CommunicatorDesc::new(id, number, 2).config(config.clone());
                Communicator::init(&rig.nccl, &desc).unwrap()
            };
            let (a, b) = (make(a), make(b));
            if number == 0 {
                drop(a);
                drop(b);
            } else {
                drop(b);
                drop(a);
            }
        });
        assert!(start.elapsed() < LIMIT);
    }
}

#[test]
fn sixty_four_communicators_come_and_go() {
    let rig = Rig::new();
    for _ in 0..64 {
        let sums = rig.ranks(2, &CommunicatorConfig::new(), |rank| {
            let mut sum = [1];
            rank.comm.all_reduce(&src(&[1]), &mut dst(&mut sum), ReduceOp::Sum, &rank.stream()).unwrap();
            rank.synchronize();
            rank.comm.finalize(LIMIT).unwrap();
            sum[0]
        });
        assert_eq!(sums, [2, 2]);
    }
}

#[test]
fn memory_is_given_back_and_taken_again() {
    let rig = Rig::new();
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        rank.comm.suspend().unwrap();
        rank.comm.resume().unwrap();
        assert_eq!(rank.comm.memory_bytes(), Ok(0));
        rank.comm.revoke().unwrap();
    });
}
