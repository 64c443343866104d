//! Who a process is, by the variables of its launcher.

use std::time::Duration;

use warpweft_bootstrap::{Bind, Environment, EnvironmentError, Family, Group, JoinError, Rank};

type Variables<'a> = &'a [(&'a str, &'a str)];

const TORCH: Variables<'_> = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node7"),
];
const SLURM: Variables<'_> = &[
    ("SLURM_JOB_ID", "4100"),
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_NODELIST", "node[007-010]"),
];
const OPEN_MPI: Variables<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "8"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"),
];
const PMI: Variables<'_> = &[
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "8"),
    ("MPI_LOCALRANKID", "1"),
    ("MASTER_ADDR", "head"),
    ("MASTER_PORT", "99"),
];
const OURS: Variables<'_> = &[
    ("WARPWEFT_RANK", "3"),
    ("WARPWEFT_WORLD_SIZE", "8"),
    ("WARPWEFT_LOCAL_RANK", "1"),
    ("WARPWEFT_LOCAL_WORLD_SIZE", "2"),
    ("WARPWEFT_ADDRESS", "10.0.0.1:4711"),
    ("WARPWEFT_TOKEN", "secret"),
    ("WARPWEFT_RUN", "run"),
];

fn read(variables: &[Variables<'_>]) -> Result<Environment, EnvironmentError> {
    let all = variables.concat();
    // The last one counts, as in a shell.
    Environment::read(&|name| {
        all.iter().rev().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned())
    })
}

