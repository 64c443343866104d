//! Devices that are lost under a communicator.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_bootstrap::Meeting;
use warpweft_comm::{CommConfig, CommError, Communicator};
use warpweft_core_types::{
    Backend, BufferDesc, BufferView, DType, ErrorClass, Features, QueueDesc, ReduceOp,
};
use warpweft_host::HostBackend;
use warpweft_wrappers::{FaultConfig, FaultyBackend};

use crate::rig::{ENGINES, PATIENCE, Place, join, only, until_failed};

/// What is bounded is over in it, on a machine that is busy with other things.
const SOON: Duration = Duration::from_secs(10);

/// The rank whose device dies.
const UNLUCKY: u32 = 1;

/// Three ranks call until a device dies at this step; whether it was later than the communicator.
fn lose(config: &CommConfig, step: u64) -> bool {
    let backend: Arc<dyn Backend> = Arc::new(HostBackend::with_devices(3).unwrap());
    let faults = FaultConfig { dies_at_step: Some(step), ..FaultConfig::default() };
    let faulty = FaultyBackend::new(Arc::clone(&backend), faults);
    let meeting = Meeting::new();
    let made = thread::scope(|scope| {
        let start = |rank| {
            let (meeting, backend, faulty) = (Arc::clone(&meeting), &backend, &faulty);
            scope.spawn(move || {
                let backend = if rank == UNLUCKY { faulty } else { backend.as_ref() as &dyn Backend };
                let device = backend.open(rank, Features::empty()).unwrap();
                match Communicator::create(join(meeting, rank, 3), &device, config, PATIENCE) {
                    Ok(comm) => {
                        call_until_the_end(&Place { comm, device });
                        true
                    }
                    // Whoever comes last to the board of the planned engine loads kernels for all, and hears of the device.
                    Err(error) => {
                        let class = error.class();
                        let is_expected = matches!(class, ErrorClass::DeviceLost | ErrorClass::PeerLost);
                        assert!(is_expected, "rank {rank}, step {step}: {error:?}");
                        false
                    }
                }
            })
        };
        let ranks: Vec<_> = (0..3).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(made.iter().all(|own| *own == made[0]), "all have a communicator or none: {made:?}");
    made[0]
}

fn call_until_the_end(place: &Place) {
    let ends = || {
        // Memory of the device is a step too.
        let word = place.device.allocate(&BufferDesc::device(4))?;
        let word = BufferView::whole(word);
        let queue = place.device.create_queue(&QueueDesc::default())?;
        loop {
            place.comm.all_reduce_in_place(ReduceOp::Max, DType::U32, &word)?.on(&queue)?.wait(PATIENCE)?;
        }
    };
    let ended: Result<(), CommError> = ends();
    let error = ended.unwrap_err();
    assert!(is_expected(place.rank(), &error), "rank {}: {error:?}", place.rank());
    // What died outside a call is the program's to tell.
    if place.rank() == UNLUCKY && matches!(error, CommError::Memory(_)) {
        let _known = place.comm.abort("its device is lost");
    }
    until_failed(&place.comm);
    let later = place.comm.barrier(PATIENCE).unwrap_err();
    assert!(is_expected(place.rank(), &later), "rank {}: {later:?}", place.rank());
}

/// Whose device it is hears of the device, and the others of a rank.
fn is_expected(rank: u32, error: &CommError) -> bool {
    let class = error.class();
    class == ErrorClass::PeerLost || (rank == UNLUCKY && class == ErrorClass::DeviceLost)
}

#[test]
fn a_device_that_is_lost_ends_the_calls_of_all_at_whatever_step() {
    for engine in ENGINES {
        let steps = (0..24).map(|step| {
            let began = Instant::now();
            let was_made = lose(&only(engine), step);
            assert!(began.elapsed() < SOON, "{engine}, step {step}: {:?}", began.elapsed());
            was_made
        });
        let later = steps.filter(|was_made| *was_made).count();
        assert!(later >= 12, "{engine}: {later}");
    }
}
