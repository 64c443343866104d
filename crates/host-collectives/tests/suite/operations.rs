//! Every operation, type and reduction against the oracle.

use std::sync::Arc;

use proptest::{prelude::*, test_runner::TestRunner};
use warpweft_core_types::{CollectiveOp, DType, ReduceOp};
use warpweft_host_collectives::{CustomReduction, HostCommunicator, HostConfig, SliceCall, Slices};

use crate::{
    oracle,
    rig::{WITHIN, at_once, by_slots, directly, each, met},
};

/// One operation of all ranks.
#[derive(Debug, Clone)]
struct Case {
    op: CollectiveOp,
    dtype: DType,
    /// Elements of a part.
    count: usize,
    /// Elements before operands begin.
    offset: usize,
    is_in_place: bool,
    seed: u64,
}

/// Elements of any bits, but floating-point numbers of a size whose sums and products stay numbers.
fn elements(dtype: DType, count: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut element = || {
        let small = f64::from(random.i32(-4000..4000)) / 1000.0;
        match dtype {
            DType::F64 => small.to_le_bytes().to_vec(),
            DType::F32 => (small as f32).to_le_bytes().to_vec(),
            // Bits of numbers between 1/16 and 8, with either sign.
            DType::F16 => (random.u16(0x2c00..0x4800) | random.u16(0..2) << 15).to_le_bytes().to_vec(),
            DType::Bf16 => (random.u16(0x3d80..0x4100) | random.u16(0..2) << 15).to_le_bytes().to_vec(),
            DType::F8E4m3 => vec![random.u8(0x18..0x50) | random.u8(0..2) << 7],
            DType::F8E5m2 => vec![random.u8(0x2c..0x48) | random.u8(0..2) << 7],
            _ => (0..dtype.size_bytes()).map(|_| random.u8(..)).collect(),
        }
    };
    (0..count).flat_map(|_| element()).collect()
}

/// What a rank gives and gets, in parts.
fn parts(op: CollectiveOp, rank: u32, size: usize) -> (usize, usize) {
    let at = |root: u32, parts: usize| if root == rank { parts } else { 0 };
    match op {
        CollectiveOp::AllReduce(_) => (1, 1),
        CollectiveOp::ReduceScatter(_) => (size, 1),
        CollectiveOp::Reduce { root, .. } => (1, at(root, 1)),
        CollectiveOp::AllGather => (1, size),
        CollectiveOp::Broadcast { root } => (at(root, 1), 1),
        CollectiveOp::Gather { root } => (1, at(root, size)),
        CollectiveOp::Scatter { root } => (at(root, size), 1),
        _ => (size, size),
    }
}

fn with_factor(op: CollectiveOp, rank: usize) -> CollectiveOp {
    let of = |reduction| match reduction {
        ReduceOp::PremulSum(_) => ReduceOp::PremulSum(factor(rank)),
        other => other,
    };
    match op {
        CollectiveOp::AllReduce(reduction) => CollectiveOp::AllReduce(of(reduction)),
        CollectiveOp::ReduceScatter(reduction) => CollectiveOp::ReduceScatter(of(reduction)),
        CollectiveOp::Reduce { op, root } => CollectiveOp::Reduce { op: of(op), root },
        other => other,
    }
}

/// Another one for each rank, exact in every type.
fn factor(rank: usize) -> f64 {
    [2.0, 1.0, 3.0, 0.0][rank % 4]
}

fn check(communicators: &[Arc<HostCommunicator>], case: &Case) {
    let size = communicators.len();
    let element = case.dtype.size_bytes() as usize;
    let (offset, part) = (case.offset * element, case.count * element);
    let given: Vec<Vec<u8>> = (0..size)
        .map(|rank| {
            let count = parts(case.op, rank as u32, size).0 * case.count;
            elements(case.dtype, count, case.seed * 64 + rank as u64)
        })
        .collect();
    let results = each(communicators.iter().enumerate().collect(), |(rank, communicator)| {
        let (gives, gets) = parts(case.op, rank as u32, size);
        let mut src = vec![0xa5; offset + gives * part];
        src[offset..].copy_from_slice(&given[rank]);
        let mut dst = vec![0x5a; offset + gets * part];
        let in_place =
            case.is_in_place && gives > 0 && gets > 0 && !matches!(case.op, CollectiveOp::AllToAll);
        if in_place && gets > gives {
            dst[offset + rank * part..][..part].copy_from_slice(&given[rank]);
        }
        let operands = match (gives > 0, gets > 0) {
            _ if in_place && gets > gives => Slices::InPlace(&mut dst[offset..]),
            _ if in_place => Slices::InPlace(&mut src[offset..]),
            (true, true) => Slices::Both(&src[offset..], &mut dst[offset..]),
            (true, false) => Slices::Src(&src[offset..]),
            _ => Slices::Dst(&mut dst[offset..]),
        };
        let call = SliceCall { op: with_factor(case.op, rank), dtype: case.dtype, operands, custom: None };
        communicator.run_slices(&mut [call], WITHIN).unwrap();
        if !in_place {
            assert_eq!(src[offset..], given[rank], "a source has changed: {case:?}");
        }
        let result = match in_place && gets <= gives {
            true if gets < gives => src[offset + rank * part..][..part].to_vec(),
            true => src[offset..].to_vec(),
            false => dst[offset..].to_vec(),
        };
        assert!(src[..offset].iter().all(|byte| *byte == 0xa5));
        assert!(dst[..offset].iter().all(|byte| *byte == 0x5a));
        result
    });
    let factors: Vec<f64> = (0..size).map(factor).collect();
    for (rank, got) in results.iter().enumerate() {
        let expected = oracle::result(case.op, case.dtype, &factors, &given, rank, case.count);
        assert_eq!(got.len(), expected.len() * element, "{case:?}");
        for (index, (got, expected)) in got.chunks(element).zip(&expected).enumerate() {
            expected.check(case.dtype, got, &|| format!("element {index} of rank {rank}, {case:?}"));
        }
    }
    if let CollectiveOp::AllReduce(_) = case.op {
        assert!(results.iter().all(|result| *result == results[0]), "ranks differ: {case:?}");
    }
}

