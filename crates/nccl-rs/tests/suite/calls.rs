//! What calls compute, with libraries new and old, blocking and not.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use nccl_rs::{
    Communicator, CommunicatorConfig, CommunicatorDesc, DataType, Element, Error, Memory, ReduceOp,
    SignalWait, WindowKind,
};
use proptest::prelude::*;
use warpweft_stand_in_nccl::StandIn;

use crate::rig::{Rank, Rig, dst, src};

/// Every way a communicator may work: blocking, not, and not with calls that are in progress for a while.
fn ways(body: impl Fn(&Rig, &CommunicatorConfig)) {
    body(&Rig::new(), &CommunicatorConfig::new().blocking(true));
    body(&Rig::new(), &CommunicatorConfig::new());
    body(&Rig::over(StandIn::load().unwrap().with("pending", "3")), &CommunicatorConfig::new());
    // Without what came after 2.18.
    let newer = ["ncclAlltoAll", "ncclGather", "ncclScatter"];
    let old = StandIn::lacking(&newer).unwrap().with("version", "21805");
    body(&Rig::over(old), &CommunicatorConfig::new());
}

/// What each rank has in `all` calls of `one`, with ranks of which each has these numbers.
fn check<T: Element + Default + PartialEq + std::fmt::Debug>(
    size: u32,
    input: impl Fn(u32) -> Vec<T> + Sync,
    call: impl Fn(&Rank<'_>, &[T], &mut Vec<T>) + Sync,
    expected: impl Fn(u32) -> Vec<T> + Sync,
) {
    ways(|rig, config| {
        rig.ranks(size, config, |rank| {
            let (own, mut out) = (input(rank.comm.rank()), Vec::new());
            call(&rank, &own, &mut out);
            rank.synchronize();
            assert_eq!(out, expected(rank.comm.rank()), "rank {}", rank.comm.rank());
        });
    });
}

fn two(rank: u32) -> Vec<i32> {
    let rank = i32::try_from(rank).unwrap();
    vec![rank + 1, 10 * (rank + 1)]
}

#[test]
fn all_reduce_gives_every_rank_the_result() {
    let all = |op, expected: [i32; 2]| {
        let call = move |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
            out.resize(2, 0);
            rank.comm.all_reduce(&src(own), &mut dst(out), op, &rank.stream()).unwrap();
        };
        check(3, two, call, |_| expected.to_vec());
    };
    all(ReduceOp::Sum, [6, 60]);
    all(ReduceOp::Prod, [6, 6000]);
    all(ReduceOp::Max, [3, 30]);
    all(ReduceOp::Min, [1, 10]);
    all(ReduceOp::Avg, [2, 20]);
}

#[test]
fn all_reduce_works_in_place() {
    let call = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.extend(own);
        rank.comm.all_reduce_in_place(&mut dst(out), ReduceOp::Sum, &rank.stream()).unwrap();
    };
    check(4, two, call, |_| vec![10, 100]);
}

#[test]
fn the_root_alone_gets_what_is_reduced_and_gathered() {
    let reduce = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(if rank.comm.rank() == 1 { 2 } else { 0 }, 0);
        let mut to = dst(out);
        let to = (rank.comm.rank() == 1).then_some(&mut to);
        rank.comm.reduce(&src(own), to, ReduceOp::Sum, 1, &rank.stream()).unwrap();
    };
    check(3, two, reduce, |rank| if rank == 1 { vec![6, 60] } else { vec![] });
    let gather = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(if rank.comm.rank() == 1 { 6 } else { 0 }, 0);
        let mut to = dst(out);
        let to = (rank.comm.rank() == 1).then_some(&mut to);
        rank.comm.gather(&src(own), to, 1, &rank.stream()).unwrap();
    };
    check(3, two, gather, |rank| if rank == 1 { vec![1, 10, 2, 20, 3, 30] } else { vec![] });
}

