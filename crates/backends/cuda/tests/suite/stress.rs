//! Much at once and in every order: residents, graphs, drops, threads.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Access, Arg, Backend as _, BufferDesc, BufferView, CopyRegion, Deadline, DeviceExt as _, Features,
    FillRegion, GraphNode, Launch, Op, PreparedGraph, QueueDesc, Resident, ResidentDesc, ResidentError,
    ResidentState, SemaphorePoint, Submission, TimestampRegion, WaitError,
};
use warpweft_cuda::CudaBackend;
use warpweft_host::HostBackend;
use warpweft_stand_in_cuda::StandIn;

use crate::support::{
    Lane, Outcome, PATIENCE, Pages, backend, blocking, counter, failing, kernel, number, soon, until,
};

fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

fn start(
    lane: &Lane,
    kernel: &Arc<dyn warpweft_core_types::Kernel>,
    workgroups: u32,
) -> Outcome<(Arc<dyn Resident>, BufferView)> {
    let counts = lane.memory(BufferDesc::host_visible(u64::from(workgroups) * 4))?;
    let args = [Arg::Buffer(&counts)];
    let launch = Launch::new(kernel, [workgroups, 1, 1], &args)?;
    Ok((lane.device.residents().ok_or("absent")?.launch(&ResidentDesc::new(launch))?, counts))
}

fn lose(lane: &mut Lane, fails: &Arc<dyn warpweft_core_types::Kernel>, memory: &BufferView) -> Outcome {
    let args = [Arg::Buffer(memory)];
    let _ = lane.submit(&[Op::Launch(Launch::new(fails, [1; 3], &args)?)])?.wait(PATIENCE);
    Ok(())
}

/// The same when
#[cfg(any())]
/// (opening loads code, which waits for the kernel, so this says nothing)
/// when a device is opened again while a resident of the one before is still there.
#[cfg(any())]
#[test]
fn a_reopened_device_knows_what_still_runs() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let lane = Lane::open(&backend, 0)?;
    let kernel = kernel(&lane.device, &stubborn())?;
    let (resident, word) = start(&lane, &kernel, 3)?;
    drop((kernel, resident));
    drop(lane);
    let reopened = soon(PATIENCE, move || {
        let device = backend.open(0, Features::empty()).map_err(|e| e.to_string());
        (device.map(|d| d.residents().unwrap().budget()), backend)
    });
    word.write(&1_u32.to_le_bytes())?;
    let (budget, _backend) = reopened.ok_or("opening again hangs while an old resident is stubborn")?;
    println!("{budget:?}");
    assert_eq!(budget?.used, 3, "a stubborn resident of the device before is still there");
    Ok(())
}

/// A forgotten `foreign`.
#[test]
fn a_forgotten_way_harms_nobody() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    std::mem::forget(lane.device.residents().unwrap().give_way());
    lane.device.foreign(|| lane.device.foreign(|| lane.device.foreign(|| ())));
    let (resident, _c) = start(&lane, &kernel, 2)?;
    lane.count_to_four()?;
    resident.park(within())?;
    resident.resume()?;
    Ok(resident.stop(within())?)
}

/// The device is lost in the middle of parks, replays and readings.
#[test]
fn a_device_lost_in_the_middle_of_everything() -> Outcome {
    let outcome = soon(PATIENCE, || -> Outcome {
        for round in 0..10_u64 {
            let stand_in = StandIn::load()?;
            let backend = backend(&stand_in);
            let mut lane = Lane::open(&backend, 0)?;
            let (counter, fails) = (kernel(&lane.device, &counter())?, kernel(&lane.device, &failing())?);
            let memory = lane.memory(BufferDesc::device(64))?;
            let (resident, _c) = start(&lane, &counter, 2)?;
            let parker = {
                let resident = Arc::clone(&resident);
                thread::spawn(move || {
                    loop {
                        if let Err(error) = resident.park(within()).and_then(|()| resident.resume()) {
                            return error;
                        }
                        if resident.state() == ResidentState::Failed {
                            return ResidentError::Failed(resident.failure().unwrap());
                        }
                    }
                })
            };
            let replays = {
                let (mut lane, memory) = (Lane::open(&backend, 0)?, memory.clone());
                thread::spawn(move || -> Outcome {
                    let fill = Op::Fill(FillRegion::bytes(&memory, 1));
                    let graph = PreparedGraph::new(lane.device.as_ref(), &[GraphNode::new(&fill, &[])])?;
                    loop {
                        lane.submit(&[Op::Replay(&graph)])?.wait(PATIENCE)?;
                    }
                })
            };
            let clock = {
                let device = Arc::clone(&lane.device);
                thread::spawn(move || {
                    loop {
                        if let Err(failure) = device.clock().unwrap().sample(within()) {
                            return failure;
                        }
                    }
                })
            };
            thread::sleep(Duration::from_millis(round));
            lose(&mut lane, &fails, &memory)?;
            let _ = (parker.join().map_err(|_| "parker panics")?, clock.join().map_err(|_| "clock panics")?);
            let error = replays.join().map_err(|_| "replays panic")?.unwrap_err();
            assert!(!matches!(error.downcast_ref(), Some(WaitError::Timeout { .. })), "{error}");
        }
        Ok(())
    });
    outcome.ok_or("it hangs")?
}

