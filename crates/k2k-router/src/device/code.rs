//! The code of executors: handlers in CUDA C, put together with the executor to one kernel.

use std::{fmt::Write as _, sync::Arc};

use warpweft_core_types::{CodeFormat, ForeignCode, KernelCode, KernelContract, Param};

use super::layout::DEVICES;
use crate::{EXECUTOR_HEADER, LANES_HEADER, WIRE_HEADER};

/// The executor's kernel.
pub(crate) const NAME: &str = "warpweft_actors";

/// Threads of an executor: a warp.
pub(crate) const THREADS: u32 = 32;

/// An executor with its handlers, compiled beforehand: for devices without a compiler, and for programs that do not want
/// to wait for one.
///
/// It is compiled from [`executor_source`], which puts handlers and executor together.
#[derive(Debug, PartialEq, Eq)]
pub struct ExecutorImage {
    pub(crate) code: ForeignCode,
    pub(crate) handlers: Vec<String>,
}

impl ExecutorImage {
    /// Code in a form that devices run, whose handlers have these names, in the order of their numbers.
    ///
    /// # Safety
    ///
    /// - It was made from [`executor_source`], of this version, with these handlers.
    /// - Each handler is as [`ActorCode::cuda`](crate::ActorCode::cuda) asks.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn new(code: ForeignCode, handlers: &[&str]) -> Arc<Self> {
        Arc::new(Self { code, handlers: handlers.iter().map(|name| (*name).to_owned()).collect() })
    }
}

/// A handler of a device's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceCode {
    pub(crate) text: Text,
    pub(crate) function: Arc<str>,
}

/// Where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Text {
    Source(Arc<str>),
    Image(Arc<ExecutorImage>),
}

/// The handlers of an executor, in the order of their numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Codes {
    image: Option<Arc<ExecutorImage>>,
    /// With the name of the actor that brought it.
    handlers: Vec<(String, DeviceCode)>,
}

/// Why a handler cannot be added.
pub(crate) const MIXED: &str = "its executor has handlers of another image, or of sources";
pub(crate) const MISSING: &str = "the image has no handler of this name";

impl Codes {
    /// The number of a handler, which is added if it is new; and whether the kernel has to be made again for it.
    pub(crate) fn add(&self, actor: &str, code: &DeviceCode) -> Result<(Self, u32, bool), &'static str> {
        let mut with = self.clone();
        let number = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        if let Text::Image(image) = &code.text {
            let is_first = self.image.is_none() && self.handlers.is_empty();
            if !is_first && self.image.as_ref().is_none_or(|own| !Arc::ptr_eq(own, image)) {
                return Err(MIXED);
            }
            let at = image.handlers.iter().position(|name| *name == *code.function).ok_or(MISSING)?;
            with.image = Some(Arc::clone(image));
            return Ok((with, number(at), is_first));
        }
        if self.image.is_some() {
            return Err(MIXED);
        }
        if let Some(at) = self.handlers.iter().position(|(_, known)| known == code) {
            return Ok((with, number(at), false));
        }
        with.handlers.push((actor.to_owned(), code.clone()));
        Ok((with, number(self.handlers.len()), true))
    }

    /// The kernel with all of them.
    #[expect(unsafe_code, reason = "vouches for the executor in CUDA C")]
    pub(crate) fn kernel(&self) -> KernelCode {
        let memory = || Param::read_write(256).aligned(256);
        let params: Vec<Param> =
            std::iter::repeat_with(memory).take(1 + DEVICES).chain([Param::scalar::<u32>(); 2]).collect();
        let contract = KernelContract::new(NAME, params).resident().with_workgroup_size([THREADS, 1, 1]);
        let form = self.image.as_ref().map_or_else(
            || ForeignCode::Source { format: CodeFormat::CudaC, text: self.source() },
            |image| image.code.clone(),
        );
        // SAFETY: the executor has these parameters, and blocks of a warp. It touches the memory of the devices and the
        // host's by the layout that `Memory::new` wrote there for buffers of that size, and `Link` alone launches it;
        // what others write into lanes is taken for values and checked where it becomes a place. Whoever brought the
        // handlers vouches for those (`ActorCode::cuda`, `ExecutorImage::new`).
        unsafe { KernelCode::new().with_foreign([contract], form) }
    }

    fn source(&self) -> String {
        let handlers = self.handlers.iter().filter_map(|(actor, code)| match &code.text {
            Text::Source(source) => Some((actor.as_str(), &**source, &*code.function)),
            Text::Image(_) => None,
        });
        executor_source(&handlers.collect::<Vec<_>>())
    }
}

