//! Chains of SPIR-V access chains as single ones.
//!
//! naga writes an access chain for each step of a path, one on top of the other. The validation layer of 1.3.239
//! follows one step, so that synchronization validation does not see which buffers such a shader writes. A chain from
//! the variable itself means the same, and the layer sees it.

use std::collections::HashMap;

/// `OpAccessChain` and `OpInBoundsAccessChain`.
const CHAINS: [u32; 2] = [65, 66];

/// Words before the first instruction.
const HEADER: usize = 5;

/// The same module with every access chain starting at something that is no access chain. What is no sequence of
/// instructions comes back as it is.
pub(crate) fn flatten(words: Vec<u32>) -> Vec<u32> {
    flattened(&words).unwrap_or(words)
}

/// A chain's first base and all its indices.
type Path = (u32, Vec<u32>);

fn flattened(words: &[u32]) -> Option<Vec<u32>> {
    let mut paths: HashMap<u32, Path> = HashMap::new();
    let mut out = words.get(..HEADER)?.to_vec();
    let mut rest = &words[HEADER..];
    while let Some(&first) = rest.first() {
        let (instruction, after) = rest.split_at_checked((first >> 16).max(1) as usize)?;
        rest = after;
        let (opcode, [_, kind, id, base, indices @ ..]) = (first & 0xffff, instruction) else {
            out.extend(instruction);
            continue;
        };
        if !CHAINS.contains(&opcode) {
            out.extend(instruction);
            continue;
        }
        let mut path = paths.get(base).cloned().unwrap_or((*base, Vec::new()));
        path.1.extend(indices);
        let length = u32::try_from(4 + path.1.len()).ok().filter(|length| *length <= 0xffff)?;
        out.extend([length << 16 | opcode, *kind, *id, path.0]);
        out.extend(&path.1);
        paths.insert(*id, path);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(instructions: &[&[u32]]) -> Vec<u32> {
        let mut words = vec![0x0723_0203, 0x0001_0300, 0, 100, 0];
        for instruction in instructions {
            let length = u32::try_from(instruction.len()).unwrap();
            words.push(length << 16 | instruction[0]);
            words.extend(&instruction[1..]);
        }
        words
    }

    #[track_caller]
    fn check(before: &[&[u32]], after: &[&[u32]]) {
        assert_eq!(flatten(module(before)), module(after));
    }

    #[test]
    fn a_chain_upon_a_chain_starts_at_the_variable() {
        check(
            &[&[65, 1, 10, 5, 7], &[65, 2, 11, 10, 8, 9], &[66, 3, 12, 11, 6], &[61, 4, 13, 12]],
            &[&[65, 1, 10, 5, 7], &[65, 2, 11, 5, 7, 8, 9], &[66, 3, 12, 5, 7, 8, 9, 6], &[61, 4, 13, 12]],
        );
    }

    #[test]
    fn other_instructions_stay() {
        check(&[&[62, 10, 11], &[65, 1, 12, 11, 3]], &[&[62, 10, 11], &[65, 1, 12, 11, 3]]);
    }

    #[test]
    fn what_is_no_module_comes_back() {
        for words in [vec![], vec![1, 2, 3], vec![0, 0, 0, 0, 0, 9 << 16 | 65, 1]] {
            assert_eq!(flatten(words.clone()), words);
        }
        assert_eq!(flatten(vec![0, 0, 0, 0, 0, 0, 0]), [0; 7], "an empty instruction ends nothing");
    }
}
