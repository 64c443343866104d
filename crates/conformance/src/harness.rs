//! Cases, providers, and the verdict on each pair of them.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use warpweft_core_types::{Backend, Features, OpenError};

use crate::{apart, cases, context::Context, providers};

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
    /// Its kernels fail, which loses some devices to the process.
    may_lose_device: bool,
    condition: Option<Condition>,
    pub(crate) body: fn(&Context) -> Verdict,
}

impl Case {
    pub(crate) const fn new(name: &'static str, body: fn(&Context) -> Verdict) -> Self {
        Self {
            name,
            covers: &[],
            needs: Features::empty(),
            devices: 1,
            may_lose_device: false,
            condition: None,
            body,
        }
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

    /// Its kernels fail. Where that loses the device, the case runs in a process of its own.
    pub(crate) const fn may_lose_device(mut self) -> Self {
        self.may_lose_device = true;
        self
    }

    /// How many devices it works on.
    pub(crate) const fn devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }
}

/// Makes a backend.
pub(crate) type Opener = fn() -> Result<Arc<dyn Backend>, OpenError>;

/// Devices of one kind, or of several kinds together, to run the suite on.
#[derive(Clone)]
pub(crate) struct Provider {
    /// The name in brackets, such as `host` or `host, chain`.
    pub(crate) label: &'static str,
    /// The backend that `--require` and `--only` know it by.
    pub(crate) backend: &'static str,
    /// Make the backends, anew for every run where that is possible. With several, only the cases about
    /// several devices are run: each kind meets the others alone.
    pub(crate) open: Vec<Opener>,
    /// Whether its devices are there at all; an error says what is missing.
    pub(crate) is_there: fn() -> Result<(), String>,
    /// Held by a case while it runs, where the backend is the same for all of them.
    pub(crate) turn: Option<&'static Mutex<()>>,
    /// A fault loses the device for as long as the process runs.
    pub(crate) loses_devices: bool,
    /// What its driver stack said about the devices that this thread opened since it was last asked; anything fails
    /// the case.
    pub(crate) complaints: fn() -> Vec<String>,
    /// Cases it will never pass, with the reason.
    pub(crate) unsupported: &'static [(&'static str, &'static str)],
    /// Cases it fails at present, with the reason. A pass is a failure of this list.
    pub(crate) expected_failures: &'static [(&'static str, &'static str)],
}

impl Provider {
    pub(crate) fn new(label: &'static str, backend: &'static str, open: Vec<Opener>) -> Self {
        Self {
            label,
            backend,
            open,
            is_there: || Ok(()),
            turn: None,
            loses_devices: false,
            complaints: Vec::new,
            unsupported: &[],
            expected_failures: &[],
        }
    }

    fn opened(&self) -> Result<Vec<Arc<dyn Backend>>, OpenError> {
        self.open.iter().map(|open| open()).collect()
    }

    fn takes(&self, case: &Case) -> bool {
        self.open.len() == 1 || case.devices > 1
    }

    /// What a run of this case is called.
    fn name_of(&self, case: &Case) -> String {
        let devices: Vec<String> = (0..case.devices).map(|device| device.to_string()).collect();
        format!("[{}/{}] {}", self.label, devices.join("+"), case.name)
    }
}

/// `--require BACKEND,N`: what must be there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    backend: String,
    devices: u32,
}

/// What the suite's own arguments say.
#[derive(Debug, Default)]
struct Options {
    required: Vec<Requirement>,
    /// Backends to run the suite on; all if there are none.
    only: Vec<String>,
    /// The one run that another process of the suite wants done here.
    in_process: Option<String>,
    /// For the harness.
    rest: Vec<String>,
}

/// Runs the suite with the arguments of the process: those of any Rust test binary, `--require BACKEND,N` and
/// `--only BACKEND`.
///
/// # Errors
///
/// What is wrong with the arguments.
pub fn main() -> Result<ExitCode, String> {
    run_suite(std::env::args().collect(), &[])
}

/// The same with other arguments, the first of them the program's name. `again` are the words that lead from
/// the program to the suite, for programs that hold more: some cases run in a process of their own.
///
/// # Errors
///
/// What is wrong with the arguments.
pub fn run_suite(arguments: Vec<String>, again: &[String]) -> Result<ExitCode, String> {
    let options = Options::parse(arguments)?;
    let mut providers = providers::all();
    if let Some(name) = &options.in_process {
        let (provider, case) = find(&providers, name).ok_or_else(|| format!("there is no run {name:?}"))?;
        return Ok(apart::answer(judge(&provider, &case)));
    }
    let mut trials: Vec<Trial> =
        options.required.iter().map(|required| requirement_trial(required, &providers)).collect();
    if !options.only.is_empty() {
        providers.retain(|provider| options.only.iter().any(|only| only == provider.backend));
    }
    let mut absent = Vec::new();
    for provider in &providers {
        match (provider.is_there)() {
            Ok(()) => {
                let cases = cases::all().into_iter().filter(|case| provider.takes(case));
                trials.extend(cases.map(|case| trial(provider, case, again)));
            }
            // Once for all providers that want the same.
            Err(_) if absent.contains(&provider.backend) => {}
            Err(reason) => {
                absent.push(provider.backend);
                trials.push(absence_trial(provider.backend, reason));
            }
        }
    }
    Ok(libtest_mimic::run(&Arguments::from_iter(options.rest), trials).exit_code())
}

