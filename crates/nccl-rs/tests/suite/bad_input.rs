//! Arguments that do not fit are refused before the library is called.

use nccl_rs::{
    Communicator, CommunicatorConfig, CommunicatorDesc, DataType, Dst, Error, ErrorClass, Memory, ReduceOp,
    Src, Stream, WINDOW_ALIGNMENT, WindowKind,
};
use warpweft_stand_in_nccl::StandIn;

use crate::rig::{Rank, Rig, dst, src};

/// One rank of two, and what it is refused; nothing reaches the library.
fn refused(call: impl Fn(&Rank<'_>) -> Result<(), Error> + Sync) -> Error {
    let rig = Rig::new();
    let errors = rig.ranks(2, &CommunicatorConfig::new(), |rank| {
        let error = call(&rank).unwrap_err();
        assert!(rank.is_idle());
        error
    });
    for call in ["ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclSend", "ncclGather", "ncclAlltoAll"]
    {
        assert_eq!(rig.library.calls(call), 0, "{call}");
    }
    assert_eq!(errors[0].class(), ErrorClass::Usage);
    errors[0].clone()
}

#[test]
fn lengths_that_do_not_fit() {
    let check = |call: fn(&Rank<'_>) -> Result<(), Error>, expected, found| {
        let Error::Length { expected: e, found: f, .. } = refused(call) else { panic!("another error") };
        assert_eq!((e, f), (expected, found));
    };
    check(
        |rank| rank.comm.all_reduce(&src(&[1, 2]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream()),
        2,
        1,
    );
    check(|rank| rank.comm.all_gather(&src(&[1, 2]), &mut dst(&mut [0; 3]), &rank.stream()), 4, 3);
    check(
        |rank| rank.comm.reduce_scatter(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream()),
        2,
        1,
    );
    check(|rank| rank.comm.all_to_all(&src(&[1; 3]), &mut dst(&mut [0; 3]), &rank.stream()), 4, 3);
    check(|rank| rank.comm.all_gather_in_place(&mut dst(&mut [0; 5]), &rank.stream()), 6, 5);
    check(
        |rank| rank.comm.gather(&src(&[1]), Some(&mut dst(&mut [0])), rank.comm.rank(), &rank.stream()),
        2,
        1,
    );
    check(
        |rank| rank.comm.scatter(Some(&src(&[1])), &mut dst(&mut [0]), rank.comm.rank(), &rank.stream()),
        2,
        1,
    );
}

#[test]
fn types_that_do_not_fit() {
    let error = refused(|rank| {
        rank.comm.all_reduce(&src(&[1_i32]), &mut dst(&mut [0.0_f32]), ReduceOp::Sum, &rank.stream())
    });
    assert_eq!(error.to_string(), "ncclAllReduce: one buffer holds i32 and the other f32");
    let error = refused(|rank| {
        let factor = rank.comm.premul_sum(1.5_f64)?;
        rank.comm.all_reduce(&src(&[1.0_f32]), &mut dst(&mut [0.0_f32]), &factor, &rank.stream())
    });
    assert!(matches!(error, Error::Types { one: DataType::F64, other: DataType::F32, .. }));
}

#[test]
fn overlaps_that_are_not_in_place() {
    let check = |call: fn(&Rank<'_>, &Src<'_>, &mut Dst<'_>) -> Result<(), Error>, count, offset| {
        #[expect(unsafe_code, reason = "makes views that overlap")]
        let error = refused(|rank| {
            let mut elements = [0_i32; 8];
            let start = elements.as_mut_ptr();
            // SAFETY: the call is refused, and does not use the view.
            let mut to = unsafe { Dst::new(start.wrapping_add(offset).cast(), count, DataType::I32) };
            // SAFETY: the same.
            let from = unsafe { Src::new(start.cast(), 2, DataType::I32) };
            call(rank, &from, &mut to)
        });
        assert!(matches!(error, Error::Overlap { .. }), "{error}");
    };
    check(|rank, from, to| rank.comm.all_reduce(from, to, ReduceOp::Sum, &rank.stream()), 2, 1);
    check(|rank, from, to| rank.comm.all_to_all(from, to, &rank.stream()), 2, 0);
    check(|rank, from, to| rank.comm.all_gather(from, to, &rank.stream()), 4, 1);
}

#[test]
fn ranks_that_are_not_there() {
    let none = |call: fn(&Rank<'_>) -> Result<(), Error>| {
        assert_eq!(refused(call), Error::Rank { rank: 2, size: 2 });
    };
    none(|rank| rank.comm.send(&src(&[1]), 2, &rank.stream()));
    none(|rank| rank.comm.recv(&mut dst(&mut [1]), 2, &rank.stream()));
    none(|rank| rank.comm.broadcast_in_place(&mut dst(&mut [1]), 2, &rank.stream()));
    none(|rank| rank.comm.shrink(&[2], nccl_rs::Shrink::Idle, &CommunicatorConfig::new()).map(drop));
    let rig = Rig::new();
    let id = rig.nccl.unique_id().unwrap();
    let error = Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 3, 3)).unwrap_err();
    assert_eq!(error, Error::Rank { rank: 3, size: 3 });
}

