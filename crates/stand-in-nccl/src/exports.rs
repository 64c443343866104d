//! The library's functions, as `nccl.h` declares them.

use std::{
    cell::RefCell,
    ffi::{CString, c_char, c_int, c_uint, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use crate::{
    Code,
    communicator::{Call, Communicator, Work, end_group, start_group},
    control,
    driver::Driver,
    memory::Place,
    number::DataType,
    stream::Stream,
    world::{Key, Matter, Part},
};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// The beginning of `ncclConfig_t`.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
struct WaitSignalDesc {
    operations: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

/// A handle: of a communicator, a stream, a window.
type Raw = *mut c_void;

/// Counts the call, lets it fail if that is planned, and keeps panics inside.
fn answer(name: &'static str, body: impl FnOnce() -> Result<(), Code>) -> c_int {
    if let Some(code) = control::note(name) {
        return code;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::INTERNAL.0,
    }
}

macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        /// As the manual says.
        ///
        /// # Safety
        ///
        /// - What the manual asks of the caller.
        #[expect(unsafe_code, reason = "is called by users of the library")]
        // SAFETY: nothing else in this library, or in a program that links it, has this name.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            answer(stringify!($name), || $body)
        }
    )*};
}

/// Writes a result where the caller wants it.
#[expect(unsafe_code, reason = "writes to a caller's place")]
fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: the manual asks for a place that can be written, and it is not null.
    unsafe { place.write(value) };
    Ok(())
}

fn rank_of(rank: c_int) -> Result<usize, Code> {
    usize::try_from(rank).map_err(|_| Code::INVALID_ARGUMENT)
}

/// A rank of a communicator's.
fn peer_of(comm: &Communicator, rank: c_int) -> Result<usize, Code> {
    rank_of(rank).ok().filter(|rank| *rank < comm.world.size).ok_or(Code::INVALID_ARGUMENT)
}

#[expect(unsafe_code, reason = "reads a caller's configuration")]
fn is_blocking(config: *const Config) -> Result<bool, Code> {
    const MAGIC: c_uint = 0xcafe_beef;
    if config.is_null() {
        return Ok(true);
    }
    // SAFETY: the manual asks for a configuration, whose beginning all versions have.
    let config = unsafe { config.read() };
    if config.magic != MAGIC || config.size < size_of::<Config>() || config.version == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    Ok(config.blocking != 0)
}

fn begin(comm: *mut Raw, key: Key, rank: usize, size: usize, config: *const Config) -> Result<(), Code> {
    begin_as(comm, key, rank, size, is_blocking(config)?)
}

fn begin_as(comm: *mut Raw, key: Key, rank: usize, size: usize, blocking: bool) -> Result<(), Code> {
    let handle = Communicator::join(key, rank, size, blocking)?;
    put(comm, std::ptr::without_provenance_mut(handle))?;
    if blocking { Ok(()) } else { Communicator::of(handle)?.state() }
}

/// Meets the other ranks and takes a part in the communicator of those with the same colour.
fn split(
    parent: &Communicator,
    number: u64,
    (color, key): (c_int, c_int),
    new: *mut Raw,
    blocking: bool,
) -> Result<(), Code> {
    let own = [color.to_ne_bytes(), key.to_ne_bytes()].concat();
    let part = Part { call: vec![0], bytes: Vec::new(), own };
    let parts = parent
        .world
        .meet((Matter::Split, number), parent.rank, part, || parent.is_aborted())
        .ok_or(Code::INTERNAL)?;
    if color < 0 {
        return put(new, std::ptr::null_mut());
    }
    let number_at = |own: &[u8], at| c_int::from_ne_bytes(own[at..at + 4].try_into().unwrap_or_default());
    let mut same: Vec<_> = parts
        .iter()
        .enumerate()
        .filter(|(_, part)| number_at(&part.own, 0) == color)
        .map(|(rank, part)| (number_at(&part.own, 4), rank))
        .collect();
    same.sort_unstable();
    let rank = same.iter().position(|(_, rank)| *rank == parent.rank).ok_or(Code::INTERNAL)?;
    let of = Box::new(parent.world.key.clone());
    begin_as(new, Key::Derived { of, number, color: color.into() }, rank, same.len(), blocking)
}

fn collective(
    name: &'static str,
    (comm, stream): (Raw, Raw),
    (src, dst): (*const c_void, *mut c_void),
    (count, dtype): (usize, c_int),
    op: Option<c_int>,
    call: impl FnOnce(&Communicator) -> Result<Call, Code>,
) -> Result<(), Code> {
    let comm = Communicator::of(comm.addr())?;
    let (call, dtype) = (call(&comm)?, DataType(dtype));
    dtype.size().ok_or(Code::INVALID_ARGUMENT)?;
    let op = op.map(|code| comm.op(code).map(|op| (code, op))).transpose()?;
    let (src, dst) = (Place::new(src), Place::new(dst));
    comm.enqueue(name, stream.addr(), Work::Collective { call, src, dst, count, dtype, op })
}

