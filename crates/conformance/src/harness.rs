//! Cases, providers, and the verdict on each pair of them.

use std::{process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use warpweft_core_types::{Backend, Features, OpenError};

use crate::{cases, context::Context, providers};

/// What a case returns; any error or panic fails it.
pub(crate) type Verdict = Result<(), Failed>;

/// What must hold besides features; the error says why these devices do not qualify.
pub(crate) type Condition = fn(&Context) -> Result<(), &'static str>;

/// One thing the seam promises.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Methods of the seam it exercises, as `Trait::method`.
    pub(crate) covers: &'static [&'static str],
    pub(crate) needs: Features,
    pub(crate) devices: u32,
    condition: Option<Condition>,
    pub(crate) body: fn(&Context) -> Verdict,
}

impl Case {
    pub(crate) const fn new(name: &'static str, body: fn(&Context) -> Verdict) -> Self {
        Self { name, covers: &[], needs: Features::empty(), devices: 1, condition: None, body }
    }

    pub(crate) const fn covers(mut self, covers: &'static [&'static str]) -> Self {
        self.covers = covers;
        self
    }

    /// Features that every device of the run must have.
    pub(crate) const fn needs(mut self, needs: Features) -> Self {
        self.needs = needs;
        self
    }

    pub(crate) const fn when(mut self, condition: Condition) -> Self {
        self.condition = Some(condition);
        self
    }

    /// How many devices it works on.
    pub(crate) const fn devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }
}

/// Devices of one kind to run the suite on.
#[derive(Clone)]
pub(crate) struct Provider {
    /// The name in brackets, such as `host` or `host, chain`.
    pub(crate) label: &'static str,
    /// The backend that `--require` knows it by.
    pub(crate) backend: &'static str,
    /// Makes the backend anew for every run, where that is possible.
    pub(crate) open: fn() -> Result<Arc<dyn Backend>, OpenError>,
    /// Cases it will never pass, with the reason.
    pub(crate) unsupported: &'static [(&'static str, &'static str)],
    /// Cases it fails at present, with the reason. A pass is a failure of this list.
    pub(crate) expected_failures: &'static [(&'static str, &'static str)],
}

/// `--require BACKEND,N`: what must be there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    backend: String,
    devices: u32,
}

/// Runs the suite with the arguments of the process: those of any Rust test binary, and `--require`.
///
/// # Errors
///
/// What is wrong with the arguments.
pub fn main() -> Result<ExitCode, String> {
    let (required, rest) = split_requirements(std::env::args().collect())?;
    let arguments = Arguments::from_iter(rest);
    let providers = providers::all();
    let mut trials: Vec<Trial> =
        required.iter().map(|required| requirement_trial(required, &providers)).collect();
    for provider in &providers {
        trials.extend(cases::all().into_iter().map(|case| trial(provider, case)));
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

/// Methods among `declared` (as `Trait::method`) that no case says it covers.
pub fn uncovered_methods(declared: &[String]) -> Vec<String> {
    let cases = cases::all();
    let covered = |method: &String| cases.iter().any(|case| case.covers.contains(&method.as_str()));
    declared.iter().filter(|method| !covered(method)).cloned().collect()
}

/// Takes `--require X,N` (also `--require=X,N`, also several) out of the arguments.
fn split_requirements(arguments: Vec<String>) -> Result<(Vec<Requirement>, Vec<String>), String> {
    let (mut required, mut rest) = (Vec::new(), Vec::new());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--require" {
            let value = arguments.next().ok_or("--require needs a value like host,4")?;
            required.push(parse_requirement(&value)?);
        } else if let Some(value) = argument.strip_prefix("--require=") {
            required.push(parse_requirement(value)?);
        } else {
            rest.push(argument);
        }
    }
    Ok((required, rest))
}

fn parse_requirement(text: &str) -> Result<Requirement, String> {
    let wrong =
        || format!("--require takes BACKEND or BACKEND,N with N of at least 1, like host,4, not {text:?}");
    let (backend, devices) = text.split_once(',').unwrap_or((text, "1"));
    let devices = devices.trim().parse().ok().filter(|&devices| devices > 0).ok_or_else(wrong)?;
    let backend = backend.trim().to_owned();
    if backend.is_empty() { Err(wrong()) } else { Ok(Requirement { backend, devices }) }
}

/// A run that fails unless the required devices are there.
fn requirement_trial(required: &Requirement, providers: &[Provider]) -> Trial {
    let name = format!("[require] {},{}", required.backend, required.devices);
    let (required, providers) = (required.clone(), providers.to_vec());
    Trial::test(name, move || check_requirement(&required, &providers))
}

