//! Ranks of a communicator that are killed in the middle of a sum: how long until the others know, have returned, and
//! have summed without the dead.
//!
//! Run: `cargo bench -p warpweft-benches --bench comm_faults -- [--rounds N] [--ranks N] [--seed N]`

#[cfg(unix)]
fn main() -> anyhow::Result<std::process::ExitCode> {
    unix::main()
}

#[cfg(not(unix))]
fn main() {}

#[cfg(unix)]
#[expect(clippy::print_stdout, reason = "printing is what a benchmark does")]
mod unix {
    use std::process::ExitCode;

    use anyhow::bail;
    use warpweft::{Backend as _, Bytes, Features, host::HostBackend};
    use warpweft_benches::deaths::{self, Bars, DeathConfig, Report};

    const HELP: &str = "\
Kills ranks that are processes, in the middle of sums over host devices, one in each round. The others have to be told,
to return, to sum without it, and to take in the process that is started in its place.

  --rounds N   how many are killed, one after the other (200)
  --ranks N    how many ranks there are (4)
  --seed N     who is killed and when; another each time if it is not given
  --json       a line of JSON for each round too

Exit code: 0, or 1 if a round failed. A bar that is missed is told and fails nothing.";

    pub(crate) fn main() -> anyhow::Result<ExitCode> {
        let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
        if let [first, _device] = &words[..]
            && first == "rank"
        {
            // Each process has devices of its own.
            deaths::play(&HostBackend::with_devices(1)?.open(0, Features::empty())?)?;
            return Ok(ExitCode::SUCCESS);
        }
        let (mut config, mut is_json) = (DeathConfig::new(&["rank"]), false);
        let mut words = words.iter().map(String::as_str);
        while let Some(word) = words.next() {
            let mut number = || words.next().map(str::parse::<u64>).unwrap_or("".parse());
            match word {
                "--rounds" => config.rounds = number()?.try_into()?,
                "--ranks" => config.ranks = number()?.try_into()?,
                "--seed" => config.seed = number()?,
                "--json" => is_json = true,
                "--help" | "-h" => {
                    println!("{HELP}");
                    return Ok(ExitCode::SUCCESS);
                }
                other => bail!("{other:?} is not known; --help says what is"),
            }
        }
        if config.ranks < 2 || config.rounds == 0 {
            bail!("there are two ranks at least, and one round");
        }
        compare(&config, is_json)
    }

    fn compare(config: &DeathConfig, is_json: bool) -> anyhow::Result<ExitCode> {
        let sizes: Vec<String> = config.sizes.iter().map(|size| Bytes(*size).to_string()).collect();
        println!("{} ranks, sums of {} by turns, seed {}", config.ranks, sizes.join(" and "), config.seed);
        let rounds = deaths::run(config, |number, round| {
            if is_json || round.outcome.is_err() {
                println!("{}", round.to_json(number));
            }
        })?;
        let report = Report::of(&rounds, &Bars::default());
        println!("{report}");
        for reading in report.readings(&format!("comm_faults/{}", config.ranks)) {
            println!("{reading}");
        }
        Ok(if report.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
