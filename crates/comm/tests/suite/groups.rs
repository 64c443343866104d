//! Communicators out of communicators.

use warpweft_comm::{CommConfig, CommError, Communicator};
use warpweft_core_types::{Backend, DType, ErrorClass, Features, ReduceOp};
use warpweft_host::HostBackend;

use crate::rig::{PATIENCE, Place, join, ranks, read};

/// Whether a sum over the communicator is what it has to be.
fn sums(place: &Place, comm: &Communicator) -> bool {
    let word = place.numbers(&[1]);
    comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE).unwrap();
    read(&word) == [comm.world_size()]
}

#[test]
fn ranks_part_by_colour_in_the_order_of_their_keys() {
    let places = ranks(5, &CommConfig::default(), |place| {
        let rank = place.rank();
        let color = (rank != 4).then_some(rank % 2);
        let part = place.comm.split(color, -(rank as i32), PATIENCE).unwrap();
        assert!(sums(&place, &place.comm));
        part.map(|part| {
            assert!(sums(&place, &part));
            (part.rank(), part.world_size())
        })
    });
    // The higher rank has the lower key.
    assert_eq!(places, [Some((1, 2)), Some((1, 2)), Some((0, 2)), Some((0, 2)), None]);
}

#[test]
fn ranks_of_one_host_are_counted() {
    let places = ranks(3, &CommConfig::default(), |place| (place.comm.local_rank(), place.comm.node()));
    assert_eq!(places, [(0, 0), (1, 0), (2, 0)]);
}

#[test]
fn two_ranks_on_one_device_are_refused_on_all() {
    let backend = HostBackend::with_devices(1).unwrap();
    let meeting = warpweft_bootstrap::Meeting::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (meeting, backend) = (std::sync::Arc::clone(&meeting), &backend);
            scope.spawn(move || {
                let device = backend.open(0, Features::empty()).unwrap();
                let made =
                    Communicator::create(join(meeting, rank, 2), &device, &CommConfig::default(), PATIENCE);
                let error = made.unwrap_err();
                assert!(matches!(error, CommError::DuplicateDevice { ranks: [0, 1], .. }), "{error}");
            });
        }
    });
}

#[test]
fn ranks_that_are_configured_differently_are_told_so() {
    let backend = HostBackend::with_devices(2).unwrap();
    let meeting = warpweft_bootstrap::Meeting::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (meeting, backend) = (std::sync::Arc::clone(&meeting), &backend);
            scope.spawn(move || {
                let device = backend.open(rank, Features::empty()).unwrap();
                let config = CommConfig { validate: rank == 1, ..CommConfig::default() };
                let error =
                    Communicator::create(join(meeting, rank, 2), &device, &config, PATIENCE).unwrap_err();
                assert!(matches!(error, CommError::Disagreement { ranks: [0, 1], .. }), "{error}");
            });
        }
    });
}

#[test]
fn communicators_are_dropped_in_any_order() {
    ranks(2, &CommConfig::default(), |place| {
        let parts: Vec<_> =
            (0..3).map(|_| place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap()).collect();
        assert!(parts.iter().all(|part| sums(&place, part)));
        let mut parts = parts;
        if place.rank() == 1 {
            parts.reverse();
        }
        parts.into_iter().for_each(drop);
        assert!(sums(&place, &place.comm));
    });
}

#[test]
fn those_who_are_left_go_on_and_one_who_comes_back_joins() {
    let backend = HostBackend::with_devices(4).unwrap();
    let places = ranks(3, &CommConfig::default(), |place| {
        assert!(sums(&place, &place.comm));
        place.comm.barrier(PATIENCE).unwrap();
        if place.rank() == 1 {
            return None;
        }
        let word = place.numbers(&[1]);
        let lost = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE);
        assert_eq!(lost.unwrap_err().class(), ErrorClass::PeerLost);
        assert!(!place.comm.is_healthy());
        let shrunk = place.comm.shrink(PATIENCE).unwrap();
        assert!(sums(&place, &shrunk));
        // The old one stays as it is.
        assert!(
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE).is_err()
        );
        let successor = shrunk.group().successor().unwrap();
        Some((shrunk.rank(), shrunk, successor, place))
    });
    let mut survivors: Vec<_> = places.into_iter().flatten().collect();
    assert_eq!(survivors.iter().map(|(rank, ..)| *rank).collect::<Vec<_>>(), [0, 1]);
    let successor = survivors[0].2.clone();
    std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| {
            let config = warpweft_bootstrap::JoinConfig::new(warpweft_bootstrap::Rank(0), 3);
            let group = warpweft_bootstrap::Group::rejoin(&successor, config, PATIENCE).unwrap();
            let device = backend.open(3, Features::empty()).unwrap();
            let comm = Communicator::create(group, &device, &CommConfig::default(), PATIENCE).unwrap();
            let place = Place { comm, device };
            assert_eq!(place.rank(), 2);
            assert!(sums(&place, &place.comm));
            place
        });
        let others: Vec<_> = survivors
            .drain(..)
            .map(|(_, shrunk, _, place)| {
                scope.spawn(move || {
                    let config = warpweft_bootstrap::ReformConfig { newcomers: 1, ..Default::default() };
                    let grown = shrunk.reform(&config, PATIENCE).unwrap();
                    assert_eq!(grown.world_size(), 3);
                    assert!(sums(&place, &grown));
                    grown
                })
            })
            .collect();
        let grown: Vec<_> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
        drop((grown, newcomer.join().unwrap()));
    });
}
