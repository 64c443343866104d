//! Reductions of the user's own.

use std::sync::Arc;

use warpweft_comm::{CommError, EngineKind, UserReduction};
use warpweft_core_types::{
    Buffer, BufferView, DType, DeviceId, ErrorClass, HostFunction, HostMapping, KernelCode, KernelContract,
    MemoryKind, Param, ReduceOp, Workgroup,
};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read, told};

/// A kernel that folds the words of all ranks.
fn folding(fold: fn(u32, u32) -> u32) -> KernelCode {
    let params = [Param::read(4), Param::write(4), Param::scalar::<u32>(), Param::scalar::<u32>()];
    let body = move |workgroup: &Workgroup<'_>| {
        let (given, result) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        let (elements, ranks) = (workgroup.scalar::<u32>(2), workgroup.scalar::<u32>(3));
        let [width, ..] = workgroup.size();
        let first = workgroup.index()[0] * width;
        for place in first..elements.min(first + width) {
            let of_rank = |rank: u32| given.get((rank * elements + place) as usize);
            let folded = (1..ranks).map(of_rank).fold(of_rank(0), fold);
            result.set(place as usize, folded);
        }
    };
    let contract = KernelContract::new("fold", params).with_workgroup_size([64, 1, 1]);
    KernelCode::new().with_function(contract, HostFunction::new(body))
}

#[test]
fn a_reduction_of_the_user_s_is_checked_and_used() {
    for engine in ENGINES {
        ranks(3, &only(engine), |place| {
            let load = |fold| UserReduction::load(&place.device, &folding(fold), "fold", DType::U32).unwrap();
            let sum = load(u32::wrapping_add);
            sum.check(ReduceOp::Sum, 5, PATIENCE).unwrap();
            let wrong = sum.check(ReduceOp::Max, 5, PATIENCE).unwrap_err();
            assert!(matches!(wrong, CommError::WrongReduction { element: 0, .. }), "{wrong}");
            // One that is not built in: the last digit of the product.
            let digit = load(|a, b| a * b % 10);
            let words = place.numbers(&vec![place.rank() + 2; 300]);
            let queue = place.queue();
            place.comm.all_reduce_with(&digit, &words, &words, &queue).unwrap();
            let call = place.comm.all_reduce_with(&sum, &words, &words, &queue).unwrap();
            call.wait(PATIENCE).unwrap();
            // 2 * 3 * 4 ends with 4, and three of these are 12.
            assert_eq!(read(&words), vec![12; 300], "{engine}");
            place.comm.barrier(PATIENCE).unwrap();
        });
    }
}

/// A buffer that is all size.
#[derive(Debug)]
struct Huge(DeviceId);

impl Buffer for Huge {
    fn device(&self) -> DeviceId {
        self.0
    }

    fn size(&self) -> u64 {
        (u64::from(u32::MAX) + 1) * 4
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }

    fn mapping(&self) -> Option<HostMapping<'_>> {
        None
    }
}

#[test]
fn more_elements_than_the_kernel_can_count_are_refused() {
    ranks(2, &only(EngineKind::Host), |place| {
        let sum = folding(u32::wrapping_add);
        let sum = UserReduction::load(&place.device, &sum, "fold", DType::U32).unwrap();
        let huge = BufferView::whole(Arc::new(Huge(place.device.info().id)));
        let refused = place.comm.all_reduce_with(&sum, &huge, &huge, &place.queue());
        let (class, text) = told(refused);
        assert_eq!(class, ErrorClass::Unsupported, "{text}");
        assert!(text.contains("4294967296 elements"), "{text}");
        place.comm.barrier(PATIENCE).unwrap();
    });
}