#[test]
fn what_the_root_has_goes_to_all_or_is_parted() {
    let broadcast = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(2, 0);
        let from = src(own);
        let from = (rank.comm.rank() == 2).then_some(&from);
        rank.comm.broadcast(from, &mut dst(out), 2, &rank.stream()).unwrap();
    };
    check(3, two, broadcast, |_| vec![3, 30]);
    let in_place = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.extend(own);
        rank.comm.broadcast_in_place(&mut dst(out), 0, &rank.stream()).unwrap();
    };
    check(3, two, in_place, |_| vec![1, 10]);
    let scatter = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(2, 0);
        let all: Vec<i32> = (0..6).collect();
        let from = src(&all);
        let from = (rank.comm.rank() == 0).then_some(&from);
        rank.comm.scatter(from, &mut dst(out), 0, &rank.stream()).unwrap();
        rank.synchronize();
        assert_eq!(own.len(), 2);
    };
    check(3, two, scatter, |rank| {
        let first = 2 * i32::try_from(rank).unwrap();
        vec![first, first + 1]
    });
}

#[test]
fn gathers_and_scatters_of_all_work_in_and_out_of_place() {
    let gather = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(6, 0);
        rank.comm.all_gather(&src(own), &mut dst(out), &rank.stream()).unwrap();
    };
    check(3, two, gather, |_| vec![1, 10, 2, 20, 3, 30]);
    let gather_in_place = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        let first = 2 * rank.comm.rank() as usize;
        out.resize(6, 0);
        out[first..first + 2].copy_from_slice(own);
        rank.comm.all_gather_in_place(&mut dst(out), &rank.stream()).unwrap();
    };
    check(3, two, gather_in_place, |_| vec![1, 10, 2, 20, 3, 30]);
    let scatter = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(1, 0);
        rank.comm.reduce_scatter(&src(own), &mut dst(out), ReduceOp::Sum, &rank.stream()).unwrap();
    };
    check(2, two, scatter, |rank| vec![[3, 30][rank as usize]]);
    let scatter_in_place = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.extend(own);
        rank.comm.reduce_scatter_in_place(&mut dst(out), ReduceOp::Sum, &rank.stream()).unwrap();
    };
    check(2, two, scatter_in_place, |rank| if rank == 0 { vec![3, 10] } else { vec![2, 30] });
}

#[test]
fn all_to_all_parts_what_every_rank_has() {
    let call = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(2, 0);
        rank.comm.all_to_all(&src(own), &mut dst(out), &rank.stream()).unwrap();
    };
    check(2, two, call, |rank| if rank == 0 { vec![1, 2] } else { vec![10, 20] });
}

#[test]
fn sends_and_receives_in_a_group_do_not_wait_for_each_other() {
    let pair = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(2, 0);
        let (comm, stream) = (&rank.comm, rank.stream());
        let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
        comm.send_recv(&src(own), next, &mut dst(out), previous, &stream).unwrap();
    };
    check(3, two, pair, |rank| two((rank + 2) % 3));
    let nested = |rank: &Rank<'_>, own: &[i32], out: &mut Vec<i32>| {
        out.resize(2, 0);
        let (comm, stream) = (&rank.comm, rank.stream());
        let other = 1 - comm.rank();
        let done = comm.nccl().group(|| {
            comm.nccl().group(|| comm.send(&src(own), other, &stream))?;
            comm.recv(&mut dst(out), other, &stream)?;
            Ok("done")
        });
        assert_eq!(done.unwrap(), "done");
    };
    check(2, two, nested, |rank| two(1 - rank));
}

