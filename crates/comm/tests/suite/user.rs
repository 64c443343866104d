//! Reductions of the user's own.

use warpweft_comm::{CommError, UserReduction};
use warpweft_core_types::{DType, HostFunction, KernelCode, KernelContract, Param, ReduceOp, Workgroup};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read};

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
