//! Four ranks that compute and sum by turns, each in a queue of its own, with no wait in between:
//! `cargo run -p warpweft --features comm --example collectives`

use std::{sync::Arc, thread, time::Duration};

use warpweft::{
    Arg, Backend as _, BufferDesc, BufferView, CopyRegion, DType, Features, HostFunction, KernelCode,
    KernelContract, Launch, Op, Param, QueueDesc, ReduceOp, SemaphorePoint, Submission, Workgroup,
    bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous},
    comm::{CommConfig, Communicator},
    host::HostBackend,
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const RANKS: u32 = 4;
const STEPS: u32 = 5;
const WORDS: u32 = 1000;
const WITHIN: Duration = Duration::from_secs(10);

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Failure> {
    let (backend, meeting) = (HostBackend::with_devices(RANKS)?, Meeting::new());
    let sums: Vec<u32> = thread::scope(|scope| {
        let start = |rank: u32| {
            let (backend, meeting) = (&backend, Rendezvous::Meeting(Arc::clone(&meeting)));
            scope.spawn(move || run(rank, backend, meeting))
        };
        let ranks: Vec<_> = (0..RANKS).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<_, _>>()
    })?;
    // Each step adds a rank to each rank's word, and sums the words.
    let expected = (0..STEPS).fold(0, |word, _| RANKS * word + (0..RANKS).sum::<u32>());
    assert_eq!(sums, [expected; RANKS as usize]);
    println!("after {STEPS} steps all {RANKS} ranks have {expected}, and each has waited once");
    Ok(())
}

/// One rank: what the first of its words is in the end.
fn run(rank: u32, backend: &HostBackend, meeting: Rendezvous) -> Result<u32, Failure> {
    let device = backend.open(rank, Features::empty())?;
    let group = Group::join(meeting, JoinConfig::new(Rank(rank), RANKS), WITHIN)?;
    let comm = Communicator::create(group, &device, &CommConfig::default(), WITHIN)?;

    let bytes = u64::from(WORDS) * 4;
    let words = BufferView::whole(device.allocate(&BufferDesc::device(bytes))?);
    let landing = BufferView::whole(device.allocate(&BufferDesc::host_visible(bytes))?);
    let contract = KernelContract::new("add", [Param::read_write(bytes), Param::scalar::<u32>()]);
    let add = HostFunction::new(|workgroup: &Workgroup<'_>| {
        let (words, place) = (workgroup.slice::<u32>(0), workgroup.index()[0] as usize);
        words.set(place, words.get(place) + workgroup.scalar::<u32>(1));
    });
    let add = device.load(&KernelCode::new().with_function(contract, add))?.kernel("add")?;
    let rank = rank.to_le_bytes();
    let args = [Arg::Buffer(&words), Arg::Scalar(&rank)];
    let launch = [Op::Launch(Launch::new(&add, [WORDS, 1, 1], &args)?)];

    // All of it goes into the queue: each sum is behind the kernel before it, and the copy is behind the last sum.
    let queue = device.create_queue(&QueueDesc::default())?;
    for _ in 0..STEPS {
        queue.submit(&Submission { ops: &launch, ..Submission::default() })?;
        comm.all_reduce(ReduceOp::Sum, DType::U32, &words, &words)?.on(&queue)?;
    }
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    let (copy, signals) = ([Op::Copy(CopyRegion::new(&words, &landing)?)], std::slice::from_ref(&done));
    queue.submit(&Submission { ops: &copy, signals, waits: &[] })?;
    done.wait(WITHIN)?;

    let mut found = vec![0; WORDS as usize * 4];
    landing.read(&mut found)?;
    let found: Vec<u32> = found.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    assert!(found.iter().all(|word| *word == found[0]), "every word has the same to add");
    // Nobody leaves while others still sum.
    comm.barrier(WITHIN)?;
    Ok(found[0])
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_ends_well() -> Result<(), super::Failure> {
        super::main()
    }
}