/// No nodes, and many.
#[test]
fn graphs_of_no_nodes_and_of_many() -> Outcome {
    let mut lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let empty = PreparedGraph::new(lane.device.as_ref(), &[])?;
    lane.submit(&[Op::Replay(&empty), Op::Replay(&empty)])?.wait(PATIENCE)?;
    let memory = lane.memory(BufferDesc::device(64))?;
    let fill = Op::Fill(FillRegion::bytes(&memory, 1));
    let nodes: Vec<_> = (0..5000_usize)
        .map(|at| GraphNode::new(&fill, if at > 0 { vec![at - 1] } else { vec![] }.as_slice()))
        .collect();
    let many = PreparedGraph::new(lane.device.as_ref(), &nodes)?;
    for _ in 0..5 {
        lane.submit(&[Op::Replay(&many)])?.wait(PATIENCE)?;
    }
    Ok(())
}

/// Operands changed from several threads while replays run.
#[test]
fn operands_of_many_threads() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let first = Lane::open(&backend, 0)?;
    let number = kernel(&first.device, &number())?;
    let memory = first.memory(BufferDesc::device(64))?;
    let base = 0_u32.to_le_bytes();
    let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
    let (fill, launch) =
        (Op::Fill(FillRegion::bytes(&memory, 0)), Op::Launch(Launch::new(&number, [8, 1, 1], &args)?));
    let graph = PreparedGraph::new(
        first.device.as_ref(),
        &[GraphNode::new(&fill, &[]), GraphNode::new(&launch, &[0])],
    )?;
    drop(memory);
    let threads: Vec<_> = (0..6_u32)
        .map(|thread| {
            let (mut graph, number) = (graph.clone(), Arc::clone(&number));
            let mut lane = Lane::open(&backend, 0).unwrap();
            std::thread::spawn(move || -> Outcome {
                for round in 0..150_u32 {
                    let memory = lane.memory(BufferDesc::device(64))?;
                    let window = lane.memory(BufferDesc::host_visible(64))?;
                    let base = (thread * 100_000 + round).to_le_bytes();
                    let byte = u8::try_from(round % 200)?;
                    let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
                    graph.set(0, &Op::Fill(FillRegion::bytes(&memory, byte)))?;
                    graph.set(1, &Op::Launch(Launch::new(&number, [8, 1, 1], &args)?))?;
                    let point =
                        lane.submit(&[Op::Replay(&graph), Op::Copy(CopyRegion::new(&memory, &window)?)])?;
                    drop(memory);
                    point.wait(PATIENCE)?;
                    let mut bytes = [0; 64];
                    window.read(&mut bytes)?;
                    let words: Vec<u32> =
                        bytes.as_chunks().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
                    let expected: Vec<u32> = (0..8).map(|i| thread * 100_000 + round + i).collect();
                    if words[..8] != expected[..] || bytes[32..] != [byte; 32] {
                        return Err(format!("thread {thread} round {round}: {words:?}").into());
                    }
                }
                Ok(())
            })
        })
        .collect();
    drop((first, graph, number));
    for thread in threads {
        thread.join().map_err(|_| "panic")??;
    }
    Ok(())
}