fn find(providers: &[Provider], name: &str) -> Option<(Provider, Case)> {
    let cases = cases::all();
    let mut pairs = providers.iter().flat_map(|provider| cases.iter().map(move |case| (provider, case)));
    let (provider, case) = pairs.find(|(provider, case)| provider.name_of(case) == name)?;
    Some((provider.clone(), *case))
}

/// Methods among `declared` (as `Trait::method`) that no case says it covers.
pub fn uncovered_methods(declared: &[String]) -> Vec<String> {
    let cases = cases::all();
    let covered = |method: &String| cases.iter().any(|case| case.covers.contains(&method.as_str()));
    declared.iter().filter(|method| !covered(method)).cloned().collect()
}

impl Options {
    /// Takes the suite's own options (`--require X,N`, also `--require=X,N`, also several) out of the others.
    fn parse(arguments: Vec<String>) -> Result<Self, String> {
        let mut options = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let mut value = |like| {
                value.clone().or_else(|| arguments.next()).ok_or(format!("{name} needs a value like {like}"))
            };
            match name {
                "--require" => options.required.push(parse_requirement(&value("host,4")?)?),
                "--only" => options.only.push(value("host")?),
                "--in-process" => options.in_process = Some(value("'[host/0] copy::within_a_device'")?),
                _ => options.rest.push(argument),
            }
        }
        Ok(options)
    }
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
    let _turn = provider.turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    let [backend, ..] = &*provider.opened()? else { return Err("the provider opens nothing".into()) };
    let found = backend.devices()?.len();
    if found < required.devices as usize {
        return Err(format!("{} devices are required, {found} are there", required.devices).into());
    }
    // All at once, as the cases will have them.
    let open = |ordinal| backend.open(ordinal, Features::empty());
    (0..required.devices).map(open).collect::<Result<Vec<_>, _>>()?;
    Ok(())
}

fn absence_trial(backend: &str, reason: String) -> Trial {
    let reason = format!("skipped: {reason}");
    Trial::ignorable_test(format!("[{backend}] is there"), move || Ok(Completion::ignored_with(reason)))
}

fn trial(provider: &Provider, case: Case, again: &[String]) -> Trial {
    let (name, provider) = (provider.name_of(&case), provider.clone());
    if provider.loses_devices && case.may_lose_device {
        let command: Vec<String> =
            again.iter().cloned().chain(["--in-process".into(), name.clone()]).collect();
        return Trial::ignorable_test(name, move || {
            let _turn = provider.turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            apart::ask(&command)
        });
    }
    Trial::ignorable_test(name, move || judge(&provider, &case))
}

fn judge(provider: &Provider, case: &Case) -> Result<Completion, Failed> {
    if let Some((_, reason)) = provider.unsupported.iter().find(|(name, _)| *name == case.name) {
        return Ok(Completion::ignored_with(format!("unsupported: {reason}")));
    }
    let _turn = provider.turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    // Those of a case before that was not run are nothing to this one.
    drop((provider.complaints)());
    let context = match Context::open(&provider.opened()?, case)? {
        Ok(context) => context,
        Err(missing) => return Ok(Completion::ignored_with(format!("skipped: {missing}"))),
    };
    if let Some(Err(reason)) = case.condition.map(|condition| condition(&context)) {
        return Ok(Completion::ignored_with(format!("skipped: {reason}")));
    }
    let expected = provider.expected_failures.iter().find(|(name, _)| *name == case.name);
    let outcome = run(case, &context);
    // With the devices closed, so that what is left behind is noticed.
    drop(context);
    let complaints = (provider.complaints)();
    let outcome =
        outcome.and_then(|()| if complaints.is_empty() { Ok(()) } else { Err(complaints.join("\n").into()) });
    match (outcome, expected) {
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
        let arguments =
            strings(&["suite", "--require", "host,4", "--nocapture", "--require=cuda", "--only", "cuda"]);
        let Options { required, rest, only, .. } = Options::parse(arguments).unwrap();
        let expected = [("host", 4), ("cuda", 1)]
            .map(|(backend, devices)| Requirement { backend: backend.to_owned(), devices });
        assert_eq!(required, expected);
        assert_eq!((rest, only), (strings(&["suite", "--nocapture"]), strings(&["cuda"])));
    }

    #[test]
    fn malformed_requirements_are_refused() {
        for value in ["", ",2", "host,0", "host,many", "host,-1"] {
            assert!(parse_requirement(value).is_err(), "{value:?}");
        }
        assert!(Options::parse(strings(&["suite", "--require"])).is_err());
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