#[test]
fn a_root_that_names_no_buffer() {
    let error =
        refused(|rank| rank.comm.broadcast(None, &mut dst(&mut [1]), rank.comm.rank(), &rank.stream()));
    assert_eq!(error.to_string(), "ncclBroadcast: the root names a buffer of its own");
}

#[test]
fn buffers_and_streams_of_another_device() {
    let error = refused(|rank| {
        rank.comm.all_reduce(&src(&[1]).on(1), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream())
    });
    assert_eq!(error.to_string(), "ncclAllReduce: the source is on device 1, the communicator on device 0");
    let error = refused(|rank| {
        rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream().on(3))
    });
    assert!(matches!(error, Error::WrongDevice { what: "the stream", found: 3, .. }));
}

#[test]
fn the_per_thread_default_stream_needs_a_communicator_that_blocks() {
    #[expect(unsafe_code, reason = "makes a stream of a handle")]
    // SAFETY: CUDA's handle for the default stream of each thread, which is always there.
    let per_thread = || unsafe { Stream::from_raw(std::ptr::without_provenance_mut(2)) };
    let error =
        refused(|rank| rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &per_thread()));
    assert_eq!(error, Error::PerThreadStream);
    let rig = Rig::new();
    rig.ranks(1, &CommunicatorConfig::new().blocking(true), |rank| {
        let error = rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &per_thread());
        // The stand-in has no such stream, and is the one who says so.
        assert!(matches!(error, Err(Error::Nccl(_))));
    });
}

#[test]
fn memory_that_is_too_small_or_lies_badly() {
    let rig = Rig::new();
    rig.ranks(1, &CommunicatorConfig::new().blocking(true), |rank| {
        let memory = Memory::alloc(&rig.nccl, None, 64).unwrap();
        #[expect(unsafe_code, reason = "makes a view of memory")]
        // SAFETY: the view is refused.
        let over = unsafe { memory.src::<i32>(8..17) };
        #[expect(unsafe_code, reason = "makes a view of memory")]
        // SAFETY: the view is refused.
        let back = unsafe { memory.dst::<i32>(std::ops::Range { start: 3, end: 2 }) };
        assert!(matches!(over, Err(Error::Length { expected: 17, found: 16, .. })) && back.is_err());
        #[expect(unsafe_code, reason = "makes a window of memory")]
        // SAFETY: the window is refused.
        let window =
            unsafe { rank.comm.window_raw(memory.address().wrapping_byte_add(8), 8, WindowKind::Plain) };
        assert!(window.unwrap_err().to_string().contains(&WINDOW_ALIGNMENT.to_string()));
    });
}

#[test]
fn what_an_older_library_lacks_is_named_with_both_versions() {
    let lacking = StandIn::lacking(&["ncclCommShrink", "ncclMemAlloc", "ncclPutSignal"]).unwrap();
    let rig = Rig::over(lacking.with("version", "21805"));
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let too_old = |error: Error| {
            assert_eq!(error.class(), ErrorClass::Unsupported);
            error.to_string()
        };
        let shrunk = rank.comm.shrink(&[], nccl_rs::Shrink::Idle, &CommunicatorConfig::new());
        let text = too_old(shrunk.unwrap_err());
        assert_eq!(text, "ncclCommShrink needs NCCL 2.27.0 or newer, and the one that was loaded is 2.18.5");
        too_old(Memory::alloc(&rig.nccl, None, 8).unwrap_err());
        #[expect(unsafe_code, reason = "makes a view of small floats")]
        // SAFETY: the call is refused, and does not use the view.
        let mut small = unsafe { Dst::new(std::ptr::null_mut(), 0, DataType::F8E4M3) };
        too_old(rank.comm.all_reduce_in_place(&mut small, ReduceOp::Max, &rank.stream()).unwrap_err());
        let named = CommunicatorConfig::new().name("a");
        too_old(rank.comm.split(Some(0), 0, &named).unwrap_err());
    });
    let missing = rig.nccl.newer_functions().into_iter().filter(|(.., is_there)| !is_there).count();
    assert_eq!(missing, 3);
}

#[test]
fn calls_that_wait_for_others_are_refused_in_a_group() {
    let error = refused(|rank| {
        rank.comm.nccl().group(|| {
            let memory = std::sync::Arc::new(Memory::alloc(rank.comm.nccl(), None, 4096)?);
            rank.comm.window(&memory, WindowKind::Plain).map(drop)
        })
    });
    assert!(error.to_string().contains("in a group"));
}

