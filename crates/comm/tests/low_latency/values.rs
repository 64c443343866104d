//! What calls give, where the conformance suite has no such case: many ranks, ragged exchanges, messages of many rounds,
//! and rings that are gone through again and again.

use std::time::Duration;

use warpweft_comm::CommConfig;
use warpweft_core_types::{
    Arg, BufferView, DType, Deadline, ErrorClass, Launch, QueueDesc, ReduceOp, ResidentDesc,
};

use crate::rig::{PATIENCE, Place, config, counter, ranks, read};

/// Who leaves ends the calls that others have still to make.
fn part(place: &Place) {
    place.comm.barrier(PATIENCE).unwrap();
}

fn numbers_of(rank: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| rank * 1000 + index).collect()
}

/// More ranks than are looked at at once, in one shot and in two.
#[test]
fn many_ranks_sum_in_their_order() {
    ranks(6, &config(), |place| {
        // The last goes bare, in two shots.
        for count in [1, 7, 20_000, 150_001] {
            let (src, dst) =
                (place.numbers(&numbers_of(place.rank(), count)), place.numbers(&vec![0; count as usize]));
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &src, &dst).unwrap().wait(PATIENCE).unwrap();
            let expected: Vec<u32> = (0..count).map(|index| 15_000 + 6 * index).collect();
            assert!(read(&dst) == expected, "{count} numbers");
        }
        part(&place);
    });
}

/// A message of many times what a slot holds, by one channel.
#[test]
fn messages_of_many_rounds_arrive() {
    let config = CommConfig { multiprocessors: Some(1), ..config() };
    for count in [2, 3] {
        ranks(count, &config, |place| {
            let view = place.numbers(&numbers_of(place.rank(), 50_000));
            place.comm.all_reduce_in_place(ReduceOp::Max, DType::U32, &view).unwrap().wait(PATIENCE).unwrap();
            assert!(read(&view) == numbers_of(count - 1, 50_000));
            part(&place);
        });
    }
}

/// What is stored bare beside what goes in lines, through the same rings: by one channel, so that a message takes rounds.
#[test]
fn bare_messages_and_lines_go_by_turns() {
    const MANY: u32 = 150_000;
    let config = CommConfig { multiprocessors: Some(1), ..config() };
    ranks(2, &config, |place| {
        let other = 1 - place.rank();
        let (word, taken) = (place.numbers(&[1]), place.numbers(&vec![0; MANY as usize]));
        // One of the two sends many numbers, the other few.
        let count = |rank: u32| if rank == 0 { MANY } else { 7 };
        let given = place.numbers(&numbers_of(place.rank(), count(place.rank())));
        let taken_part = taken.slice(0..u64::from(count(other)) * 4).unwrap();
        for _ in 0..2 {
            place
                .comm
                .all_reduce_in_place(ReduceOp::Sum, DType::U32, &word)
                .unwrap()
                .on(&place.queue)
                .unwrap();
            let call = place.comm.send_recv(DType::U32, (other, &given), (other, &taken_part)).unwrap();
            call.on(&place.queue).unwrap().wait(PATIENCE).unwrap();
            assert!(read(&taken_part) == numbers_of(other, count(other)));
            let src = (place.rank() == 0).then_some(&given);
            place.comm.broadcast(0, DType::U32, src, &taken).unwrap().on(&place.queue).unwrap();
        }
        place.comm.all_reduce_in_place(ReduceOp::Max, DType::U32, &taken).unwrap().wait(PATIENCE).unwrap();
        assert!(read(&taken) == numbers_of(0, MANY));
        assert_eq!(read(&word), [4]);
        part(&place);
    });
}

