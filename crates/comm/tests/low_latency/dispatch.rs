//! Which engine takes a call, by what was measured.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use warpweft_comm::{CommConfig, EngineKind, Measured, TuningConfig};
use warpweft_core_types::{CollectiveOp, DType, ReduceOp};

use crate::rig::{PATIENCE, Place, ranks, read};

const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

fn tuned(cache: &Path, budget: Duration) -> CommConfig {
    CommConfig {
        tuning: Some(TuningConfig { budget, cache: Some(cache.to_owned()) }),
        ..CommConfig::default()
    }
}

/// The engine that took the last call.
fn last_engine(place: &Place) -> String {
    place.comm.flight().calls.last().unwrap().engine.clone()
}

fn sum(place: &Place, count: usize) {
    let view = place.numbers(&vec![1; count]);
    let bytes = view.size();
    place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view).unwrap().on(&place.queue).unwrap();
    let expected = place.comm.measured_for(SUM, DType::U32, bytes, false);
    let expected = expected.map_or(EngineKind::Planned, |measured| measured.ways[0].0.engine);
    assert_eq!(last_engine(place), expected.name(), "{bytes} bytes");
    place.comm.queue_barrier(&place.queue).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&view), vec![2; count]);
}

/// What both ranks measured, or found.
fn measured(config: &CommConfig) -> Vec<Measured> {
    let mut all = ranks(2, config, |place| {
        for count in [1, 2000, 40_000] {
            sum(&place, count);
        }
        place.comm.barrier(PATIENCE).unwrap();
        place.comm.measured().to_vec()
    });
    assert_eq!(all[0], all[1], "the ranks have different tables");
    all.swap_remove(0)
}

#[test]
fn what_is_measured_decides_and_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let config = tuned(folder.path(), Duration::from_secs(3));
    let first = measured(&config);
    let engines = |measured: &Measured| measured.ways.iter().map(|(way, _)| way.engine).collect::<Vec<_>>();
    let one = |captured| first.iter().find(|entry| entry.captured == captured).map(engines).unwrap();
    assert!(one(false).contains(&EngineKind::LowLatency), "{first:?}");
    assert!(one(false).contains(&EngineKind::Planned), "{first:?}");
    // It has no nodes, and so no time in graphs.
    assert!(!one(true).contains(&EngineKind::Planned), "{first:?}");
    assert!(first.iter().all(|entry| entry.ways.is_sorted_by_key(|(_, time)| *time)));
    // The same times: nothing was measured again.
    assert_eq!(measured(&config), first);
    // A file that is damaged is none.
    let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    fs::write(&file, "{}").unwrap();
    assert_ne!(measured(&config), first);
}

#[test]
fn measuring_ends_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let few = measured(&tuned(folder.path(), Duration::ZERO));
    assert_eq!(few.len(), 1);
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn nobody_takes_calls_unasked() {
    ranks(2, &CommConfig::default(), |place| {
        assert!(place.comm.engines().all(|engine| engine != EngineKind::LowLatency));
        assert!(place.comm.measured().is_empty());
        sum(&place, 10);
        place.comm.barrier(PATIENCE).unwrap();
    });
}