fn check_requirement(required: &Requirement, providers: &[Provider]) -> Verdict {
    let provider = providers
        .iter()
        .find(|provider| provider.backend == required.backend)
        .ok_or_else(|| format!("this suite knows no backend {:?}", required.backend))?;
    let backend = (provider.open)()?;
    let found = backend.devices()?.len();
    if found < required.devices as usize {
        return Err(format!("{} devices are required, {found} are there", required.devices).into());
    }
    // All at once, as the cases will have them.
    let open = |ordinal| backend.open(ordinal, Features::empty());
    (0..required.devices).map(open).collect::<Result<Vec<_>, _>>()?;
    Ok(())
}

fn trial(provider: &Provider, case: Case) -> Trial {
    let devices: Vec<String> = (0..case.devices).map(|device| device.to_string()).collect();
    let name = format!("[{}/{}] {}", provider.label, devices.join("+"), case.name);
    let provider = provider.clone();
    Trial::ignorable_test(name, move || judge(&provider, &case))
}

fn judge(provider: &Provider, case: &Case) -> Result<Completion, Failed> {
    if let Some((_, reason)) = provider.unsupported.iter().find(|(name, _)| *name == case.name) {
        return Ok(Completion::ignored_with(format!("unsupported: {reason}")));
    }
    let context = match Context::open((provider.open)()?, case)? {
        Ok(context) => context,
        Err(missing) => return Ok(Completion::ignored_with(format!("skipped: {missing}"))),
    };
    if let Some(Err(reason)) = case.condition.map(|condition| condition(&context)) {
        return Ok(Completion::ignored_with(format!("skipped: {reason}")));
    }
    let expected = provider.expected_failures.iter().find(|(name, _)| *name == case.name);
    match (run(case, &context), expected) {
        (Ok(()), None) => Ok(Completion::Completed),
        (Err(failed), None) => Err(failed),
        (Err(_), Some((_, reason))) => Ok(Completion::ignored_with(format!("expected failure: {reason}"))),
        (Ok(()), Some(_)) => Err("it passes, but is listed as an expected failure".into()),
    }
}

/// Panics count as failures here, so that an expected failure may panic too.
fn run(case: &Case, context: &Context) -> Verdict {
    let body = std::panic::AssertUnwindSafe(|| (case.body)(context));
    std::panic::catch_unwind(body).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        Err(text.unwrap_or("it panicked").into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn requirements_are_taken_out_of_the_arguments() {
        let arguments = strings(&["suite", "--require", "host,4", "--nocapture", "--require=cuda"]);
        let (required, rest) = split_requirements(arguments).unwrap();
        let expected = [("host", 4), ("cuda", 1)]
            .map(|(backend, devices)| Requirement { backend: backend.to_owned(), devices });
        assert_eq!(required, expected);
        assert_eq!(rest, strings(&["suite", "--nocapture"]));
    }

    #[test]
    fn malformed_requirements_are_refused() {
        for value in ["", ",2", "host,0", "host,many", "host,-1"] {
            assert!(parse_requirement(value).is_err(), "{value:?}");
        }
        assert!(split_requirements(strings(&["suite", "--require"])).is_err());
    }

    #[test]
    fn a_missing_requirement_fails() {
        let ask = |backend: &str, devices| {
            let required = Requirement { backend: backend.to_owned(), devices };
            check_requirement(&required, &providers::all()).is_err()
        };
        assert!(!ask("host", 2));
        assert!(ask("host", 1000));
        assert!(ask("abacus", 1));
    }

    #[test]
    fn case_names_are_unique() {
        let mut names: Vec<_> = cases::all().iter().map(|case| case.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    fn verdict(lists: impl FnOnce(&mut Provider), body: fn(&Context) -> Verdict) -> Result<String, String> {
        let mut provider = providers::all().remove(0);
        lists(&mut provider);
        let case = Case::new("meta::case", body);
        match judge(&provider, &case) {
            Ok(Completion::Completed) => Ok("pass".to_owned()),
            Ok(Completion::Ignored { reason }) => Ok(reason.unwrap_or_default()),
            Err(failed) => Err(failed.message().unwrap_or_default().to_owned()),
        }
    }

    #[test]
    fn every_verdict_is_reached() {
        let listed: &[(&str, &str)] = &[("meta::case", "why")];
        assert_eq!(verdict(|_| (), |_| Ok(())), Ok("pass".to_owned()));
        assert_eq!(verdict(|_| (), |_| Err("no".into())), Err("no".to_owned()));
        assert_eq!(verdict(|_| (), |_| panic!("loud")), Err("loud".to_owned()));
        assert_eq!(verdict(|p| p.unsupported = listed, |_| Ok(())), Ok("unsupported: why".to_owned()));
        let xfail = |p: &mut Provider| p.expected_failures = listed;
        assert_eq!(verdict(xfail, |_| panic!("loud")), Ok("expected failure: why".to_owned()));
        assert!(verdict(xfail, |_| Ok(())).is_err());
    }
}