#[test]
fn one_thread_calls_for_several_ranks_in_a_group() {
    let rig = Rig::new();
    let comms = nccl_rs::Communicator::init_all(&rig.nccl, &[], &CommunicatorConfig::new()).unwrap();
    assert!(comms.is_empty());
    let id = rig.nccl.unique_id().unwrap();
    let ranks = rig.threads(2, |number| {
        let desc = nccl_rs::CommunicatorDesc::new(id, number, 2);
        nccl_rs::Communicator::init(&rig.nccl, &desc).unwrap()
    });
    let ranks: Vec<_> = ranks.into_iter().map(|comm| rig.rank(comm)).collect();
    let (inputs, mut outputs) = ([two(0), two(1)], [vec![0; 2], vec![0; 2]]);
    rig.nccl
        .group(|| {
            ranks.iter().zip(&inputs).zip(&mut outputs).try_for_each(|((rank, input), output)| {
                rank.comm.all_reduce(&src(input), &mut dst(output), ReduceOp::Sum, &rank.stream())
            })
        })
        .unwrap();
    ranks.iter().for_each(Rank::synchronize);
    assert_eq!(outputs, [[3, 30], [3, 30]]);
    rig.threads(0, |_| ());
}

#[test]
fn every_rank_multiplies_by_its_own_factor() {
    let call = |rank: &Rank<'_>, own: &[f32], out: &mut Vec<f32>| {
        out.resize(2, 0.0);
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let factor = rank.comm.premul_sum(rank.comm.rank() as f32 + 0.5).unwrap();
        rank.comm.all_reduce(&src(own), &mut dst(out), &factor, &rank.stream()).unwrap();
    };
    check(2, |_| vec![1.0_f32, 2.0], call, |_| vec![2.0, 4.0]);
}

#[test]
fn a_factor_of_a_type_that_is_known_at_run_time() {
    let call = |rank: &Rank<'_>, own: &[f32], out: &mut Vec<f32>| {
        out.resize(2, 0.0);
        let factor = rank.comm.premul_sum_of(DataType::F32, &2.5_f32.to_ne_bytes()).unwrap();
        rank.comm.all_reduce(&src(own), &mut dst(out), &factor, &rank.stream()).unwrap();
        let short = rank.comm.premul_sum_of(DataType::F32, &[0; 2]);
        assert!(matches!(short, Err(Error::Length { expected: 4, found: 2, .. })), "{short:?}");
    };
    check(2, |_| vec![1.0_f32, 2.0], call, |_| vec![5.0, 10.0]);
}

/// Each rank is made where a program's own code has made something current, and is given its own time for that.
#[test]
fn ranks_are_made_where_the_program_says() {
    let rig = Rig::new();
    let (id, entered) = (rig.nccl.unique_id().unwrap(), Arc::new(AtomicU32::new(0)));
    let config = CommunicatorConfig::new().blocking(true);
    let desc = |rank| {
        let (entered, left) = (Arc::clone(&entered), Arc::clone(&entered));
        let enter = move || {
            entered.fetch_add(1, Ordering::SeqCst);
            let left = Arc::clone(&left);
            Ok(Box::new(Guard(left)) as Box<dyn Any>)
        };
        CommunicatorDesc::new(id, rank, 2).entered_by(enter).config(config.clone())
    };
    let late = Communicator::init(&rig.nccl, &desc(0).within(Duration::from_millis(50)));
    assert!(matches!(&late, Err(Error::TimedOut { .. })), "{late:?}");
    assert_eq!(entered.load(Ordering::SeqCst), 1, "it is still in the call that makes a rank");
    let refused = CommunicatorDesc::new(id, 1, 2).entered_by(|| Err("no such context".to_owned()));
    let refused = Communicator::init(&rig.nccl, &refused.config(config.clone()));
    assert!(matches!(&refused, Err(Error::Invalid { what }) if what == "no such context"), "{refused:?}");
}