/// Every order of drops while work is under way.
#[test]
fn every_order_of_drops() -> Outcome {
    let outcome = soon(PATIENCE, || -> Outcome {
        let stand_in = StandIn::load()?;
        let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
        let mut seed = 12345_u64;
        for round in 0..60 {
            let backend = backend(&stand_in);
            let mut lane = Lane::open(&backend, 0)?;
            let mut other = Lane::open(&backend, 1)?;
            let (counter, number) = (kernel(&lane.device, &counter())?, kernel(&lane.device, &number())?);
            let stays = kernel(&lane.device, &blocking())?;
            let (resident, counts) = start(&lane, &counter, 2)?;
            let (parked, counts2) = start(&lane, &counter, 2)?;
            parked.park(within())?;
            let memory = lane.memory(BufferDesc::device(4096))?;
            let shared = BufferView::whole(lane.device.sharing().unwrap().allocate_shareable(4096)?);
            let base = 1_u32.to_le_bytes();
            let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
            let launch = Op::Launch(Launch::new(&number, [8, 1, 1], &args)?);
            let copy = Op::Copy(CopyRegion::new(&memory, &shared)?);
            let captured = lane.device.interop().unwrap().capture(
                vec![(memory.clone(), Access::Read)],
                Arc::new(()),
                &mut |_| Ok(()),
            )?;
            let stamp = lane.memory(BufferDesc::host_visible(8))?;
            let timestamp = Op::Timestamp(TimestampRegion::new(lane.device.clock().unwrap(), &stamp)?);
            let nodes = [
                GraphNode::new(&launch, &[]),
                GraphNode::new(&copy, &[0]),
                GraphNode::new(captured, &[1]),
                GraphNode::new(&timestamp, &[0]),
            ];
            let graph = PreparedGraph::new(lane.device.as_ref(), &nodes)?;
            // Memory that can be written when the device's buffer of it is gone.
            let pages = Pages::new(1);
            let word = BufferView::whole(lane.device.host_import().unwrap().import(pages.part(0, 1))?);
            let window = BufferView::whole(stranger.host_import().unwrap().import(pages.part(0, 1))?);
            let args = [Arg::Buffer(&word)];
            lane.submit(&[Op::Launch(Launch::new(&stays, [1; 3], &args)?)])?;
            let point = lane.submit(&[Op::Replay(&graph), Op::Replay(&graph)])?;
            let far = other.next.clone();
            other.next.value += 1;
            other.queue.submit(&Submission {
                waits: std::slice::from_ref(&point),
                ops: &[],
                signals: std::slice::from_ref(&far),
            })?;
            // Held for good: nobody signals that.
            let never = SemaphorePoint::new(&lane.device.create_semaphore(0)?, 9);
            let held = SemaphorePoint::new(&other.device.create_semaphore(0)?, 1);
            other.queue.submit(&Submission {
                waits: std::slice::from_ref(&never),
                ops: &[],
                signals: std::slice::from_ref(&held),
            })?;
            let mut things: Vec<Box<dyn std::any::Any + Send>> = vec![
                Box::new(backend),
                Box::new(lane),
                Box::new(other),
                Box::new((counter, number)),
                Box::new(stays),
                Box::new(resident),
                Box::new(parked),
                Box::new((counts, counts2)),
                Box::new(memory),
                Box::new(shared),
                Box::new(stamp),
                Box::new(graph),
                Box::new(word),
                Box::new(point),
                Box::new(never),
            ];
            let release = round % 3;
            let end = || window.write(&1_u32.to_le_bytes());
            if release == 0 {
                end()?;
            }
            let mut ended = release == 0;
            while !things.is_empty() {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(seed >> 33)? % things.len();
                drop(things.swap_remove(at));
                if release == 1 && things.len() == 7 {
                    end()?;
                    ended = true;
                }
            }
            if !ended {
                end()?;
            }
            far.wait(PATIENCE).map_err(|error| format!("round {round}: {error}"))?;
            drop(far);
            let settled = held.wait(PATIENCE);
            assert!(matches!(settled, Err(WaitError::Failed(_))), "round {round}: {settled:?}");
            drop(held);
        }
        let kinds = [
            "contexts",
            "streams",
            "events",
            "modules",
            "pools",
            "ranges",
            "graphs",
            "executables",
            "memories",
            "reservations",
            "linkers",
        ];
        until(|| kinds.iter().all(|kind| stand_in.live(kind) == 0));
        Ok(())
    });
    outcome.ok_or("it hangs")?
}

