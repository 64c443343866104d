//! Parameters of calls: all pairs of their values in few cases, and a seeded part of all combinations.

use warpweft_core_types::{CollectiveOp, DType, ReduceOp};

/// More ranks are not asked for.
pub(super) const MOST_RANKS: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce,
    ReduceScatter,
    Reduce,
    AllGather,
    Broadcast,
    Gather,
    Scatter,
    AllToAll,
    SendRecv,
}

const KINDS: [Kind; 9] = [
    Kind::AllReduce,
    Kind::ReduceScatter,
    Kind::Reduce,
    Kind::AllGather,
    Kind::Broadcast,
    Kind::Gather,
    Kind::Scatter,
    Kind::AllToAll,
    Kind::SendRecv,
];

/// Elements of one part: one, some, more than a workgroup or a slot, and more than most engines do in one step.
const LENGTHS: [u64; 4] = [1, 7, 1025, 70_001];

/// One case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Params {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    /// Used by those that reduce.
    pub(super) reduction: ReduceOp,
    pub(super) in_place: bool,
    pub(super) len: u64,
    /// Elements before the operands.
    pub(super) offset: u64,
    pub(super) ranks: u32,
    /// Waited for on the spot, or in a queue.
    pub(super) waits: bool,
}

/// A position among the values of each parameter.
type Code = [usize; PARAMETERS];
const PARAMETERS: usize = 8;

impl Params {
    fn of(code: Code) -> Self {
        Self {
            kind: KINDS[code[0]],
            dtype: DType::ALL[code[1]],
            reduction: ReduceOp::ALL[code[2]],
            in_place: code[3] == 1,
            len: LENGTHS[code[4]],
            offset: code[5] as u64,
            ranks: u32::try_from(code[6] + 1).unwrap_or(1),
            waits: code[7] == 1,
        }
    }

    pub(super) const fn reduces(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce)
    }

    /// Whether there is such a call.
    fn makes_sense(&self) -> bool {
        let is_in_place = !self.in_place || !matches!(self.kind, Kind::AllToAll | Kind::SendRecv);
        // What does not reduce is tried once.
        let reduction = if self.reduces() { self.reduction.is_defined_for(self.dtype) } else { true };
        is_in_place && reduction
    }

    /// The root, where there is one: the last rank, which is not the one that others take for it.
    pub(super) const fn root(&self) -> u32 {
        self.ranks - 1
    }

    pub(super) fn op(&self, rank: u32) -> CollectiveOp {
        let root = self.root();
        let op = match self.reduction {
            // Each rank has a factor of its own.
            ReduceOp::PremulSum(_) => ReduceOp::PremulSum(factor(rank).into()),
            op => op,
        };
        match self.kind {
            Kind::AllReduce => CollectiveOp::AllReduce(op),
            Kind::ReduceScatter => CollectiveOp::ReduceScatter(op),
            Kind::Reduce => CollectiveOp::Reduce { op, root },
            Kind::AllGather => CollectiveOp::AllGather,
            Kind::Broadcast => CollectiveOp::Broadcast { root },
            Kind::Gather => CollectiveOp::Gather { root },
            Kind::Scatter => CollectiveOp::Scatter { root },
            Kind::AllToAll => CollectiveOp::AllToAll,
            Kind::SendRecv => CollectiveOp::Recv { from: self.neighbours(rank).1 },
        }
    }

    /// To whom a rank sends, and from whom it receives.
    pub(super) const fn neighbours(&self, rank: u32) -> (u32, u32) {
        ((rank + 1) % self.ranks, (rank + self.ranks - 1) % self.ranks)
    }

    /// Parts of source and destination, if the rank has them.
    pub(super) fn parts(&self, rank: u32) -> (Option<u64>, Option<u64>) {
        let (all, is_root) = (u64::from(self.ranks), rank == self.root());
        match self.kind {
            Kind::AllReduce | Kind::SendRecv => (Some(1), Some(1)),
            Kind::ReduceScatter => (Some(all), Some(1)),
            Kind::Reduce => (Some(1), is_root.then_some(1)),
            Kind::AllGather => (Some(1), Some(all)),
            Kind::Broadcast => (is_root.then_some(1), Some(1)),
            Kind::Gather => (Some(1), is_root.then_some(all)),
            Kind::Scatter => (is_root.then_some(all), Some(1)),
            Kind::AllToAll => (Some(all), Some(all)),
        }
    }
}

