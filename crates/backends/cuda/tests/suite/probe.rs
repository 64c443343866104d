//! Which calls wait for kernels that stay.

use warpweft_cuda::Probed;
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Outcome, backend};

#[test]
fn calls_that_wait_are_found_out() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let probed = backend.probe_resident(0)?;
    let surprises: Vec<&Probed> = probed.iter().filter(|probed| probed.is_surprise()).collect();
    assert!(surprises.is_empty(), "{surprises:?}");
    for call in ["cuModuleLoadDataEx", "cuModuleUnload", "cuMemFreeHost", "cuMemHostUnregister"] {
        let found = probed.iter().find(|probed| probed.call == call).ok_or(call)?;
        assert!(found.waits, "{found:?}");
    }
    assert!(probed.len() > 15);
    Ok(())
}

/// The driver's answer to one of them ends the trial.
#[test]
fn a_call_that_fails_is_told() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    backend.probe_resident(0)?;
    stand_in.fail("cuStreamBeginCapture_v2", 0, 999);
    let error = backend.probe_resident(0).unwrap_err();
    assert!(error.to_string().contains("cuStreamBeginCapture"), "{error}");
    Ok(())
}
