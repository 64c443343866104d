//! What is run, and how long it may take.

/// One way of using the GPUs, as a call of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leg {
    pub(crate) name: &'static str,
    /// The program around this one, if there is one, with its arguments.
    pub(crate) under: Vec<String>,
    pub(crate) args: Vec<String>,
    /// Variables of its environment.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
    /// A hang must not hold a machine.
    pub(crate) limit_seconds: u32,
    /// Devices that it needs, and of which backend.
    pub(crate) backend: &'static str,
    pub(crate) devices: usize,
    /// Somebody asked for this one: that it cannot run here is a failure.
    pub(crate) is_asked_for: bool,
}

/// What the user asks of the legs.
#[derive(Debug, Default)]
pub(crate) struct Wish<'a> {
    pub(crate) required: &'a [String],
    /// A part of the names of conformance cases.
    pub(crate) filter: Option<&'a str>,
    /// Parts of the names of legs; all of them if there is none.
    pub(crate) names: &'a [String],
    pub(crate) memcheck: bool,
}

/// What the memory checker runs, and what it leaves out: cases whose kernels fail on purpose, and those of ranks, whose
/// kernels wait for each other where it runs one after the other.
const MEMCHECK: &str = "conformance --only cuda --skip kernel::a_failure_stays_in_its_queue \
    --skip resident::a_failure_ends_it --skip resident::an_early_failure_is_the_answer --skip comm::";

/// The legs that are wanted, those first whose failure explains others.
pub(crate) fn wanted(wish: &Wish<'_>) -> Vec<Leg> {
    let mut legs = all(wish);
    if !wish.names.is_empty() {
        let named = |leg: &Leg, part: &String| leg.name.contains(part.as_str());
        legs.retain(|leg| wish.names.iter().any(|part| named(leg, part)));
        // A part that names legs of CUDA too asks for those alone: Vulkan's come along where they can run.
        let cuda: Vec<Leg> = legs.iter().filter(|leg| leg.backend == "cuda").cloned().collect();
        let is_of_vulkan = |part: &&String| !cuda.iter().any(|leg| named(leg, part));
        let of_vulkan: Vec<&String> = wish.names.iter().filter(is_of_vulkan).collect();
        for leg in &mut legs {
            leg.is_asked_for = leg.backend == "cuda" || of_vulkan.iter().any(|part| named(leg, part));
        }
    }
    legs
}

fn all(wish: &Wish<'_>) -> Vec<Leg> {
    let mut legs = vec![
        leg("doctor", 60, "doctor --backend cuda"),
        leg("mixed doctor", 60, "doctor --backend host,cuda"),
        leg("cold calls", 60, "doctor --backend cuda --probe-resident"),
        Leg { args: conformance(wish, "cuda"), ..leg("conformance", 400, "") },
        leg("demo", 120, "demo --backend host,cuda"),
        leg("topology", 180, "topo --backend cuda --measure"),
        leg("mixed topology", 180, "topo --backend host,cuda --devices 2 --measure --size 16M"),
        leg("launches", 60, "perf launch --backend cuda -n 5000 --json"),
        leg("copies", 240, "perf copy --backend cuda -b 64K -e 256M --json"),
        leg("queued copies", 120, "perf copy --backend cuda -b 16M -e 16M --queued 8 --bar 0.97 --json"),
        leg("large copies", 240, "perf copy --backend cuda -b 1G -e 1G --bar 0.97 --json"),
        leg(
            "queued copies both ways",
            120,
            "perf copy --backend cuda -b 16M -e 16M --queued 8 --both --bar 0.97 --json",
        ),
        leg("large copies both ways", 240, "perf copy --backend cuda -b 1G -e 1G --both --bar 0.97 --json"),
        leg("mixed copies", 180, "perf copy --backend host,cuda --devices 2 -b 1M -e 16M -f 16 --json"),
        leg("cuda checks", 180, "checks"),
        leg("fault", 180, "fault"),
        leg("nccl", 400, "nccl"),
        leg("nccl calls", 120, "bench nccl"),
        leg("collectives", 120, "collectives"),
        leg("collectives beside nccl", 120, "bench collectives"),
        Leg { devices: 2, ..leg("kill", 240, "kill --rounds 50") },
        leg("low latency", 170, "low-latency"),
        leg("low latency beside nccl", 170, "bench low-latency"),
        leg("actors", 170, "k2k"),
        leg("messages", 170, "bench k2k"),
        leg("discovery", 60, "bench discovery"),
        leg("submission", 180, "bench submission"),
        leg("graphs", 120, "graphs"),
        leg("graphs beside raw ones", 170, "bench graph"),
        leg("residents", 180, "bench resident"),
        leg("round trip", 60, "bench round-trip"),
        Leg { devices: 2, ..leg("pairs", 120, "bench pairs") },
    ];
    legs.extend(vulkan(wish));
    if !wish.names.is_empty() {
        legs.extend(random_graphs(wish));
    }
    if wish.memcheck {
        legs.push(Leg {
            under: words("compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"),
            is_asked_for: true,
            ..leg("memcheck", 300, MEMCHECK)
        });
    }
    legs
}

/// The legs of Vulkan devices.
fn vulkan(wish: &Wish<'_>) -> [Leg; 5] {
    let legs = [
        leg("vulkan doctor", 60, "doctor --backend vulkan"),
        Leg { args: conformance(wish, "vulkan"), ..leg("vulkan conformance", 400, "") },
        leg("vulkan demo", 120, "demo --backend host,vulkan --devices 2 --copies 2"),
        leg("vulkan copies", 240, "perf copy --backend vulkan --copies 2 -b 1M -e 64M -f 8 --json"),
        leg("vulkan bench", 180, "bench vulkan"),
    ];
    legs.map(|leg| Leg { backend: "vulkan", ..leg })
}