/// A rank's own factor, a whole number.
pub(super) const fn factor(rank: u32) -> u32 {
    1 + rank % 2
}

/// How many values each parameter has.
fn sizes(most_ranks: u32) -> Code {
    let ranks = most_ranks.clamp(1, MOST_RANKS) as usize;
    [KINDS.len(), DType::ALL.len(), ReduceOp::ALL.len(), 2, LENGTHS.len(), 2, ranks, 2]
}

/// Numbers that are the same in every run (Lehmer's generator).
struct Noise(u64);

impl Noise {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        usize::try_from(self.0 >> 33).unwrap_or(0) % bound
    }

    fn code(&mut self, sizes: Code) -> Code {
        sizes.map(|size| self.below(size))
    }
}

/// Cases in which every pair of values of two parameters occurs that makes sense.
pub(super) fn all_pairs(most_ranks: u32) -> Vec<Params> {
    /// Ways that are tried to fill up a case; the one with the most new pairs is taken.
    const TRIES: usize = 24;
    let (sizes, mut noise) = (sizes(most_ranks), Noise(7));
    let mut open = Vec::new();
    for first in 0..PARAMETERS {
        for second in first + 1..PARAMETERS {
            for one in 0..sizes[first] {
                open.extend((0..sizes[second]).map(|other| [(first, one), (second, other)]));
            }
        }
    }
    let mut cases = Vec::new();
    while let Some(pair) = open.pop() {
        let mut best: Option<(usize, Code)> = None;
        for _ in 0..TRIES {
            let mut code = noise.code(sizes);
            pair.iter().for_each(|(parameter, value)| code[*parameter] = *value);
            if Params::of(code).makes_sense() {
                let gain = open.iter().filter(|pair| has(code, pair)).count();
                if best.is_none_or(|(most, _)| gain > most) {
                    best = Some((gain, code));
                }
            }
        }
        // A pair that makes no sense with anything, such as bits of floating-point numbers, is left out.
        if let Some((_, code)) = best {
            open.retain(|pair| !has(code, pair));
            cases.push(Params::of(code));
        }
    }
    cases
}

fn has(code: Code, pair: &[(usize, usize); 2]) -> bool {
    pair.iter().all(|(parameter, value)| code[*parameter] == *value)
}

/// So many of all combinations, the same in every run.
pub(super) fn sample(most_ranks: u32, count: usize) -> Vec<Params> {
    let (sizes, mut noise) = (sizes(most_ranks), Noise(11));
    std::iter::repeat_with(|| Params::of(noise.code(sizes))).filter(Params::makes_sense).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_meets_every_reduction_that_it_has() {
        let cases = all_pairs(8);
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
                let meets = |case: &Params| case.dtype == dtype && case.reduction == op && case.reduces();
                // Where nothing reduces, any reduction goes; one case at least is to reduce.
                let named = cases.iter().any(|case| case.dtype == dtype && case.reduction == op);
                assert!(named || cases.iter().any(meets), "{op} of {dtype}");
            }
        }
        assert!(cases.len() < 400, "{} cases", cases.len());
    }

    #[test]
    fn every_kind_meets_every_number_of_ranks_and_type() {
        let cases = all_pairs(8);
        for kind in KINDS {
            assert!((1..=8).all(|ranks| cases.iter().any(|case| case.kind == kind && case.ranks == ranks)));
            assert!(DType::ALL.iter().all(|dtype| cases.iter().any(|c| c.kind == kind && c.dtype == *dtype)));
        }
    }
}