fn check(variables: &[Variables<'_>], family: Family, address: &str) {
    let environment = read(variables).unwrap();
    assert_eq!(environment.family, family, "{variables:?}");
    assert_eq!(
        (environment.rank, environment.size, environment.local_rank),
        (Rank(3), 8, Some(1)),
        "{family}"
    );
    assert_eq!(environment.address.as_deref(), Some(address), "{family}");
}

fn conflict(variables: &[Variables<'_>], first: (&'static str, u32), second: (&'static str, u32)) {
    let error = read(variables).unwrap_err();
    assert_eq!(error, EnvironmentError::Conflict { first, second });
    let text = error.to_string();
    for part in [first.0, second.0, &first.1.to_string(), &second.1.to_string()] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn every_family_gives_a_role() {
    check(&[OURS], Family::Warpweft, "10.0.0.1:4711");
    check(&[TORCH], Family::Torchrun, "node7:29500");
    check(&[SLURM], Family::Slurm, "node007:61444");
    check(&[OPEN_MPI], Family::OpenMpi, "10.96.0.1:61440");
    check(&[PMI], Family::Pmi, "head:99");
}

#[test]
fn the_first_family_counts_where_all_agree() {
    check(&[PMI, OPEN_MPI, SLURM, TORCH, OURS], Family::Warpweft, "10.0.0.1:4711");
    check(&[PMI, OPEN_MPI, SLURM, TORCH], Family::Torchrun, "node7:99");
    check(&[PMI, OPEN_MPI, SLURM], Family::Slurm, "head:99");
    check(&[PMI, OPEN_MPI], Family::OpenMpi, "head:99");
}

#[test]
fn families_that_disagree_are_named_with_their_values() {
    conflict(&[TORCH, SLURM, &[("SLURM_PROCID", "4")]], ("RANK", 3), ("SLURM_PROCID", 4));
    conflict(&[TORCH, SLURM, &[("SLURM_NTASKS", "4")]], ("WORLD_SIZE", 8), ("SLURM_NTASKS", 4));
    conflict(&[OURS, &[("RANK", "0"), ("WORLD_SIZE", "8")]], ("WARPWEFT_RANK", 3), ("RANK", 0));
    conflict(&[OPEN_MPI, PMI, &[("PMI_RANK", "0")]], ("OMPI_COMM_WORLD_RANK", 3), ("PMI_RANK", 0));
    conflict(&[TORCH, PMI, &[("MPI_LOCALRANKID", "0")]], ("LOCAL_RANK", 1), ("MPI_LOCALRANKID", 0));
}

#[test]
fn a_choice_settles_a_conflict() {
    let slurm = &[("SLURM_PROCID", "0"), ("WARPWEFT_ENVIRONMENT", "torchrun")];
    check(&[TORCH, SLURM, slurm], Family::Torchrun, "node7:29500");
    let error = read(&[TORCH, &[("WARPWEFT_ENVIRONMENT", "pmix")]]).unwrap_err();
    assert!(matches!(error, EnvironmentError::BadValue { variable: "WARPWEFT_ENVIRONMENT", .. }), "{error}");
}

#[test]
fn what_is_missing_or_damaged_is_named() {
    assert_eq!(read(&[]).unwrap_err(), EnvironmentError::NoLauncher);
    let incomplete = |present, missing| EnvironmentError::Incomplete { present, missing };
    assert_eq!(read(&[&[("RANK", "1")]]).unwrap_err(), incomplete("RANK", "WORLD_SIZE"));
    assert_eq!(read(&[&[("WORLD_SIZE", "1")]]).unwrap_err(), incomplete("WORLD_SIZE", "RANK"));
    assert_eq!(
        read(&[TORCH, &[("WARPWEFT_RANK", "1")]]).unwrap_err(),
        incomplete("WARPWEFT_RANK", "WARPWEFT_WORLD_SIZE")
    );
    assert_eq!(read(&[TORCH, &[("MASTER_ADDR", "")]]).unwrap_err(), incomplete("RANK", "MASTER_ADDR"));
    for (variable, value) in [
        ("RANK", "-1"),
        ("RANK", "+1"),
        ("WORLD_SIZE", "many"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ] {
        let error = read(&[TORCH, &[(variable, value)]]).unwrap_err();
        assert!(
            matches!(error, EnvironmentError::BadValue { variable: it, .. } if it == variable),
            "{error}"
        );
    }
    for nodes in ["node[", "node[9-1]"] {
        let error = read(&[SLURM, &[("SLURM_STEP_NODELIST", nodes)]]).unwrap_err();
        assert!(
            matches!(error, EnvironmentError::BadValue { variable: "SLURM_STEP_NODELIST", .. }),
            "{error}"
        );
    }
    let error = read(&[TORCH, &[("RANK", "8")]]).unwrap_err();
    assert_eq!(error, EnvironmentError::OutOfRange { rank: ("RANK", 8), size: ("WORLD_SIZE", 8) });
    let error = read(&[PMI, &[("MASTER_ADDR", "")]]).unwrap_err();
    assert_eq!(error, EnvironmentError::NoAddress { family: Family::Pmi });
}

#[test]
fn a_job_on_one_host_meets_on_the_loopback() {
    let local = &[("LOCAL_WORLD_SIZE", "8")];
    check(&[TORCH, local], Family::Torchrun, "127.0.0.1:29500");
    let agent = &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_PORT", "4000")];
    check(&[TORCH, local, agent], Family::Torchrun, "127.0.0.1:4001");
    let local = &[("OMPI_COMM_WORLD_LOCAL_SIZE", "8"), ("PMIX_NAMESPACE", "prterun-1")];
    let first = read(&[OPEN_MPI, local]).unwrap();
    assert!(first.address.as_ref().unwrap().starts_with("127.0.0.1:6"), "{first:?}");
    assert_eq!(first.address, read(&[OPEN_MPI, local]).unwrap().address);
}

#[test]
fn steps_and_restarts_are_runs_of_their_own() {
    let run = |variables: &[Variables<'_>]| read(variables).unwrap().run.as_str().to_owned();
    assert_eq!(run(&[OURS]), "run");
    assert_eq!(run(&[SLURM, &[("SLURM_STEP_ID", "1")]]), "4100.1");
    assert_ne!(run(&[SLURM, &[("SLURM_RESTART_COUNT", "1")]]), run(&[SLURM]));
    let elastic = &[("TORCHELASTIC_RUN_ID", "job"), ("TORCHELASTIC_RESTART_COUNT", "2")];
    assert_eq!(run(&[TORCH, elastic]), "job.2");
}

#[test]
fn where_to_listen_is_said_by_a_variable() {
    let bind = |value: &str| read(&[OURS, &[("WARPWEFT_BIND", value)]]).map(|environment| environment.bind);
    assert_eq!(read(&[OURS]).unwrap().bind, Bind::Loopback);
    assert_eq!(bind("any"), Ok(Bind::Any));
    assert_eq!(bind("interface:eth0"), Ok(Bind::Interface("eth0".into())));
    for wrong in ["eth0", "interface:", "0.0.0.0"] {
        assert!(bind(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_group_of_one_needs_no_address() {
    let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
    let environment = read(&[&one]).unwrap();
    assert_eq!(environment.address, None);
    let rendezvous = environment.rendezvous().unwrap();
    let group = Group::join(rendezvous, environment.join_config(), Duration::from_secs(10)).unwrap();
    assert_eq!((group.rank(), group.size()), (Rank(0), 1));
}

#[test]
fn an_address_may_be_a_file_or_an_id() {
    let with = |address: &str| read(&[OURS, &[("WARPWEFT_ADDRESS", address)]]).unwrap().rendezvous();
    assert!(format!("{:?}", with("file:some/where").unwrap()).contains("File"));
    assert!(matches!(with("id:00"), Err(EnvironmentError::BadId { .. })));
    assert!(!format!("{:?}", with("host:1").unwrap()).contains("secret"));
}

#[test]
fn a_job_of_several_hosts_is_told_to_say_where_it_listens() {
    let environment = read(&[&[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "192.0.2.1"),
    ]])
    .unwrap();
    let rendezvous = environment.rendezvous().unwrap();
    let error = Group::join(rendezvous, environment.join_config(), Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, JoinError::NotLoopback { .. }), "{error}");
}