/// Far more random graphs than the suite runs by itself, which takes minutes, so only where somebody asks for it.
fn random_graphs(wish: &Wish<'_>) -> [Leg; 2] {
    let of = |backend: &str| {
        let filter = Some("graph_runtime::");
        conformance(&Wish { required: wish.required, filter, ..Wish::default() }, backend)
    };
    let many = |name| Leg { variables: vec![("WARPWEFT_RANDOM_GRAPHS", "10000")], ..leg(name, 580, "") };
    [
        Leg { args: of("cuda"), ..many("random graphs") },
        Leg { args: of("vulkan"), backend: "vulkan", ..many("random graphs on Vulkan") },
    ]
}

/// The suite on one backend, which has to find as many of its devices as are required, and one at least.
fn conformance(wish: &Wish<'_>, backend: &str) -> Vec<String> {
    let mut required: Vec<_> =
        wish.required.iter().filter(|required| is_of(required, backend)).cloned().collect();
    if required.is_empty() {
        required.push(format!("{backend},1"));
    }
    let mut args = words("conformance --only");
    args.push(backend.to_owned());
    args.extend(required.into_iter().flat_map(|required| ["--require".to_owned(), required]));
    args.extend(wish.filter.map(String::from));
    args
}

/// Whether what is required, such as `cuda,2`, is of this backend.
fn is_of(required: &str, backend: &str) -> bool {
    required.split(',').next() == Some(backend)
}

fn leg(name: &'static str, limit_seconds: u32, call: &str) -> Leg {
    let (under, args, variables) = (Vec::new(), words(call), Vec::new());
    Leg { name, under, args, variables, limit_seconds, backend: "cuda", devices: 1, is_asked_for: false }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_legs_apart() {
        let legs = wanted(&Wish { memcheck: true, ..Wish::default() });
        let names: std::collections::BTreeSet<_> = legs.iter().map(|leg| leg.name).collect();
        assert_eq!(names.len(), legs.len());
    }

    #[test]
    fn the_suite_is_told_what_is_required_and_wanted() {
        let required = ["cuda,2".to_owned()];
        let legs = wanted(&Wish { required: &required, filter: Some("copy::"), ..Wish::default() });
        let conformance = legs.iter().find(|leg| leg.name == "conformance").unwrap();
        assert_eq!(conformance.args, words("conformance --only cuda --require cuda,2 copy::"));
        let on_vulkan = legs.iter().find(|leg| leg.name == "vulkan conformance").unwrap();
        assert_eq!(on_vulkan.args, words("conformance --only vulkan --require vulkan,1 copy::"));
        let more = wanted(&Wish { memcheck: true, ..Wish::default() });
        assert_eq!(more.len(), legs.len() + 1);
    }

    #[test]
    fn legs_are_asked_for_by_name_or_by_an_option() {
        let asked = |legs: Vec<Leg>| -> Vec<&str> {
            legs.iter().filter(|leg| leg.is_asked_for).map(|leg| leg.name).collect()
        };
        assert!(asked(wanted(&Wish::default())).is_empty());
        assert_eq!(asked(wanted(&Wish { memcheck: true, ..Wish::default() })), ["memcheck"]);
        let names = ["pairs".to_owned(), "mixed".to_owned()];
        let named = wanted(&Wish { names: &names, memcheck: true, ..Wish::default() });
        assert_eq!(named.len(), 4, "and no others");
        assert_eq!(asked(named), ["mixed doctor", "mixed topology", "mixed copies", "pairs"]);
        let unknown = ["abacus".to_owned()];
        assert!(wanted(&Wish { names: &unknown, ..Wish::default() }).is_empty());
    }

    #[test]
    fn graphs_come_with_many_random_ones() {
        let names = ["graph".to_owned()];
        let legs = wanted(&Wish { names: &names, ..Wish::default() });
        let names: Vec<&str> = legs.iter().map(|leg| leg.name).collect();
        assert_eq!(names, ["graphs", "graphs beside raw ones", "random graphs", "random graphs on Vulkan"]);
        assert_eq!(legs[2].args, words("conformance --only cuda --require cuda,1 graph_runtime::"));
        assert_eq!(legs[3].variables, [("WARPWEFT_RANDOM_GRAPHS", "10000")]);
    }

    #[test]
    fn legs_of_vulkan_are_asked_for_by_a_name_that_no_leg_of_cuda_has() {
        let asked = |name: &str| -> Vec<(&str, bool)> {
            let legs = wanted(&Wish { names: &[name.to_owned()], ..Wish::default() });
            let legs = legs.iter().filter(|leg| leg.backend == "vulkan");
            legs.map(|leg| (leg.name, leg.is_asked_for)).collect()
        };
        assert_eq!(asked("graph"), [("random graphs on Vulkan", false)]);
        assert_eq!(asked("demo"), [("vulkan demo", false)]);
        assert_eq!(asked("on Vulkan"), [("random graphs on Vulkan", true)]);
        assert_eq!(asked("vulkan").len(), 5);
        assert!(asked("vulkan").iter().all(|(_, is_asked_for)| *is_asked_for));
    }

    #[test]
    fn the_commands_of_legs_are_understood() {
        use clap::Parser as _;
        let all = ["".to_owned()];
        for leg in wanted(&Wish { memcheck: true, names: &all, ..Wish::default() }) {
            let call = ["gpu-suite".to_owned()].into_iter().chain(leg.args.iter().cloned());
            assert!(crate::Args::try_parse_from(call).is_ok(), "{:?}", leg.args);
        }
    }
}