/// Of a graph that the host replays and does not look at in between, with other calls among them.
#[test]
fn replays_go_through_the_rings_again_and_again() {
    ranks(2, &config(), |place| {
        let view = place.numbers(&[1; 8]);
        let graph = place.graph_of_a_sum(&view);
        let word = place.numbers(&[place.rank()]);
        for _ in 0..20 {
            place.comm.replay(&graph, &place.queue).unwrap();
            let root = word.clone();
            let src = (place.rank() == 1).then_some(&root);
            place.comm.broadcast(1, DType::U32, src, &word).unwrap().on(&place.queue).unwrap();
        }
        place.comm.replay(&graph, &place.queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&view), [1 << 21; 8]);
        assert_eq!(read(&word), [1]);
        part(&place);
    });
}

/// Every rank gives every rank, itself too, as many numbers as the product of their places; the first gives nothing.
#[test]
fn ragged_exchanges_of_all_with_all() {
    const SIZE: u32 = 3;
    ranks(SIZE, &config(), |place| {
        let own = place.rank();
        let parts = |words: &[Vec<u32>]| -> Vec<Option<BufferView>> {
            words.iter().map(|words| (!words.is_empty()).then(|| place.numbers(words))).collect()
        };
        let given: Vec<Vec<u32>> =
            (0..SIZE).map(|to| vec![own * 10 + to; (own * (to + 1) * 999) as usize]).collect();
        let taken: Vec<Vec<u32>> = (0..SIZE).map(|from| vec![0; (from * (own + 1) * 999) as usize]).collect();
        let (src, dst) = (parts(&given), parts(&taken));
        for _ in 0..6 {
            place.comm.all_to_all_v(DType::U32, &src, &dst).unwrap().on(&place.queue).unwrap();
        }
        place.comm.all_to_all_v(DType::U32, &src, &dst).unwrap().wait(PATIENCE).unwrap();
        for (from, dst) in (0..).zip(&dst) {
            let found = dst.as_ref().map(read).unwrap_or_default();
            assert!(found == vec![from * 10 + own; (from * (own + 1) * 999) as usize], "from {from}");
        }
        part(&place);
    });
}

/// Pairs have rings of their own, which calls of all go by as well.
#[test]
fn sends_go_between_calls_of_all() {
    ranks(2, &config(), |place| {
        let (word, sum) = (place.numbers(&[place.rank() + 5]), place.numbers(&[1]));
        let (given, taken) = (place.numbers(&[place.rank(); 5000]), place.numbers(&[9; 5000]));
        for _ in 0..5 {
            if place.rank() == 0 {
                place.comm.send(1, DType::U32, &word).unwrap().on(&place.queue).unwrap();
            } else {
                place.comm.recv(0, DType::U32, &word).unwrap().on(&place.queue).unwrap();
            }
            let other = 1 - place.rank();
            let both = place.comm.send_recv(DType::U32, (other, &given), (other, &taken)).unwrap();
            both.on(&place.queue).unwrap();
            let call = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &sum).unwrap();
            call.on(&place.queue).unwrap().wait(PATIENCE).unwrap();
        }
        assert_eq!((read(&word), read(&sum)), (vec![5], vec![32]));
        assert!(read(&taken) == [1 - place.rank(); 5000]);
        part(&place);
    });
}

#[test]
fn several_communicators_go_on_at_once() {
    ranks(2, &config(), |place| {
        let other = place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap();
        let queue = place.device.create_queue(&QueueDesc::default()).unwrap();
        let (one, two) = (place.numbers(&[1; 3000]), place.numbers(&[1; 3000]));
        for _ in 0..8 {
            place
                .comm
                .all_reduce_in_place(ReduceOp::Sum, DType::U32, &one)
                .unwrap()
                .on(&place.queue)
                .unwrap();
            other.all_reduce_in_place(ReduceOp::Sum, DType::U32, &two).unwrap().on(&queue).unwrap();
        }
        place.comm.queue_barrier(&place.queue).unwrap().wait(PATIENCE).unwrap();
        other.queue_barrier(&queue).unwrap().wait(PATIENCE).unwrap();
        assert!(read(&one) == [256; 3000] && read(&two) == [256; 3000]);
        part(&place);
    });
}