fn operations(size: u32, reduction: ReduceOp) -> Vec<CollectiveOp> {
    let root = size - 1;
    vec![
        CollectiveOp::AllReduce(reduction),
        CollectiveOp::ReduceScatter(reduction),
        CollectiveOp::Reduce { op: reduction, root },
        CollectiveOp::AllGather,
        CollectiveOp::Broadcast { root },
        CollectiveOp::Gather { root },
        CollectiveOp::Scatter { root },
        CollectiveOp::AllToAll,
    ]
}

fn every_reduction(size: u32, config: &HostConfig) {
    let communicators = met(size, config);
    for dtype in DType::ALL {
        for reduction in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
            for op in operations(size, reduction).into_iter().take(3) {
                for (count, is_in_place) in [(0, false), (1, true), (67, false), (301, true)] {
                    check(&communicators, &Case { op, dtype, count, offset: 1, is_in_place, seed: 7 });
                }
            }
        }
    }
}

fn every_operation(size: u32, config: &HostConfig, dtypes: &[DType]) {
    let communicators = met(size, config);
    for op in operations(size, ReduceOp::Sum) {
        for dtype in dtypes.iter().copied() {
            for (count, is_in_place) in
                [(0, true), (1, false), (2, true), (97, true), (97, false), (1000, true), (1000, false)]
            {
                check(&communicators, &Case { op, dtype, count, offset: 3, is_in_place, seed: 3 });
            }
        }
    }
}

#[test]
fn every_reduction_by_slots() {
    every_reduction(3, &by_slots());
}

#[test]
fn every_reduction_directly() {
    every_reduction(3, &directly());
}

#[test]
fn every_reduction_at_once() {
    every_reduction(2, &at_once());
}

#[test]
fn every_reduction_alone() {
    every_reduction(1, &HostConfig::default());
}

#[test]
fn every_operation_of_one_to_eight_ranks() {
    for size in 1..=8 {
        every_operation(size, &by_slots(), &[DType::F32, DType::U8]);
        every_operation(size, &directly(), &[DType::U8, DType::I64]);
    }
}

#[test]
fn sixteen_ranks() {
    let config = HostConfig { slot_bytes: 16 << 10, direct_bytes: 3000, ..HostConfig::default() };
    every_operation(16, &config, &[DType::F32]);
}

#[test]
fn large_operands_with_the_defaults() {
    for config in [HostConfig::default(), HostConfig { is_direct: false, ..Default::default() }] {
        let communicators = met(2, &config);
        for op in operations(2, ReduceOp::Sum) {
            for count in [4095, 4096, 40_001, 300_007] {
                let case =
                    Case { op, dtype: DType::F32, count, offset: 1, is_in_place: count % 2 == 0, seed: 5 };
                check(&communicators, &case);
            }
        }
    }
}

#[test]
fn results_are_the_same_bits_in_every_run_and_in_every_way() {
    let op = CollectiveOp::AllReduce(ReduceOp::Sum);
    let result = |config: &HostConfig| {
        let communicators = met(5, config);
        let all = each(communicators, |communicator| {
            let mut values = elements(DType::Bf16, 1001, u64::from(communicator.rank()));
            let operands = Slices::InPlace(&mut values);
            let call = SliceCall { op, dtype: DType::Bf16, operands, custom: None };
            communicator.run_slices(&mut [call], WITHIN).unwrap();
            values
        });
        assert!(all.iter().all(|values| *values == all[0]));
        all.into_iter().next().unwrap()
    };
    let first = result(&by_slots());
    for config in [by_slots(), directly(), at_once()] {
        assert_eq!(result(&config), first);
    }
}

