//! `CUDA_VISIBLE_DEVICES` changes ordinals and nothing else.

use warpweft_core_types::{Backend, DeviceInfo};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, backend};

/// The devices that a list shows.
fn shown(list: Option<&str>) -> Vec<DeviceInfo> {
    let stand_in = StandIn::load().unwrap().with("devices", "4");
    if let Some(list) = list {
        stand_in.set("CUDA_VISIBLE_DEVICES", list);
    }
    backend(&stand_in).devices().unwrap()
}

#[test]
fn a_masked_order_shows_the_same_devices() {
    let all = shown(None);
    let check = |list: &str, expected: &[usize]| {
        let found = shown(Some(list));
        assert_eq!(found.len(), expected.len(), "{list}");
        for ((info, &index), ordinal) in found.iter().zip(expected).zip(0..) {
            assert_eq!((info.id.uuid, info.pci), (all[index].id.uuid, all[index].pci), "{list}");
            assert_eq!(info.id.ordinal, ordinal);
        }
    };
    check("3,1", &[3, 1]);
    check("3,2,1,0", &[3, 2, 1, 0]);
    let name = |index: usize| format!("GPU-{}", all[index].id.uuid);
    check(&format!("{},{}", name(2), name(0)), &[2, 0]);
    check(&name(1)[..8], &[1]);
}

#[test]
fn a_masked_device_works() -> Outcome {
    let stand_in = StandIn::load()?.with("CUDA_VISIBLE_DEVICES", "1,0");
    let backend = backend(&stand_in);
    Lane::open(&backend, 1)?.count_to_four()?;
    Lane::open(&backend, 0)?.count_to_four()
}