thread_local! {
    /// The last text, kept until this thread asks again.
    static LAST: RefCell<CString> = RefCell::default();
}

static IDS: AtomicU64 = AtomicU64::new(1);

exports! {
    fn ncclGetVersion(version: *mut c_int) {
        let code = control::number("version").and_then(|code| c_int::try_from(code).ok());
        put(version, code.unwrap_or(23203))
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        let mut bytes = [0; 128];
        let number = IDS.fetch_add(1, SeqCst).to_ne_bytes();
        bytes[..number.len()].copy_from_slice(&number);
        put(id, UniqueId(bytes))
    }

    fn ncclCommInitRankConfig(comm: *mut Raw, size: c_int, id: UniqueId, rank: c_int, config: *mut Config) {
        begin(comm, Key::Id(id.0.to_vec()), rank_of(rank)?, rank_of(size)?, config)
    }

    fn ncclCommFinalize(comm: Raw) {
        Communicator::of(comm.addr())?.finalize()
    }

    fn ncclCommDestroy(comm: Raw) {
        let found = Communicator::of(comm.addr())?;
        let left = found.finalize();
        Communicator::forget(comm.addr());
        left
    }

    fn ncclCommAbort(comm: Raw) {
        Communicator::of(comm.addr())?.abort();
        Communicator::forget(comm.addr());
        if let Some(ms) = control::number("abort_ms") {
            std::thread::sleep(Duration::from_millis(ms));
        }
        Ok(())
    }

    fn ncclCommRevoke(comm: Raw, _flags: c_int) {
        let comm = Communicator::of(comm.addr())?;
        comm.abort();
        comm.begun("ncclCommRevoke")
    }

    fn ncclCommSplit(comm: Raw, color: c_int, key: c_int, new: *mut Raw, config: *mut Config) {
        let parent = Communicator::of(comm.addr())?;
        let number = parent.derived.fetch_add(1, SeqCst);
        let blocking = is_blocking(config)?;
        if parent.blocking {
            return split(&parent, number, (color, key), new, blocking);
        }
        // The library writes the new communicator when it is ready, and its parent does not tell.
        let new = AtomicPtr::new(new);
        std::thread::spawn(move || split(&parent, number, (color, key), new.into_inner(), blocking));
        Ok(())
    }

    fn ncclCommShrink(
        comm: Raw, without: *mut c_int, count: c_int, new: *mut Raw, config: *mut Config, flags: c_int,
    ) {
        let parent = Communicator::of(comm.addr())?;
        if flags == 1 {
            parent.abort();
        }
        let gone: Vec<_> = Place::new(without.cast())
            .read(rank_of(count)? * size_of::<c_int>())
            .chunks(size_of::<c_int>())
            .map(|bytes| c_int::from_ne_bytes(bytes.try_into().unwrap_or_default()))
            .map(|rank| peer_of(&parent, rank))
            .collect::<Result<_, _>>()?;
        let stay: Vec<_> = (0..parent.world.size).filter(|rank| !gone.contains(rank)).collect();
        let rank = stay.iter().position(|rank| *rank == parent.rank).ok_or(Code::INVALID_ARGUMENT)?;
        let number = parent.derived.fetch_add(1, SeqCst);
        let of = Box::new(parent.world.key.clone());
        begin(new, Key::Derived { of, number, color: -2 }, rank, stay.len(), config)
    }

    fn ncclCommGetUniqueId(comm: Raw, id: *mut UniqueId) {
        Communicator::of(comm.addr())?;
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&IDS.fetch_add(1, SeqCst).to_ne_bytes());
        put(id, UniqueId(bytes))
    }

    fn ncclCommGrow(
        comm: Raw, size: c_int, id: *const UniqueId, rank: c_int, new: *mut Raw, config: *mut Config,
    ) {
        let id = if id.is_null() { None } else { Some(Place::new(id.cast()).read(size_of::<UniqueId>())) };
        let id = id.ok_or(Code::INVALID_ARGUMENT)?;
        let rank = if comm.is_null() { rank_of(rank)? } else { Communicator::of(comm.addr())?.rank };
        begin(new, Key::Id(id), rank, rank_of(size)?, config)
    }

    fn ncclCommGetAsyncError(comm: Raw, found: *mut c_int) {
        let state = Communicator::of(comm.addr())?.state();
        put(found, state.map_or_else(|code| code.0, |()| 0))
    }

    fn ncclCommCount(comm: Raw, count: *mut c_int) {
        let size = Communicator::of(comm.addr())?.world.size;
        put(count, c_int::try_from(size).map_err(|_| Code::INTERNAL)?)
    }

    fn ncclCommUserRank(comm: Raw, rank: *mut c_int) {
        let own = Communicator::of(comm.addr())?.rank;
        put(rank, c_int::try_from(own).map_err(|_| Code::INTERNAL)?)
    }

    fn ncclCommCuDevice(comm: Raw, device: *mut c_int) {
        put(device, Communicator::of(comm.addr())?.device)
    }

    fn ncclCommSuspend(comm: Raw, _flags: c_int) {
        Communicator::of(comm.addr())?.begun("ncclCommSuspend")
    }

    fn ncclCommResume(comm: Raw) {
        Communicator::of(comm.addr())?.begun("ncclCommResume")
    }

    fn ncclCommMemStats(comm: Raw, _stat: c_int, value: *mut u64) {
        Communicator::of(comm.addr())?;
        // It holds none.
        put(value, 0)
    }

    fn ncclMemAlloc(address: *mut Raw, size: usize) {
        const ALIGNMENT: usize = 4096;
        if let Some(driver) = Driver::named() {
            return put(address, std::ptr::with_exposed_provenance_mut(driver.allocate(size)?));
        }
        // What is freed stays with the process: nobody knows its size any more.
        let room = vec![0_u8; size + ALIGNMENT].leak();
        let start = room.as_ptr().align_offset(ALIGNMENT);
        put(address, room[start..].as_mut_ptr().cast())
    }

    fn ncclMemFree(address: Raw) {
        Driver::named().map_or(Ok(()), |driver| driver.free(address.addr()))
    }

    fn ncclCommRegister(comm: Raw, address: Raw, _size: usize, handle: *mut Raw) {
        Communicator::of(comm.addr())?;
        put(handle, address)
    }

    fn ncclCommDeregister(comm: Raw, _handle: Raw) {
        Communicator::of(comm.addr()).map(drop)
    }

    fn ncclCommWindowRegister(comm: Raw, address: Raw, _size: usize, window: *mut Raw, _flags: c_int) {
        let comm = Communicator::of(comm.addr())?;
        if control::number("windows") == Some(0) {
            return put(window, std::ptr::null_mut());
        }
        let number = comm.windows.fetch_add(1, SeqCst);
        comm.world.put_window(number, comm.rank, Place::new(address));
        let part = Part { call: vec![0], bytes: Vec::new(), own: Vec::new() };
        comm.world
            .meet((Matter::Window, number), comm.rank, part, || comm.is_aborted())
            .ok_or(Code::INTERNAL)?;
        let handle = usize::try_from(number).map_err(|_| Code::INTERNAL)? + 1;
        put(window, std::ptr::without_provenance_mut(handle))?;
        comm.begun("ncclCommWindowRegister")
    }

    fn ncclCommWindowDeregister(comm: Raw, _window: Raw) {
        Communicator::of(comm.addr()).map(drop)
    }

    fn ncclRedOpCreatePreMulSum(
        op: *mut c_int, factor: *mut c_void, dtype: c_int, residence: c_int, comm: Raw,
    ) {
        let size = DataType(dtype).size().filter(|_| residence == 1).ok_or(Code::INVALID_ARGUMENT)?;
        put(op, Communicator::of(comm.addr())?.add_factor(Place::new(factor).read(size)))
    }

    fn ncclRedOpDestroy(op: c_int, comm: Raw) {
        Communicator::of(comm.addr())?.remove_factor(op)
    }

    fn ncclAllReduce(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Raw, stream: Raw,
    ) {
        let all = |_: &Communicator| Ok(Call::AllReduce);
        collective("ncclAllReduce", (comm, stream), (src, dst), (count, dtype), Some(op), all)
    }

    fn ncclReduce(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Raw,
        stream: Raw,
    ) {
        let to = |comm: &Communicator| Ok(Call::Reduce { root: peer_of(comm, root)? });
        collective("ncclReduce", (comm, stream), (src, dst), (count, dtype), Some(op), to)
    }

    fn ncclBroadcast(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Raw, stream: Raw,
    ) {
        let from = |comm: &Communicator| Ok(Call::Broadcast { root: peer_of(comm, root)? });
        collective("ncclBroadcast", (comm, stream), (src, dst), (count, dtype), None, from)
    }

    fn ncclReduceScatter(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Raw, stream: Raw,
    ) {
        let all = |_: &Communicator| Ok(Call::ReduceScatter);
        collective("ncclReduceScatter", (comm, stream), (src, dst), (count, dtype), Some(op), all)
    }

    fn ncclAllGather(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, comm: Raw, stream: Raw,
    ) {
        let all = |_: &Communicator| Ok(Call::AllGather);
        collective("ncclAllGather", (comm, stream), (src, dst), (count, dtype), None, all)
    }

    fn ncclAlltoAll(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, comm: Raw, stream: Raw,
    ) {
        let all = |_: &Communicator| Ok(Call::AllToAll);
        collective("ncclAlltoAll", (comm, stream), (src, dst), (count, dtype), None, all)
    }

    fn ncclGather(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Raw, stream: Raw,
    ) {
        let to = |comm: &Communicator| Ok(Call::Gather { root: peer_of(comm, root)? });
        collective("ncclGather", (comm, stream), (src, dst), (count, dtype), None, to)
    }

    fn ncclScatter(
        src: *const c_void, dst: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Raw, stream: Raw,
    ) {
        let from = |comm: &Communicator| Ok(Call::Scatter { root: peer_of(comm, root)? });
        collective("ncclScatter", (comm, stream), (src, dst), (count, dtype), None, from)
    }

    fn ncclSend(
        src: *const c_void, count: usize, dtype: c_int, peer: c_int, comm: Raw, stream: Raw,
    ) {
        let comm = Communicator::of(comm.addr())?;
        let bytes = count * DataType(dtype).size().ok_or(Code::INVALID_ARGUMENT)?;
        let work = Work::Send { src: Place::new(src), bytes, to: peer_of(&comm, peer)? };
        comm.enqueue("ncclSend", stream.addr(), work)
    }

    fn ncclRecv(
        dst: *mut c_void, count: usize, dtype: c_int, peer: c_int, comm: Raw, stream: Raw,
    ) {
        let comm = Communicator::of(comm.addr())?;
        let bytes = count * DataType(dtype).size().ok_or(Code::INVALID_ARGUMENT)?;
        let work = Work::Recv { dst: Place::new(dst), bytes, from: peer_of(&comm, peer)? };
        comm.enqueue("ncclRecv", stream.addr(), work)
    }

    fn ncclPutSignal(
        src: *const c_void, count: usize, dtype: c_int, peer: c_int, window: Raw, offset: usize, signal: c_int,
        context: c_int, flags: c_uint, comm: Raw, stream: Raw,
    ) {
        let comm = Communicator::of(comm.addr())?;
        if signal != 0 || context != 0 || flags != 0 || window.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let bytes = count * DataType(dtype).size().ok_or(Code::INVALID_ARGUMENT)?;
        let (to, window) = (peer_of(&comm, peer)?, window.addr() as u64 - 1);
        let work = Work::Put { src: Place::new(src), bytes, to, window, offset };
        comm.enqueue("ncclPutSignal", stream.addr(), work)
    }

    fn ncclSignal(
        peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Raw, stream: Raw,
    ) {
        let comm = Communicator::of(comm.addr())?;
        if signal != 0 || context != 0 || flags != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let to = peer_of(&comm, peer)?;
        comm.enqueue("ncclSignal", stream.addr(), Work::Signal { to })
    }

    fn ncclWaitSignal(count: c_int, descs: *mut WaitSignalDesc, comm: Raw, stream: Raw) {
        let comm = Communicator::of(comm.addr())?;
        let size = size_of::<WaitSignalDesc>();
        let all = Place::new(descs.cast()).read(rank_of(count)? * size);
        let number = |bytes: &[u8]| c_int::from_ne_bytes(bytes.try_into().unwrap_or_default());
        let waits = all
            .chunks(size)
            .map(|desc| Ok((peer_of(&comm, number(&desc[4..8]))?, u64::from(number(&desc[..4]).unsigned_abs()))))
            .collect::<Result<_, Code>>()?;
        comm.enqueue("ncclWaitSignal", stream.addr(), Work::WaitSignals(waits))
    }

    fn ncclGroupStart() {
        start_group();
        Ok(())
    }

    fn ncclGroupEnd() {
        end_group()
    }

    fn stand_in_nccl_stream_create(stream: *mut usize) {
        put(stream, Stream::create())
    }

    fn stand_in_nccl_stream_synchronize(stream: usize, ms: u64) {
        let stream = Stream::of(stream).ok_or(Code::INVALID_ARGUMENT)?;
        if stream.synchronize(Duration::from_millis(ms)) { Ok(()) } else { Err(Code::IN_PROGRESS) }
    }

    fn stand_in_nccl_stream_destroy(stream: usize) {
        Stream::destroy(stream);
        Ok(())
    }
}

/// As the manual says.
#[expect(unsafe_code, reason = "is called by users of the library")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// As the manual says.
#[expect(unsafe_code, reason = "is called by users of the library")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_comm: Raw) -> *const c_char {
    let text = CString::new(control::said()).unwrap_or_default();
    LAST.with_borrow_mut(|last| {
        *last = text;
        last.as_ptr()
    })
}