#[test]
fn windows_need_a_communicator_that_blocks() {
    let error = refused(|rank| {
        let memory = std::sync::Arc::new(Memory::alloc(rank.comm.nccl(), None, 4096)?);
        rank.comm.window(&memory, WindowKind::Symmetric).map(drop)
    });
    assert!(error.to_string().contains("blocking(true)"), "{error}");
}

#[test]
fn lengths_that_no_memory_has() {
    #[expect(unsafe_code, reason = "makes views of no memory")]
    fn huge(count: usize) -> (Src<'static>, Dst<'static>) {
        let address = std::ptr::without_provenance_mut(4096);
        // SAFETY: every call is refused, and does not use the view.
        let from = unsafe { Src::new(address, count, DataType::I32) };
        // SAFETY: the same.
        (from, unsafe { Dst::new(address, count, DataType::I32) })
    }
    for count in [usize::MAX, usize::MAX / 2 + 1, usize::MAX / 4, usize::MAX / 4 + 1, usize::MAX / 8 + 1] {
        let check = |call: fn(&Rank<'_>, Src<'_>, Dst<'_>) -> Result<(), Error>| {
            let error = refused(|rank| {
                let (from, to) = huge(count);
                call(rank, from, to)
            });
            assert!(matches!(error, Error::Invalid { .. } | Error::Length { .. }), "{error}");
        };
        check(|rank, from, mut to| rank.comm.all_reduce(&from, &mut to, ReduceOp::Sum, &rank.stream()));
        check(|rank, _, mut to| rank.comm.all_reduce_in_place(&mut to, ReduceOp::Sum, &rank.stream()));
        check(|rank, _, mut to| rank.comm.all_gather_in_place(&mut to, &rank.stream()));
        check(|rank, from, mut to| rank.comm.all_gather(&from, &mut to, &rank.stream()));
        check(|rank, _, mut to| rank.comm.reduce_scatter_in_place(&mut to, ReduceOp::Sum, &rank.stream()));
        check(|rank, from, mut to| rank.comm.all_to_all(&from, &mut to, &rank.stream()));
        check(|rank, from, mut to| rank.comm.gather(&from, Some(&mut to), rank.comm.rank(), &rank.stream()));
        check(|rank, from, mut to| rank.comm.scatter(Some(&from), &mut to, rank.comm.rank(), &rank.stream()));
        check(|rank, from, _| rank.comm.send(&from, 0, &rank.stream()));
        check(|rank, _, mut to| rank.comm.recv(&mut to, 0, &rank.stream()));
    }
}

#[test]
fn no_elements_need_no_memory() {
    let rig = Rig::new();
    rig.ranks(2, &CommunicatorConfig::new(), |rank| {
        #[expect(unsafe_code, reason = "makes views of no elements")]
        // SAFETY: there are no elements.
        let from = unsafe { Src::new(std::ptr::null_mut(), 0, DataType::F32) };
        #[expect(unsafe_code, reason = "makes views of no elements")]
        // SAFETY: the same.
        let mut to = unsafe { Dst::new(std::ptr::null_mut(), 0, DataType::F32) };
        let (comm, stream) = (&rank.comm, rank.stream());
        comm.all_reduce(&from, &mut to, ReduceOp::Sum, &stream).unwrap();
        comm.all_gather(&from, &mut to, &stream).unwrap();
        comm.reduce_scatter(&from, &mut to, ReduceOp::Sum, &stream).unwrap();
        comm.all_to_all(&from, &mut to, &stream).unwrap();
        comm.gather(&from, Some(&mut to), 0, &stream).unwrap();
        comm.broadcast(Some(&from), &mut to, 0, &stream).unwrap();
        comm.send_recv(&from, 1 - comm.rank(), &mut to, 1 - comm.rank(), &stream).unwrap();
        rank.synchronize();
    });
}

#[test]
fn numbers_that_the_library_has_no_room_for() {
    let error = refused(|rank| {
        let wait = nccl_rs::SignalWait { peer: 0, count: 1 << 31 };
        rank.comm.wait_signals(&[wait], &rank.stream())
    });
    assert!(error.to_string().contains("2147483648"), "{error}");
    let grow = |size| move |rank: &Rank<'_>| rank.comm.grow(size, None, &CommunicatorConfig::new()).map(drop);
    assert!(matches!(refused(grow(1 << 31)), Error::Rank { .. }));
    assert!(matches!(refused(grow(0)), Error::Rank { .. }));
    let rig = Rig::new();
    let id = rig.nccl.unique_id().unwrap();
    for (rank, size) in [(0, 0), (0, u32::MAX), (u32::MAX, u32::MAX)] {
        let error = Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, rank, size)).unwrap_err();
        assert_eq!(error, Error::Rank { rank, size });
    }
}

#[test]
fn a_buffer_of_one_stream_in_another() {
    let error = refused(|rank| {
        let from = src(&[1]).within(&Stream::LEGACY);
        rank.comm.all_reduce(&from, &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream())
    });
    assert_eq!(error.to_string(), "ncclAllReduce: the source is in use on another stream than the call's");
}
