//! Ranks that are killed in the middle of their calls, round by round, and how the others go on.
//!
//! Each rank is a process. In every round all of them sum, back to back, until one is killed; the others have to be told,
//! to return, to sum without it, and to take in the process that is started in its place. All times are read from one
//! clock, that of the process which starts the others, when the line arrives by which a rank tells of it.

mod cast;
mod rank;
mod report;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use self::cast::{Actor, Said};
pub use self::{
    rank::play,
    report::{Bars, Report},
};

/// What is to happen.
#[derive(Debug, Clone)]
pub struct DeathConfig {
    /// The words after which this program calls [`play`]; the number of the device follows them.
    pub words: Vec<String>,
    /// How many ranks.
    pub ranks: u32,
    /// How many are killed, one after the other.
    pub rounds: u32,
    /// Bytes of a sum, by turns.
    pub sizes: Vec<u64>,
    /// The longest moment between the first sums and the kill.
    pub pause: Duration,
    /// The time of a round, and of a start of all ranks. When it is over, all ranks are killed, and the round has failed.
    pub round_limit: Duration,
    /// No round begins later.
    pub limit: Duration,
    /// Decides who is killed, and when.
    pub seed: u64,
}

impl DeathConfig {
    /// Four ranks and 200 rounds, of 64 KiB and 8 MiB by turns.
    pub fn new(words: &[&str]) -> Self {
        Self {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            ranks: 4,
            rounds: 200,
            sizes: vec![64 << 10, 8 << 20],
            pause: Duration::from_millis(20),
            round_limit: Duration::from_secs(20),
            limit: Duration::from_secs(3600),
            seed: fastrand::u64(..),
        }
    }
}

/// What a round came to.
#[derive(Debug, Clone)]
pub struct Round {
    /// Bytes of a sum.
    pub bytes: u64,
    /// The rank that was killed.
    pub victim: u32,
    /// The times, or what went wrong.
    pub outcome: Result<Times, String>,
}

/// How long after the kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The first call of a survivor ended with an error.
    pub detected: Duration,
    /// Every survivor had returned from all of its calls.
    pub returned: Duration,
    /// Every survivor had a right sum of those who are left.
    pub right: Duration,
    /// Every rank had a right sum with the process that was started in place of the killed one.
    pub whole: Duration,
}

/// Has all rounds happen, and tells of each.
///
/// # Errors
///
/// The processes cannot be started, or do not meet. What goes wrong in a round is told with it.
pub fn run(config: &DeathConfig, mut tell: impl FnMut(u32, &Round)) -> anyhow::Result<Vec<Round>> {
    let (started, mut random) = (Instant::now(), fastrand::Rng::with_seed(config.seed));
    let mut rounds = Vec::new();
    let mut cast = None;
    while (rounds.len() as u64) < u64::from(config.rounds) && started.elapsed() < config.limit {
        let end = || Instant::now() + config.round_limit;
        let ready = match cast.take() {
            Some(ready) => ready,
            None => meet(config, end())?,
        };
        let bytes = config.sizes[rounds.len() % config.sizes.len()];
        let (victim, pause) = (random.u32(..config.ranks), config.pause.mul_f64(random.f64()));
        let outcome = match die(ready, victim, bytes, pause, end()) {
            Ok((times, whole)) => {
                cast = Some(whole);
                Ok(times)
            }
            // Whoever is left is killed with the cast.
            Err(error) => Err(format!("{error:#}")),
        };
        let round = Round { bytes, victim, outcome };
        tell(u32::try_from(rounds.len())?, &round);
        rounds.push(round);
    }
    Ok(rounds)
}

/// The ranks, in the order of their numbers.
struct Cast {
    actors: Vec<Actor>,
    words: Vec<String>,
}

/// Starts all ranks.
fn meet(config: &DeathConfig, end: Instant) -> anyhow::Result<Cast> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("rendezvous");
    let path = path.to_str().context("the folder for temporary files has no name in UTF-8")?;
    let actors = (0..config.ranks).map(|device| Actor::start(&config.words, device));
    let mut actors: Vec<Actor> = actors.collect::<anyhow::Result<_>>()?;
    for (rank, actor) in (0..).zip(&mut actors) {
        actor.expect("ready", end)?;
        actor.tell(&format!("first {rank} {} {path}", config.ranks))?;
    }
    let mut cast = Cast { actors, words: config.words.clone() };
    cast.expect("met", end)?;
    Ok(cast)
}

/// One round: the times, and the ranks as they are afterwards.
fn die(
    mut cast: Cast,
    victim: u32,
    bytes: u64,
    pause: Duration,
    end: Instant,
) -> anyhow::Result<(Times, Cast)> {
    cast.tell(&format!("sums {bytes}"))?;
    cast.expect("under way", end)?;
    std::thread::sleep(pause);
    let mut dead = cast.actors.remove(victim as usize);
    let killed = Instant::now();
    dead.kill()?;
    let after = |at: Instant| at.saturating_duration_since(killed);

    let lost = format!("lost {victim}");
    let heard = cast.expect(&lost, end)?;
    let detected = heard.iter().min().copied().map(after).unwrap_or_default();
    let returned = after(cast.expect_last("returned", end)?);
    // It takes its time to start, and the others do not wait for it yet.
    let mut newcomer = Actor::start(&cast.words, dead.device())?;
    cast.tell(&format!("reform 0 {bytes}"))?;
    let right = after(cast.expect_sum(end)?);

    newcomer.expect("ready", end)?;
    let witness = cast.actors.last_mut().context("nobody is left")?;
    witness.tell("successor")?;
    let Said { words, .. } = witness.hear(end)?;
    ensure!(words.starts_with("again "), "rank {victim} could not come back: {words}");
    newcomer.tell(&format!("{words} {bytes}"))?;
    cast.tell(&format!("reform 1 {bytes}"))?;
    cast.actors.push(newcomer);
    let whole = after(cast.expect_sum(end)?);
    Ok((Times { detected, returned, right, whole }, cast))
}

impl Cast {
    fn tell(&mut self, words: &str) -> anyhow::Result<()> {
        self.actors.iter_mut().try_for_each(|actor| actor.tell(words))
    }

    /// Hears the same from all of them; when each of them had said it.
    fn expect(&mut self, words: &str, end: Instant) -> anyhow::Result<Vec<Instant>> {
        let expect = |(place, actor): (usize, &mut Actor)| {
            actor.expect(words, end).with_context(|| format!("number {place} of those who are left"))
        };
        self.actors.iter_mut().enumerate().map(expect).collect()
    }

    /// When all of them had a sum, which has to be right; looking at it takes no part in the time.
    fn expect_sum(&mut self, end: Instant) -> anyhow::Result<Instant> {
        let summed = self.expect_last("summed", end)?;
        self.expect("right", end)?;
        Ok(summed)
    }

    fn expect_last(&mut self, words: &str, end: Instant) -> anyhow::Result<Instant> {
        self.expect(words, end)?.into_iter().max().context("nobody is left")
    }
}