/// CUDA C of an executor with these handlers: for each the name of its code, which the compiler's words will have, its
/// source, and the name of its function. Handlers of equal sources share what those declare.
///
/// The kernel is `warpweft_actors`. With a C++ compiler, and what [`EXECUTOR_HEADER`] defines as `WARPWEFT_LIBRARY` behind
/// it, the same text becomes a library of the CPU's.
pub fn executor_source(handlers: &[(&str, &str, &str)]) -> String {
    let mut text = String::from("#ifdef __CUDACC__\n#include <warpweft/resident.cuh>\n#endif\n");
    for part in [LANES_HEADER, EXECUTOR_HEADER] {
        for line in part.lines().filter(|line| !line.starts_with("#pragma once")) {
            match line {
                "#include \"warpweft_wire.h\"" => {
                    text.extend(
                        WIRE_HEADER
                            .lines()
                            .skip_while(|line| !line.starts_with("#define"))
                            .flat_map(|l| [l, "\n"]),
                    );
                }
                "#include \"warpweft_lanes.cuh\"" => {}
                other => text.extend([other, "\n"]),
            }
        }
    }
    let mut sources: Vec<&str> = Vec::new();
    let mut cases = String::new();
    for (number, (name, source, function)) in handlers.iter().enumerate() {
        let at = sources.iter().position(|known| known == source).unwrap_or_else(|| {
            let at = sources.len();
            sources.push(source);
            let name: String = name.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).collect();
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "namespace warpweft_code_{at} {{\n#line 1 \"{name}\"\n{source}\n}}");
            at
        });
        let _ = writeln!(
            cases,
            "    case {number}: return warpweft_call(warpweft_code_{at}::{function}, cx, state, m);"
        );
    }
    let _ = writeln!(
        text,
        "#line 1 \"handlers\"\n__device__ void warpweft_dispatch(uint32_t code, warpweft_context &cx, void *state, const \
         warpweft_message &m) {{\n    switch (code) {{\n{cases}    }}\n}}"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str, function: &str) -> DeviceCode {
        DeviceCode { text: Text::Source(text.into()), function: function.into() }
    }

    #[test]
    fn equal_handlers_have_one_number_and_new_ones_the_next() {
        let mut codes = Codes::default();
        for (code, number, is_new) in [
            (source("a", "f"), 0, true),
            (source("b", "f"), 1, true),
            (source("a", "f"), 0, false),
            (source("a", "g"), 2, true),
        ] {
            let (with, at, made) = codes.add("actor", &code).unwrap();
            assert_eq!((at, made), (number, is_new));
            codes = with;
        }
        let text = codes.source();
        assert_eq!(text.matches("namespace warpweft_code_").count(), 2);
        assert!(text.contains("case 2: return warpweft_call(warpweft_code_0::g, cx, state, m);"));
    }

    #[test]
    fn an_image_has_its_handlers_and_no_others() {
        let code = ForeignCode::Source { format: CodeFormat::Ptx, text: String::new() };
        let image =
            |name: &str| Arc::new(ExecutorImage { code: code.clone(), handlers: vec![name.to_owned()] });
        let (one, other) = (image("f"), image("g"));
        let of = |image: &Arc<ExecutorImage>, function: &str| DeviceCode {
            text: Text::Image(Arc::clone(image)),
            function: function.into(),
        };
        let (codes, number, is_new) = Codes::default().add("a", &of(&one, "f")).unwrap();
        assert_eq!((number, is_new), (0, true));
        assert!(matches!(codes.add("a", &of(&one, "f")), Ok((_, 0, false))));
        assert_eq!(codes.add("a", &of(&one, "h")).err(), Some(MISSING));
        assert_eq!(codes.add("a", &of(&other, "g")).err(), Some(MIXED));
        assert_eq!(codes.add("a", &source("a", "f")).err(), Some(MIXED));
    }

    #[test]
    fn the_text_includes_nothing_that_only_this_crate_has() {
        let text = executor_source(&[("counter", "__device__ void f() {}", "f")]);
        assert!(!text.contains("#include \"") && !text.contains("#pragma once"));
        assert!(text.contains("#line 1 \"counter\"") && text.contains("WARPWEFT_HEADER_WORDS 9u"));
    }
}
