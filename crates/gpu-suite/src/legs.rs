//! What is run, and how long it may take.

/// One way of using the GPUs, as a call of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leg {
    pub(crate) name: &'static str,
    /// The program around this one, if there is one, with its arguments.
    pub(crate) under: Vec<String>,
    pub(crate) args: Vec<String>,
    /// A hang must not hold a machine.
    pub(crate) limit_seconds: u32,
}

/// What the user asks of the legs.
#[derive(Debug, Default)]
pub(crate) struct Wish<'a> {
    pub(crate) required: &'a [String],
    /// A part of the names of conformance cases.
    pub(crate) filter: Option<&'a str>,
    pub(crate) memcheck: bool,
}

/// What the memory checker runs, and what it leaves out: cases whose kernels fail on purpose.
const MEMCHECK: &str = "conformance --only cuda --skip kernel::a_failure_stays_in_its_queue \
    --skip resident::a_failure_ends_it --skip resident::an_early_failure_is_the_answer";

/// Every leg, those first whose failure explains others.
pub(crate) fn all(wish: &Wish<'_>) -> Vec<Leg> {
    let mut conformance = vec!["conformance".to_owned(), "--only".into(), "cuda".into()];
    conformance.extend(wish.required.iter().flat_map(|required| ["--require".into(), required.clone()]));
    conformance.extend(wish.filter.map(String::from));
    let mut legs = vec![
        leg("doctor", 60, "doctor --backend cuda"),
        leg("cold calls", 60, "doctor --backend cuda --probe-resident"),
        Leg { args: conformance, ..leg("conformance", 400, "") },
        leg("demo", 120, "demo --backend host,cuda"),
        leg("topology", 180, "topo --backend cuda --measure"),
        leg("launches", 60, "perf launch --backend cuda -n 5000 --json"),
        leg("copies", 240, "perf copy --backend cuda -b 64K -e 1G --json"),
        leg("copies both ways", 240, "perf copy --backend cuda -b 1M -e 1G -f 32 --both --json"),
        leg("cuda checks", 180, "checks"),
        leg("fault", 60, "fault"),
        leg("discovery", 60, "bench discovery"),
        leg("submission", 180, "bench submission"),
        leg("residents", 180, "bench resident"),
        leg("round trip", 60, "bench round-trip"),
        leg("pairs", 60, "bench pairs"),
    ];
    if wish.memcheck {
        legs.push(Leg {
            under: words("compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"),
            ..leg("memcheck", 300, MEMCHECK)
        });
    }
    legs
}

fn leg(name: &'static str, limit_seconds: u32, call: &str) -> Leg {
    Leg { name, under: Vec::new(), args: words(call), limit_seconds }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_legs_apart() {
        let legs = all(&Wish { memcheck: true, ..Wish::default() });
        let names: std::collections::BTreeSet<_> = legs.iter().map(|leg| leg.name).collect();
        assert_eq!(names.len(), legs.len());
    }

    #[test]
    fn the_suite_is_told_what_is_required_and_wanted() {
        let required = ["cuda,2".to_owned()];
        let legs = all(&Wish { required: &required, filter: Some("copy::"), memcheck: false });
        let conformance = legs.iter().find(|leg| leg.name == "conformance").unwrap();
        assert_eq!(conformance.args, words("conformance --only cuda --require cuda,2 copy::"));
        let more = all(&Wish { memcheck: true, ..Wish::default() });
        assert_eq!(more.len(), legs.len() + 1);
    }
}
