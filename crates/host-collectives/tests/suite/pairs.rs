//! Sends and receives.

use std::time::Duration;

use warpweft_core_types::{CollectiveFailure, CollectiveOp, DType, ReduceOp};
use warpweft_host_collectives::{HostCommunicator, HostConfig, HostFailure, SliceCall, Slices};

use crate::rig::{WITHIN, by_slots, directly, each, met};

fn send(to: u32, src: &[u8]) -> SliceCall<'_> {
    let op = CollectiveOp::Send { to };
    SliceCall { op, dtype: DType::U8, operands: Slices::Src(src), custom: None }
}

fn recv(from: u32, dst: &mut [u8]) -> SliceCall<'_> {
    let op = CollectiveOp::Recv { from };
    SliceCall { op, dtype: DType::U8, operands: Slices::Dst(dst), custom: None }
}

fn message(from: u32, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(u64::from(from) + 1);
    (0..bytes).map(|_| random.u8(..)).collect()
}

fn configs() -> [HostConfig; 3] {
    [by_slots(), directly(), HostConfig::default()]
}

#[test]
fn what_is_sent_arrives_in_order() {
    for config in configs() {
        each(met(2, &config), |communicator| {
            for bytes in [0, 1, 63, 64, 65, 255, 256, 257, 5000, 100_003] {
                if communicator.rank() == 0 {
                    communicator.run_slices(&mut [send(1, &message(0, bytes))], WITHIN).unwrap();
                    communicator.run_slices(&mut [send(1, &message(7, bytes))], WITHIN).unwrap();
                } else {
                    for seed in [0, 7] {
                        let mut got = vec![0; bytes];
                        communicator.run_slices(&mut [recv(0, &mut got)], WITHIN).unwrap();
                        assert_eq!(got, message(seed, bytes));
                    }
                }
            }
            let progress = communicator.progress()[1];
            assert!(communicator.rank() == 0 || progress.received == 20, "{progress:?}");
        });
    }
}

/// Everybody gives everybody something, itself too, twice.
fn exchange(communicator: &HostCommunicator, bytes: usize) {
    let (rank, size) = (communicator.rank(), communicator.size());
    let first = message(rank, bytes);
    let second = message(rank + 100, bytes / 2);
    let mut got = vec![(vec![0; bytes], vec![0; bytes / 2]); size as usize];
    let mut calls: Vec<SliceCall<'_>> = (0..size).map(|to| send(to, &first)).collect();
    calls.extend((0..size).map(|to| send(to, &second)));
    for (from, (first, second)) in (0..size).zip(&mut got) {
        calls.push(recv(from, first));
        calls.push(recv(from, second));
    }
    communicator.run_slices(&mut calls, WITHIN).unwrap();
    for (from, (first, second)) in (0..size).zip(got) {
        assert_eq!(first, message(from, bytes), "from {from} to {rank}");
        assert_eq!(second, message(from + 100, bytes / 2), "from {from} to {rank}");
    }
}

#[test]
fn all_send_and_receive_at_once() {
    for config in configs() {
        for size in [1, 2, 5] {
            each(met(size, &config), |communicator| {
                for bytes in [0, 10, 64, 1000, 60_000] {
                    exchange(&communicator, bytes);
                }
            });
        }
    }
}

#[test]
fn both_send_and_then_receive_in_a_group() {
    for config in configs() {
        each(met(2, &config), |communicator| {
            let other = 1 - communicator.rank();
            let (src, mut dst) = (message(communicator.rank(), 1 << 20), vec![0; 1 << 20]);
            communicator.run_slices(&mut [send(other, &src), recv(other, &mut dst)], WITHIN).unwrap();
            assert_eq!(dst, message(other, 1 << 20));
        });
    }
}

#[test]
fn both_send_something_large_without_a_group_and_time_out_by_name() {
    for config in configs() {
        let failures = each(met(2, &config), |communicator| {
            let other = 1 - communicator.rank();
            let src = message(communicator.rank(), 1 << 20);
            communicator.run_slices(&mut [send(other, &src)], Duration::from_millis(50)).unwrap_err()
        });
        let HostFailure::Collective(CollectiveFailure::TimedOut { number, op, waiting, .. }) = &failures[0]
        else {
            panic!("{failures:?}")
        };
        assert_eq!(*number, 1);
        assert!(op == "send to rank 0" || op == "send to rank 1", "{op}");
        assert!(waiting == "rank 0 has not come" || waiting == "rank 1 has not come", "{waiting}");
        assert_eq!(failures[0].to_string(), failures[1].to_string());
    }
}

#[test]
fn sends_go_on_while_an_operation_of_all_waits() {
    for config in configs() {
        each(met(2, &config), |communicator| {
            let rank = communicator.rank();
            let bytes = 1 << 20;
            let mut sum = vec![1; 10];
            let all_reduce = |operands| {
                let op = CollectiveOp::AllReduce(ReduceOp::Sum);
                SliceCall { op, dtype: DType::U8, operands, custom: None }
            };
            if rank == 0 {
                communicator.run_slices(&mut [send(1, &message(0, bytes))], WITHIN).unwrap();
                communicator.run_slices(&mut [all_reduce(Slices::InPlace(&mut sum))], WITHIN).unwrap();
            } else {
                let mut got = vec![0; bytes];
                let calls = &mut [all_reduce(Slices::InPlace(&mut sum)), recv(0, &mut got)];
                communicator.run_slices(calls, WITHIN).unwrap();
                assert_eq!(got, message(0, bytes));
            }
            assert_eq!(sum, [2; 10]);
        });
    }
}

#[test]
fn a_message_that_is_not_what_is_expected_is_named_and_the_next_one_arrives() {
    for config in configs() {
        for (sent, expected) in [(100_000, 10), (10, 100_000), (99_999, 0), (0, 5)] {
            let failures = each(met(2, &config), |communicator| {
                let is_sender = communicator.rank() == 0;
                let (src, mut dst) = (vec![1; sent], vec![0; expected]);
                let mut call = if is_sender { send(1, &src) } else { recv(0, &mut dst) };
                let failure = communicator.run_slices(std::slice::from_mut(&mut call), WITHIN).err();
                let mut next = vec![0; 3];
                let mut call = if is_sender { send(1, &[1, 2, 3]) } else { recv(0, &mut next) };
                communicator.run_slices(std::slice::from_mut(&mut call), WITHIN).unwrap();
                assert!(is_sender || next == [1, 2, 3]);
                failure.map(|failure| failure.to_string())
            });
            let text = format!(
                "call 1 differs between ranks: rank 0 sent {sent} bytes of u8 where rank 1 expected {expected} bytes \
                 of u8"
            );
            assert_eq!(failures[1].as_ref(), Some(&text));
            // A send that fits into the channel does not wait for what the receiver thinks of it.
            assert!(sent < 99_999 || failures[0].as_ref() == Some(&text), "{failures:?}");
        }
    }
}

#[test]
fn a_rank_alone_receives_what_it_sends() {
    let communicator = met(1, &HostConfig::default()).remove(0);
    communicator.run_slices(&mut [send(0, &[1, 2])], WITHIN).unwrap();
    let mut got = [0; 2];
    communicator.run_slices(&mut [recv(0, &mut got)], WITHIN).unwrap();
    assert_eq!(got, [1, 2]);
    let failure = communicator.run_slices(&mut [recv(0, &mut got)], WITHIN).unwrap_err();
    assert_eq!(failure.to_string(), "recv needs a send to itself on this rank");
}