/// Many threads do everything at once.
#[test]
fn many_threads_do_everything_at_once() -> Outcome {
    let outcome = soon(PATIENCE, || -> Outcome {
        let stand_in = StandIn::load()?;
        let backend = Arc::new(backend(&stand_in));
        let until = Instant::now() + Duration::from_secs(6);
        let threads: Vec<_> = (0..8_u32)
            .map(|thread| {
                let backend = Arc::clone(&backend);
                std::thread::spawn(move || -> Outcome {
                    let mut round = 0;
                    while Instant::now() < until {
                        round += 1;
                        let mut lane = Lane::open(&backend, thread % 2)?;
                        match thread % 4 {
                            0 => {
                                let counter = kernel(&lane.device, &counter())?;
                                match start(&lane, &counter, 2) {
                                    Ok((resident, _c)) => {
                                        for _ in 0..5 {
                                            resident.park(within())?;
                                            resident.resume()?;
                                        }
                                        if round % 2 == 0 {
                                            resident.stop(within())?;
                                        }
                                    }
                                    Err(error)
                                        if matches!(
                                            error.downcast_ref(),
                                            Some(ResidentError::OverBudget { .. })
                                        ) => {}
                                    Err(error) => return Err(error),
                                }
                            }
                            1 => lane.count_to_four()?,
                            2 => {
                                lane.device.clock().unwrap().sample(within()).map_err(|f| f.to_string())?;
                                lane.count_to_four()?;
                            }
                            _ => {
                                let shared = lane.device.sharing().unwrap().allocate_shareable(4096)?;
                                let view = BufferView::whole(shared);
                                let fill = Op::Fill(FillRegion::bytes(&view, 1));
                                let graph =
                                    PreparedGraph::new(lane.device.as_ref(), &[GraphNode::new(&fill, &[])])?;
                                lane.submit(&[Op::Replay(&graph)])?.wait(PATIENCE)?;
                                lane.device.foreign(|| lane.device.memory().map(drop))?;
                            }
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for (at, thread) in threads.into_iter().enumerate() {
            thread.join().map_err(|_| "panic")?.map_err(|error| format!("thread {at}: {error:?}"))?;
        }
        Ok(())
    });
    outcome.ok_or("it hangs")?
}

/// Many submissions without a signal, and queues of one.
#[test]
fn counts_of_submissions() -> Outcome {
    let outcome = soon(PATIENCE, || -> Outcome {
        let backend = backend(&StandIn::load()?);
        let lane = Lane::open(&backend, 0)?;
        let one = lane.device.create_queue(&QueueDesc { capacity: 1 })?;
        let wide = lane.device.create_queue(&QueueDesc { capacity: usize::MAX })?;
        let (mut taken, mut full) = (0, 0);
        for _ in 0..20_000 {
            match one.submit(&Submission::default()) {
                Ok(_) => taken += 1,
                Err(_) => full += 1,
            }
        }
        println!("{taken} {full}");
        for _ in 0..50_000 {
            wide.submit(&Submission::default())?;
        }
        let last = lane.next.clone();
        wide.submit(&Submission { signals: std::slice::from_ref(&last), ..Submission::default() })?;
        last.wait(PATIENCE)?;
        assert!(lane.device.create_queue(&QueueDesc { capacity: 0 }).is_err());
        Ok(())
    });
    outcome.ok_or("it hangs")?
}

/// Devices opened and dropped by many threads.
#[test]
fn devices_opened_and_dropped_at_once() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = Arc::new(backend(&stand_in));
    let threads: Vec<_> = (0..6_u32)
        .map(|thread| {
            let backend: Arc<CudaBackend> = Arc::clone(&backend);
            std::thread::spawn(move || -> Outcome {
                for round in 0..40 {
                    let mut lane = Lane::open(&backend, (thread + round) % 2)?;
                    lane.submit(&[])?.wait(PATIENCE)?;
                }
                Ok(())
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "panic")??;
    }
    drop(backend);
    until(|| stand_in.live("contexts") + stand_in.live("pools") == 0);
    Ok(())
}
