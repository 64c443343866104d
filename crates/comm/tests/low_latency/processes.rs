//! One process for each device. The program starts itself again, for the same test.

use std::{env, path::PathBuf, process::Command};

use warpweft_bootstrap::{Group, JoinConfig, Rank, Rendezvous, RunId};
use warpweft_core_types::{Backend as _, DType, Features, ReduceOp};

use crate::rig::{PATIENCE, Place, config, gpus, read};

/// Tells a process which rank it is.
const RANK: &str = "WARPWEFT_TEST_RANK";
/// Where ranks find each other.
const FOLDER: &str = "WARPWEFT_TEST_FOLDER";

const SIZE: u32 = 3;

#[test]
fn processes_reach_each_others_devices() {
    match env::var(RANK) {
        Err(_) => start(),
        Ok(rank) => be(rank.parse().unwrap(), &PathBuf::from(env::var_os(FOLDER).unwrap())),
    }
}

fn start() {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..SIZE)
        .map(|rank| {
            let mut command = Command::new(env::current_exe().unwrap());
            command.args(["processes::processes_reach_each_others_devices", "--exact"]);
            command.env(RANK, rank.to_string()).env(FOLDER, folder.path()).spawn().unwrap()
        })
        .collect();
    let ended: Vec<bool> = ranks.into_iter().map(|mut rank| rank.wait().unwrap().success()).collect();
    assert_eq!(ended, [true; SIZE as usize]);
}

fn be(rank: u32, folder: &std::path::Path) {
    let (_driver, backend) = gpus(SIZE);
    let rendezvous = Rendezvous::file(folder.join("rendezvous"), RunId::from("run"));
    let group = Group::join(rendezvous, JoinConfig::new(Rank(rank), SIZE), PATIENCE).unwrap();
    let place = Place::new(group, backend.open(rank, Features::empty()).unwrap(), &config());
    let view = place.numbers(&[rank + 1; 40_000]);
    let graph = place.graph_of_a_sum(&view);
    for _ in 0..5 {
        place.comm.replay(&graph, &place.queue).unwrap();
    }
    let gathered = place.numbers(&[0; 3 * SIZE as usize]);
    let own = place.numbers(&[rank; 3]);
    place
        .comm
        .all_gather(DType::U32, &own, &gathered)
        .unwrap()
        .on(&place.queue)
        .unwrap()
        .wait(PATIENCE)
        .unwrap();
    // 6 of all the first time, and three times as much each time after.
    assert!(read(&view) == [6 * 81; 40_000]);
    assert_eq!(read(&gathered), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    let least = place.numbers(&[rank + 7]);
    let call = place.comm.all_reduce_in_place(ReduceOp::Min, DType::U32, &least).unwrap();
    call.wait(PATIENCE).unwrap();
    assert_eq!(read(&least), [7]);
    place.comm.barrier(PATIENCE).unwrap();
}
