//! Machine code that is kept for the next run.

use std::{fs, path::PathBuf};

use warpweft_cuda::CudaBackend;
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, config};

const MAGIC: &[u8] = b"warpweft cubin 1";

/// Opens a device, runs a kernel of PTX, and says how often the driver's compiler was asked for that.
fn compilations(stand_in: &StandIn, folder: &tempfile::TempDir) -> Outcome<u64> {
    let before = stand_in.calls("cuLinkCreate_v2");
    let backend = CudaBackend::with_config(&config(stand_in).with_cache(folder.path().join("kept")))?;
    Lane::open(&backend, 0)?.count_to_four()?;
    Ok(stand_in.calls("cuLinkCreate_v2") - before)
}

fn files(folder: &tempfile::TempDir) -> Outcome<Vec<PathBuf>> {
    fs::read_dir(folder.path().join("kept/cubin"))?.map(|entry| Ok(entry?.path())).collect()
}

#[test]
fn code_is_compiled_once() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    // The backend's own kernels, and that of the test.
    assert_eq!(compilations(&stand_in, &folder)?, 2);
    assert_eq!(files(&folder)?.len(), 2);
    assert_eq!(compilations(&stand_in, &folder)?, 0);
    // The next run of the program.
    assert_eq!(compilations(&StandIn::load()?, &folder)?, 0);
    // A driver of another version makes other code.
    let newer = StandIn::load()?.with("version", "13010");
    assert_eq!(compilations(&newer, &folder)?, 2);
    assert_eq!(files(&folder)?.len(), 4);
    Ok(())
}

#[test]
fn what_a_user_has_in_the_folder_stays() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    let names = (0..600).map(|number| folder.path().join("kept").join(format!("thesis-{number}.txt")));
    let names: Vec<PathBuf> = names.collect();
    fs::create_dir(folder.path().join("kept"))?;
    names.iter().try_for_each(|name| fs::write(name, "mine"))?;
    assert_eq!(compilations(&stand_in, &folder)?, 2);
    assert!(names.iter().all(|name| name.exists()));
    assert_eq!(compilations(&stand_in, &folder)?, 0, "and is not in the way");
    Ok(())
}

#[test]
fn a_damaged_file_is_not_used() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    compilations(&stand_in, &folder)?;
    for damage in [|bytes: &mut Vec<u8>| bytes.truncate(70), |bytes: &mut Vec<u8>| bytes[60] ^= 1, Vec::clear]
    {
        for path in files(&folder)? {
            let mut bytes = fs::read(&path)?;
            damage(&mut bytes);
            fs::write(path, bytes)?;
        }
        assert_eq!(compilations(&stand_in, &folder)?, 2);
        assert_eq!(compilations(&stand_in, &folder)?, 0, "it was written anew");
    }
    Ok(())
}

/// Whole files of another driver, which this one refuses to load.
#[test]
fn code_that_the_driver_refuses_is_made_anew() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    compilations(&stand_in, &folder)?;
    let mut elf = [0_u8; 64];
    elf[..5].copy_from_slice(b"\x7fELF\x02");
    for foreign in [&elf[..], b"no ELF at all"] {
        for path in files(&folder)? {
            fs::write(path, [MAGIC, blake3::hash(foreign).as_bytes(), foreign].concat())?;
        }
        assert_eq!(compilations(&stand_in, &folder)?, 2);
        assert_eq!(compilations(&stand_in, &folder)?, 0);
    }
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_written_costs_time_alone() -> Outcome {
    let (stand_in, folder) = (StandIn::load()?, tempfile::tempdir()?);
    fs::write(folder.path().join("kept"), "a file")?;
    assert_eq!(compilations(&stand_in, &folder)?, 2);
    assert_eq!(compilations(&stand_in, &folder)?, 2);
    Ok(())
}

#[test]
fn without_a_folder_code_is_compiled_every_time() -> Outcome {
    let stand_in = StandIn::load()?;
    for runs in 1..=2 {
        Lane::open(&CudaBackend::with_config(&config(&stand_in))?, 0)?.count_to_four()?;
        assert_eq!(stand_in.calls("cuLinkCreate_v2"), 2 * runs);
    }
    Ok(())
}