/// Blocks that wait for each other all find room, also beside residents, since there are no more than that.
#[test]
fn communicators_share_a_device_until_it_is_full() {
    ranks(2, &config(), |place| {
        let budget = || place.device.residents().unwrap().budget();
        let (total, first) = (budget().total, budget().used);
        assert_eq!(first, total / 2);
        let mut others = Vec::new();
        let full = loop {
            match place.comm.split(Some(0), 0, PATIENCE) {
                Ok(other) => others.push(other.unwrap()),
                Err(full) => break full,
            }
        };
        assert!(full.to_string().contains("no multiprocessor left"), "{full}");
        assert_eq!(budget().used, total);
        let sums: Vec<BufferView> = others.iter().map(|_| place.numbers(&[1; 3000])).collect();
        // In another order on each device.
        let order: Vec<usize> = match place.rank() {
            0 => (0..others.len()).collect(),
            _ => (0..others.len()).rev().collect(),
        };
        let started = order.into_iter().map(|at| {
            let queue = place.device.create_queue(&QueueDesc::default()).unwrap();
            others[at].all_reduce_in_place(ReduceOp::Sum, DType::U32, &sums[at]).unwrap().on(&queue).unwrap()
        });
        let started: Vec<_> = started.collect();
        started.iter().for_each(|sum| sum.wait(PATIENCE).unwrap());
        assert!(sums.iter().all(|sum| read(sum) == [2; 3000]));
        part(&place);
        drop((started, others));
        // What looks after calls may be a moment behind.
        let deadline = Deadline::within(PATIENCE);
        while budget().used != first && !deadline.is_past() {
            std::thread::yield_now();
        }
        assert_eq!(budget().used, first);
        part(&place);
    });
}

/// A root learns nothing of those it gives to by what they give, and waits for them all the same.
#[test]
fn who_gives_waits_for_who_takes() {
    const CALLS: u32 = 12;
    ranks(2, &config(), |place| {
        let words: Vec<BufferView> =
            (0..CALLS).map(|call| place.numbers(&[call * (1 - place.rank())])).collect();
        let broadcast = |word: &BufferView| {
            let src = (place.rank() == 0).then_some(word);
            place.comm.broadcast(0, DType::U32, src, word).unwrap().on(&place.queue).unwrap()
        };
        if place.rank() == 0 {
            let calls: Vec<_> = words.iter().map(broadcast).collect();
            let error = calls[CALLS as usize - 1].wait(Duration::from_millis(50)).unwrap_err();
            assert_eq!(error.class(), ErrorClass::Transient, "{error}");
            part(&place);
        } else {
            part(&place);
            words.iter().for_each(|word| drop(broadcast(word)));
        }
        place.comm.queue_barrier(&place.queue).unwrap().wait(PATIENCE).unwrap();
        let found: Vec<u32> = words.iter().flat_map(read).collect();
        assert_eq!(found, (0..CALLS).collect::<Vec<_>>());
        part(&place);
    });
}

/// Code is loaded while sums wait for each other, beside residents that are told to hurry.
#[test]
fn sums_go_on_beside_residents_and_calls_that_wait_for_them() {
    ranks(2, &config(), |place| {
        let kernel = place.device.load(&counter()).unwrap().kernel("counter").unwrap();
        let count = place.numbers(&[0]);
        let args = [Arg::Buffer(&count)];
        let desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args).unwrap());
        let resident = place.device.residents().unwrap().launch(&desc).unwrap();
        let sum = place.numbers(&[1; 100]);
        for _ in 0..10 {
            place
                .comm
                .all_reduce_in_place(ReduceOp::Sum, DType::U32, &sum)
                .unwrap()
                .on(&place.queue)
                .unwrap();
            place.device.load(&counter()).unwrap();
        }
        place.comm.queue_barrier(&place.queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&sum), [1 << 10; 100]);
        resident.stop(Deadline::within(PATIENCE)).unwrap();
        assert!(read(&count)[0] > 0);
        part(&place);
    });
}