#[test]
fn reductions_of_the_caller_take_the_place_of_the_built_in() {
    // The last rank's, which no built-in one is; and of more bytes than are reduced at a time.
    let last = CustomReduction::new("last", |acc: &mut [u8], x: &[u8]| acc.copy_from_slice(x));
    for (size, config) in [(1, by_slots()), (3, by_slots()), (3, directly()), (4, at_once())] {
        let communicators = met(size, &config);
        let results = each(communicators, |communicator| {
            let mut values = elements(DType::F32, 5001, u64::from(communicator.rank()));
            let op = CollectiveOp::AllReduce(ReduceOp::Xor);
            let operands = Slices::InPlace(&mut values);
            communicator
                .run_slices(&mut [SliceCall { op, dtype: DType::F32, operands, custom: Some(&last) }], WITHIN)
                .unwrap();
            values
        });
        let expected = elements(DType::F32, 5001, u64::from(size - 1));
        assert!(results.iter().all(|values| *values == expected));
    }
}

#[test]
fn any_case() {
    let configs = [by_slots(), directly(), at_once(), HostConfig { direct_bytes: 700, ..by_slots() }];
    let sets: Vec<Vec<_>> = configs.iter().flat_map(|config| (1..=4).map(|size| met(size, config))).collect();
    let strategy = (
        0..sets.len(),
        0_usize..8,
        (0..DType::ALL.len(), 0..ReduceOp::ALL.len()),
        (0_usize..700, 0_usize..5),
        any::<bool>(),
        0_u64..1000,
    );
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() });
    runner
        .run(&strategy, |(set, op, (dtype, reduction), (count, offset), is_in_place, seed)| {
            let (dtype, reduction) = (DType::ALL[dtype], ReduceOp::ALL[reduction]);
            prop_assume!(reduction.is_defined_for(dtype));
            let op = operations(sets[set].len() as u32, reduction)[op];
            check(&sets[set], &Case { op, dtype, count, offset, is_in_place, seed });
            Ok(())
        })
        .unwrap();
}

#[test]
fn bytes_are_rounded_to_the_nearest_and_what_is_too_large_is_the_largest() {
    // Every pair of bytes, one from each rank.
    for dtype in [DType::F8E4m3, DType::F8E5m2] {
        let communicators = met(2, &at_once());
        let given = [
            (0..=u16::MAX).map(|pair| pair as u8).collect::<Vec<_>>(),
            (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect(),
        ];
        let results =
            each(communicators.iter().zip(given.clone()).collect(), |(communicator, mut values)| {
                let operands = Slices::InPlace(&mut values);
                let op = CollectiveOp::AllReduce(ReduceOp::Sum);
                communicator
                    .run_slices(&mut [SliceCall { op, dtype, operands, custom: None }], WITHIN)
                    .unwrap();
                values
            });
        let numbers: Vec<f64> =
            (0..=255).map(|bits| oracle::value(dtype, &[bits])).filter(|value| value.is_finite()).collect();
        let largest = numbers.iter().copied().fold(0.0, f64::max);
        for (index, got) in results[0].iter().enumerate() {
            let [a, b] = [0, 1].map(|rank| oracle::value(dtype, &given[rank][index..=index]));
            let got = oracle::value(dtype, &[*got]);
            let sum = (a + b).clamp(-largest, largest);
            let nearest = numbers.iter().map(|number| (number - sum).abs()).fold(f64::INFINITY, f64::min);
            let is_right = if sum.is_nan() { got.is_nan() } else { (got - sum).abs() == nearest };
            assert!(is_right, "{dtype}: {a} + {b} is {got}");
        }
    }
}

#[test]
fn reductions_by_themselves_come_to_what_the_oracle_says() {
    use warpweft_host_collectives::reduce;

    for dtype in DType::ALL {
        let element = dtype.size_bytes() as usize;
        for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
            let given: Vec<Vec<u8>> = (0..2).map(|rank| elements(dtype, 1500, 90 + rank)).collect();
            // Memory that is aligned for nothing.
            let mut memory = [vec![0], given[0].clone()].concat();
            let acc = &mut memory[1..];
            let mut other = given[1].clone();
            if let ReduceOp::PremulSum(_) = op {
                reduce::premultiply(dtype, factor(0), acc);
                reduce::premultiply(dtype, factor(1), &mut other);
            }
            reduce::reduce(op, dtype, acc, &other);
            reduce::finish(op, dtype, 2, acc);
            for (index, got) in acc.chunks(element).enumerate() {
                let at = |rank: usize| &given[rank][index * element..][..element];
                let expected = oracle::reduced(op, dtype, &[factor(0), factor(1)], &[at(0), at(1)]);
                let expected = match expected {
                    // It is rounded up to three times on the way.
                    oracle::Expected::About(want, tolerance) => {
                        oracle::Expected::About(want, tolerance * 3.0)
                    }
                    exactly => exactly,
                };
                expected.check(dtype, got, &|| format!("element {index}, {op} of {dtype}"));
            }
        }
    }
}