/// Something current.
struct Guard(Arc<AtomicU32>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn what_is_put_in_a_window_is_there_after_its_signal() {
    let rig = Rig::new();
    rig.ranks(2, &CommunicatorConfig::new().blocking(true), |rank| {
        let memory = Arc::new(Memory::alloc(&rig.nccl, None, 4096).unwrap());
        let window = rank.comm.window(&memory, WindowKind::Symmetric).unwrap().unwrap();
        assert_eq!((window.size_bytes(), window.kind()), (4096, WindowKind::Symmetric));
        let (own, other, stream) = ([rank.comm.rank() + 7], 1 - rank.comm.rank(), rank.stream());
        #[expect(unsafe_code, reason = "puts data in a peer's window")]
        // SAFETY: the windows are alike and stay until both ranks have waited; nobody else uses those bytes.
        unsafe { rank.comm.put_signal(&src(&own), other, &window, 8, &stream) }.unwrap();
        rank.comm.signal(other, &stream).unwrap();
        rank.comm.wait_signals(&[SignalWait { peer: other, count: 2 }], &stream).unwrap();
        let mut read = [0_u32];
        #[expect(unsafe_code, reason = "makes a view of memory")]
        // SAFETY: the stream is waited for below, and nobody writes there after the signal.
        let there = unsafe { memory.src::<u32>(2..3) }.unwrap();
        rank.comm
            .send_recv(&there, rank.comm.rank(), &mut dst(&mut read), rank.comm.rank(), &stream)
            .unwrap();
        rank.synchronize();
        assert_eq!(read, [other + 7]);
        drop(rank.comm.register(&memory).unwrap());
    });
    for call in ["ncclCommRegister", "ncclCommDeregister", "ncclCommWindowDeregister"] {
        assert_eq!(rig.library.calls(call), 2, "{call}");
    }
}

#[test]
fn a_library_that_has_no_use_for_windows_gives_none() {
    let rig = Rig::over(StandIn::load().unwrap().with("windows", "0"));
    rig.ranks(1, &CommunicatorConfig::new().blocking(true), |rank| {
        let memory = Arc::new(Memory::alloc(&rig.nccl, None, 4096).unwrap());
        assert!(rank.comm.window(&memory, WindowKind::Plain).unwrap().is_none());
    });
}

#[test]
fn every_type_is_moved_as_many_bytes_as_it_has() {
    #[expect(unsafe_code, reason = "makes views of any type")]
    fn check(dtype: DataType) {
        let rig = Rig::new();
        rig.ranks(2, &CommunicatorConfig::new(), |rank| {
            let bytes = 3 * dtype.size_bytes();
            let (own, mut all) =
                (vec![rank.comm.rank().to_ne_bytes()[0] + 1; bytes], vec![0_u8; 2 * bytes + 1]);
            // SAFETY: the stream is waited for before the vectors go; the bytes are the elements'.
            let from = unsafe { nccl_rs::Src::new(own.as_ptr().cast_mut().cast(), 3, dtype) };
            // SAFETY: the same.
            let mut to = unsafe { nccl_rs::Dst::new(all.as_mut_ptr().cast(), 6, dtype) };
            rank.comm.all_gather(&from, &mut to, &rank.stream()).unwrap();
            rank.synchronize();
            let expected: Vec<u8> = [vec![1; bytes], vec![2; bytes], vec![0]].concat();
            assert_eq!(all, expected, "{dtype}");
        });
    }
    DataType::ALL.into_iter().for_each(check);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn sums_are_those_of_the_inputs(size in 1..5_u32, inputs in proptest::collection::vec(any::<i64>(), 0..40)) {
        let rig = Rig::new();
        let input = |rank: u32| inputs.iter().map(move |x| x.wrapping_mul(i64::from(rank) + 1)).collect::<Vec<_>>();
        let sums: Vec<i64> =
            (0..inputs.len()).map(|at| (0..size).fold(0_i64, |sum, rank| sum.wrapping_add(input(rank)[at]))).collect();
        rig.ranks(size, &CommunicatorConfig::new(), |rank| {
            let (own, mut out) = (input(rank.comm.rank()), vec![0; inputs.len()]);
            rank.comm.all_reduce(&src(&own), &mut dst(&mut out), ReduceOp::Sum, &rank.stream()).unwrap();
            rank.synchronize();
            assert_eq!(out, sums);
        });
    }
}
