//! Processes that meet, call each other and die: how long until all of them know.
//!
//! Run: `cargo bench -p warpweft-benches --bench bootstrap`

#[cfg(unix)]
fn main() -> anyhow::Result<()> {
    unix::main()
}

#[cfg(not(unix))]
fn main() {}

#[cfg(unix)]
#[expect(clippy::print_stdout, reason = "printing is what a benchmark does")]
mod unix {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        process::{Child, ChildStdin, ChildStdout, Command, Stdio},
        time::{Duration, Instant},
    };

    use anyhow::{Context as _, ensure};
    use rustix::time::{ClockId, clock_gettime};
    use warpweft::bootstrap::{Group, JoinConfig, Rank, Rendezvous, RunId};

    const WITHIN: Duration = Duration::from_secs(60);
    const BARRIERS: u32 = 200;

    pub(crate) fn main() -> anyhow::Result<()> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        if words.first().is_some_and(|word| word == "member") {
            return member(&words[1..]);
        }
        for size in [2, 16, 64] {
            meeting(size, 11)?;
        }
        for size in [2, 8] {
            barriers(size)?;
        }
        for (size, victim) in [(4, 0), (4, 2), (16, 0), (16, 9)] {
            deaths(size, victim, 100)?;
        }
        Ok(())
    }

    /// Nanoseconds of a clock that all processes of a host share.
    fn clock_ns() -> anyhow::Result<u64> {
        let now = clock_gettime(ClockId::Monotonic);
        Ok(u64::try_from(now.tv_sec)? * 1_000_000_000 + u64::try_from(now.tv_nsec)?)
    }

    /// Says that it is ready, joins when told, says when it had; then makes calls or waits for a death.
    fn member(words: &[String]) -> anyhow::Result<()> {
        let [rank, size, path] = words else { anyhow::bail!("{words:?}") };
        println!("ready");
        let mut lines = std::io::stdin().lock().lines();
        lines.next().context("told to go")??;
        let config = JoinConfig::new(Rank(rank.parse()?), size.parse()?);
        let group = Group::join(Rendezvous::file(path, RunId::from("bench")), config, WITHIN)?;
        println!("{}", clock_ns()?);
        for line in lines {
            let line = line?;
            if line == "barriers" {
                group.barrier("warm", WITHIN)?;
                let started = Instant::now();
                for _ in 0..BARRIERS {
                    group.barrier("step", WITHIN)?;
                }
                println!("{}", started.elapsed().as_nanos() / u128::from(BARRIERS));
            } else {
                let victim: usize = line.parse()?;
                println!("waiting");
                group.wait_health(WITHIN, |health| !health[victim].is_present())?;
                println!("{}", clock_ns()?);
            }
        }
        Ok(())
    }

    struct Actor {
        child: Child,
        stdin: Option<ChildStdin>,
        stdout: BufReader<ChildStdout>,
    }

    impl Actor {
        fn tell(&mut self, line: &str) -> anyhow::Result<()> {
            Ok(writeln!(self.stdin.as_mut().context("it listens")?, "{line}")?)
        }

        fn hear(&mut self) -> anyhow::Result<String> {
            let mut line = String::new();
            ensure!(self.stdout.read_line(&mut line)? > 0, "a member has ended");
            Ok(line.trim_end().to_owned())
        }

        fn hear_number(&mut self) -> anyhow::Result<u64> {
            Ok(self.hear()?.parse()?)
        }
    }

    impl Drop for Actor {
        fn drop(&mut self) {
            self.stdin = None;
            let _ended = self.child.kill();
            let _ended = self.child.wait();
        }
    }

    /// Members that are ready to join.
    fn start(size: u32, folder: &tempfile::TempDir) -> anyhow::Result<Vec<Actor>> {
        let path = folder.path().join("rendezvous");
        let mut actors = Vec::new();
        for rank in 0..size {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("member").args([rank.to_string(), size.to_string()]).arg(&path);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let stdin = child.stdin.take();
            let stdout = BufReader::new(child.stdout.take().context("it was piped")?);
            actors.push(Actor { child, stdin, stdout });
        }
        for actor in &mut actors {
            actor.hear()?;
        }
        Ok(actors)
    }

    /// Lets them join; the time until the last one has.
    fn join(actors: &mut [Actor]) -> anyhow::Result<u64> {
        let started = clock_ns()?;
        actors.iter_mut().try_for_each(|actor| actor.tell("go"))?;
        let joined: Vec<u64> = actors.iter_mut().map(Actor::hear_number).collect::<anyhow::Result<_>>()?;
        Ok(joined.into_iter().max().unwrap_or(started) - started)
    }

    fn meeting(size: u32, rounds: u32) -> anyhow::Result<()> {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let folder = tempfile::tempdir()?;
            times.push(join(&mut start(size, &folder)?)?);
        }
        print(&format!("meet/{size}"), times);
        Ok(())
    }

    fn barriers(size: u32) -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let mut actors = start(size, &folder)?;
        join(&mut actors)?;
        let mut times = Vec::new();
        for _ in 0..11 {
            actors.iter_mut().try_for_each(|actor| actor.tell("barriers"))?;
            let all: Vec<u64> = actors.iter_mut().map(Actor::hear_number).collect::<anyhow::Result<_>>()?;
            times.extend(all.into_iter().max());
        }
        print(&format!("barrier/{size}"), times);
        Ok(())
    }

    /// Kills one; the time until the last of the others knows.
    fn deaths(size: u32, victim: usize, rounds: u32) -> anyhow::Result<()> {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let folder = tempfile::tempdir()?;
            let mut actors = start(size, &folder)?;
            join(&mut actors)?;
            let mut dead = actors.remove(victim);
            for actor in &mut actors {
                actor.tell(&victim.to_string())?;
                actor.hear()?;
            }
            let killed = clock_ns()?;
            dead.child.kill()?;
            let known: Vec<u64> = actors.iter_mut().map(Actor::hear_number).collect::<anyhow::Result<_>>()?;
            times.extend(known.into_iter().max().map(|last| last.saturating_sub(killed)));
        }
        print(&format!("death of {victim} of {size}"), times);
        Ok(())
    }

    fn print(name: &str, mut times: Vec<u64>) {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1] as f64 / 1e6;
        println!(
            "{name:<20} {:>4} rounds  p50 {:>9.3} ms  p99 {:>9.3} ms  max {:>9.3} ms",
            times.len(),
            at(50),
            at(99),
            at(100)
        );
        let median = times[times.len() / 2];
        println!("{{\"name\": \"bootstrap/{name}\", \"median\": {median}, \"unit\": \"ns\"}}");
    }
}
