//! Sums over the ranks of one host, as threads and as processes, beside Open MPI's and beside copying as many bytes.
//!
//! Run: `cargo bench -p warpweft-benches --bench host_collectives -- [--ranks N] [--rounds N]
//! [--smallest BYTES] [--largest BYTES]`
//!
//! Open MPI is taken from the path, or from the prefix in `MPI_PREFIX` (such as `usr` of unpacked packages); its program
//! is compiled with `cc`. It binds ranks to cores, and so do the others here. Contenders run by turns and sleep in between, and every reading is the mean of a batch on the
//! slowest rank: the median of them, and from the least to the 99th of 100. Compare ratios of one run; where others
//! use the machine too, those of the least say most.

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<()> {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
#[expect(clippy::print_stdout, reason = "printing is what a benchmark does")]
mod linux {
    use std::{
        env,
        fs::{File, OpenOptions},
        hint,
        io::{BufRead as _, BufReader, Write as _},
        path::{Path, PathBuf},
        process::{Child, Command, Stdio},
        sync::{Arc, Barrier},
        thread,
        time::{Duration, Instant},
    };

    use anyhow::{Context as _, bail, ensure};
    use rustix::{
        fs::{CWD, FileType, Mode, mknodat},
        thread::{CpuSet, sched_setaffinity},
    };
    use warpweft::bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous, RunId};
    use warpweft_core_types::{CollectiveOp, DType, ReduceOp};
    use warpweft_host_collectives::{HostCommunicator, HostConfig, SliceCall, Slices};

    const WITHIN: Duration = Duration::from_secs(60);

    pub(crate) fn main() -> anyhow::Result<()> {
        let words: Vec<String> = env::args().skip(1).filter(|word| word != "--bench").collect();
        match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            ["threads", size] => threads(size.parse()?),
            ["copies", size] => copies(size.parse()?),
            ["process", rank, size, path] => process(rank.parse()?, size.parse()?, path),
            words => compare(&Options::read(words)?),
        }
    }

    struct Options {
        ranks: u32,
        rounds: usize,
        smallest: usize,
        largest: usize,
    }

    impl Options {
        fn read(words: &[&str]) -> anyhow::Result<Self> {
            let mut options = Self { ranks: 2, rounds: 21, smallest: 4 << 10, largest: 64 << 20 };
            for pair in words.chunks(2) {
                match pair {
                    ["--ranks", number] => options.ranks = number.parse()?,
                    ["--rounds", number] => options.rounds = number.parse()?,
                    ["--smallest", number] => options.smallest = number.parse()?,
                    ["--largest", number] => options.largest = number.parse()?,
                    other => bail!("{other:?}"),
                }
            }
            Ok(options)
        }
    }

    fn compare(options: &Options) -> anyhow::Result<()> {
        let size = options.ranks;
        let mut contenders = vec![
            Contender::piped("threads", &[&["threads".into(), size.to_string()]])?,
            Contender::processes(size)?,
            Contender::piped("copies", &[&["copies".into(), size.to_string()]])?,
        ];
        match Contender::open_mpi(size) {
            Ok(contender) => contenders.push(contender),
            Err(error) => println!("Open MPI was not found, so that there is no peer: {error:#}"),
        }
        let sizes = (2..).map(|power| 1_usize << power).skip_while(|bytes| *bytes < options.smallest);
        let sizes = sizes.take_while(|bytes| *bytes <= options.largest);
        for bytes in sizes {
            let iterations = ((16 << 20) / bytes).clamp(2, 1000);
            let mut times = vec![Vec::new(); contenders.len()];
            for round in 0..=options.rounds {
                for (contender, times) in contenders.iter_mut().zip(&mut times) {
                    let took = contender.measure(bytes, iterations)?;
                    // The first touches memory for the first time.
                    times.extend((round > 0).then_some(took));
                }
            }
            print(size, bytes, &contenders, &mut times);
        }
        Ok(())
    }

    fn print(size: u32, bytes: usize, contenders: &[Contender], times: &mut [Vec<u64>]) {
        let at = |times: &[u64], percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1];
        let (mut medians, mut leasts) = (Vec::new(), Vec::new());
        let mut line = format!("{size} ranks {bytes:>9} B");
        for (contender, times) in contenders.iter().zip(times) {
            times.sort_unstable();
            let (least, median, late) = (times[0], at(times, 50), at(times, 99));
            line +=
                &format!("  {} {:>9.2} ({:.2} to {:.2})", contender.name, us(median), us(least), us(late));
            medians.push(median);
            leasts.push(least);
        }
        line += "  us";
        for (what, times) in [("p50", &medians), ("least", &leasts)] {
            if let [threads, processes, _, peer] = times[..] {
                let ratio = |ours: u64| peer as f64 / ours.max(1) as f64;
                line += &format!("; by {what} faster x{:.2} x{:.2}", ratio(threads), ratio(processes));
            }
        }
        println!("{line}");
        for (contender, median) in contenders.iter().zip(medians) {
            let name = format!("host_collectives/all_reduce/{size}/{bytes}/{}", contender.name);
            println!("{}", serde_json::json!({ "name": name, "median": median, "unit": "ns" }));
        }
    }

    fn us(nanos: u64) -> f64 {
        nanos as f64 / 1e3
    }

    /// Ranks in other processes, which sleep until they are told a size and a number of times.
    struct Contender {
        name: &'static str,
        lines: Vec<(Box<dyn std::io::Write>, Box<dyn std::io::BufRead>)>,
        children: Vec<Child>,
        _folder: Option<tempfile::TempDir>,
    }

    impl Contender {
        /// This program, once for each list of words.
        fn piped(name: &'static str, of: &[&[String]]) -> anyhow::Result<Self> {
            let mut contender = Self { name, lines: Vec::new(), children: Vec::new(), _folder: None };
            for words in of {
                let mut command = Command::new(env::current_exe()?);
                let mut child = command.args(*words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
                let stdin = child.stdin.take().context("it was piped")?;
                let stdout = BufReader::new(child.stdout.take().context("it was piped")?);
                contender.lines.push((Box::new(stdin), Box::new(stdout)));
                contender.children.push(child);
            }
            Ok(contender)
        }

        fn processes(size: u32) -> anyhow::Result<Self> {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("rendezvous").display().to_string();
            let words = |rank: u32| ["process".into(), rank.to_string(), size.to_string(), path.clone()];
            let words: Vec<_> = (0..size).map(words).collect();
            let words: Vec<&[String]> = words.iter().map(<[String; 4]>::as_slice).collect();
            let mut contender = Self::piped("processes", &words)?;
            contender._folder = Some(folder);
            Ok(contender)
        }

        fn open_mpi(size: u32) -> anyhow::Result<Self> {
            let mpi = OpenMpi::find()?;
            let folder = tempfile::tempdir()?;
            let program = mpi.compile(folder.path())?;
            let pipe = |name: &str, rank: u32| folder.path().join(format!("{name}.{rank}"));
            for rank in 0..size {
                for name in ["in", "out"] {
                    mknodat(CWD, pipe(name, rank), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
                }
            }
            let mut command = mpi.command(&mpi.run);
            command.args(["--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1"]);
            command.args(["--mca", "btl", "self,vader", "-n", &size.to_string()]);
            command.arg(&program).arg(folder.path()).stdin(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().context("mpirun")?;
            let mut contender =
                Self { name: "openmpi", lines: Vec::new(), children: vec![child], _folder: None };
            for rank in 0..size {
                let to = contender.open(OpenOptions::new().write(true), &pipe("in", rank))?;
                let from = File::open(pipe("out", rank))?;
                contender.lines.push((Box::new(to), Box::new(BufReader::new(from))));
            }
            contender._folder = Some(folder);
            Ok(contender)
        }

        /// Opens a pipe once its reader is there, unless that has ended.
        fn open(&mut self, options: &mut OpenOptions, path: &Path) -> anyhow::Result<File> {
            use std::os::unix::fs::OpenOptionsExt as _;

            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            loop {
                match options.clone().custom_flags(nonblocking).open(path) {
                    // As long as the pipe is empty no write of a line has to wait.
                    Ok(file) => return Ok(file),
                    Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {}
                    Err(error) => return Err(error.into()),
                }
                for child in &mut self.children {
                    ensure!(child.try_wait()?.is_none(), "it ended before it began");
                }
                thread::sleep(Duration::from_millis(5));
            }
        }

        /// Nanoseconds of one operation on the slowest rank.
        fn measure(&mut self, bytes: usize, iterations: usize) -> anyhow::Result<u64> {
            for (to, _) in &mut self.lines {
                writeln!(to, "{bytes} {iterations}")?;
                to.flush()?;
            }
            let mut slowest = 0;
            for (_, from) in &mut self.lines {
                let mut line = String::new();
                ensure!(from.read_line(&mut line)? > 0, "{} has ended", self.name);
                let took: i64 = line.trim().parse()?;
                slowest = slowest.max(u64::try_from(took).context("the result was wrong")?);
            }
            Ok(slowest)
        }
    }

    impl Drop for Contender {
        fn drop(&mut self) {
            self.lines.clear();
            for child in &mut self.children {
                let _ended = child.wait();
            }
        }
    }

    struct OpenMpi {
        run: PathBuf,
        prefix: Option<PathBuf>,
    }

    impl OpenMpi {
        fn find() -> anyhow::Result<Self> {
            let prefix = env::var_os("MPI_PREFIX").map(PathBuf::from);
            let folders: Vec<PathBuf> = match &prefix {
                Some(prefix) => vec![prefix.join("bin")],
                None => env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect(),
            };
            let names = ["mpirun", "mpirun.openmpi"];
            let mut places = folders.iter().flat_map(|folder| names.map(|name| folder.join(name)));
            let run = places.find(|place| place.exists()).context("there is no mpirun")?;
            Ok(Self { run, prefix })
        }

        fn libraries(&self) -> Vec<PathBuf> {
            let libraries = |prefix: &PathBuf| {
                let here = prefix.join(format!("lib/{}-linux-gnu", env::consts::ARCH));
                vec![here.clone(), here.join("openmpi/lib"), prefix.join("lib")]
            };
            self.prefix.as_ref().map(libraries).unwrap_or_default()
        }

        /// A command that finds the libraries.
        fn command(&self, program: &Path) -> Command {
            let mut command = Command::new(program);
            if let Some(prefix) = &self.prefix {
                command.env("OPAL_PREFIX", prefix);
                command.env("LD_LIBRARY_PATH", env::join_paths(self.libraries()).unwrap_or_default());
            }
            command
        }

        fn compile(&self, folder: &Path) -> anyhow::Result<PathBuf> {
            let (source, program) = (folder.join("peer.c"), folder.join("peer"));
            std::fs::write(&source, include_str!("../peers/open_mpi.c"))?;
            let mut command = self.command(Path::new("cc"));
            command.args(["-O3", "-o"]).arg(&program).arg(&source);
            for library in self.libraries() {
                command.arg("-I").arg(library.join("openmpi/include"));
                command.arg("-L").arg(&library);
                command.arg(format!("-Wl,-rpath-link,{}", library.display()));
            }
            if self.prefix.is_none() {
                command.arg("-I").arg(format!("/usr/lib/{}-linux-gnu/openmpi/include", env::consts::ARCH));
            }
            let output = command.arg("-lmpi").output().context("there is no cc")?;
            ensure!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
            Ok(program)
        }
    }

    /// The defaults, or `HOST_CONFIG=slot_bytes,one_shot_bytes,direct_bytes`, by which the defaults were found.
    fn config() -> anyhow::Result<HostConfig> {
        let Ok(words) = env::var("HOST_CONFIG") else { return Ok(HostConfig::default()) };
        let numbers: Result<Vec<usize>, _> = words.split(',').map(str::parse).collect();
        let [slot_bytes, one_shot_bytes, direct_bytes] = numbers?[..] else { bail!("{words}") };
        Ok(HostConfig { slot_bytes, one_shot_bytes, direct_bytes, ..HostConfig::default() })
    }

    /// Does what the lines say until they end.
    fn serve(mut measure: impl FnMut(usize, usize) -> anyhow::Result<u64>) -> anyhow::Result<()> {
        for line in std::io::stdin().lock().lines() {
            let line = line?;
            let (bytes, iterations) = line.split_once(' ').context("a size and a number")?;
            println!("{}", measure(bytes.parse()?, iterations.parse()?)?);
        }
        Ok(())
    }

    /// Keeps this thread where no other rank is, if there are cores enough.
    fn bind(rank: u32) {
        let mut cores = CpuSet::new();
        cores.set(rank as usize);
        // Fewer cores than ranks are a case to measure too.
        let _bound = sched_setaffinity(None, &cores);
    }

    fn process(rank: u32, size: u32, path: &str) -> anyhow::Result<()> {
        bind(rank);
        let rendezvous = Rendezvous::file(path, RunId::from("bench"));
        let group = Group::join(rendezvous, JoinConfig::new(Rank(rank), size), WITHIN)?;
        let communicator = HostCommunicator::join(Arc::new(group), &config()?, WITHIN)?;
        serve(|bytes, iterations| all_reduces(&communicator, bytes, iterations))
    }

    fn threads(size: u32) -> anyhow::Result<()> {
        let meeting = Meeting::new();
        let join = |rank: u32| {
            let meeting = Rendezvous::Meeting(meeting.clone());
            thread::spawn(move || {
                let group = Group::join(meeting, JoinConfig::new(Rank(rank), size), WITHIN)?;
                anyhow::Ok(HostCommunicator::join(Arc::new(group), &config()?, WITHIN)?)
            })
        };
        let joining: Vec<_> = (0..size).map(join).collect();
        let ranks: anyhow::Result<Vec<HostCommunicator>> =
            joining.into_iter().map(|thread| thread.join().expect("none panics")).collect();
        let ranks = ranks?;
        serve(|bytes, iterations| {
            slowest(&ranks, |communicator| all_reduces(communicator, bytes, iterations))
        })
    }

    /// As many bytes copied on every core that has a rank: no rank can be done with its result before.
    fn copies(size: u32) -> anyhow::Result<()> {
        let ranks: Vec<u32> = (0..size).collect();
        serve(|bytes, iterations| {
            let begun = Barrier::new(size as usize);
            slowest(&ranks, |_| {
                let (src, mut dst) = (vec![1_u8; bytes], vec![0; bytes]);
                begun.wait();
                let started = Instant::now();
                for _ in 0..iterations {
                    hint::black_box(&mut dst).copy_from_slice(hint::black_box(&src));
                }
                mean(started, iterations)
            })
        })
    }

    fn slowest<T: Sync>(of: &[T], work: impl Fn(&T) -> anyhow::Result<u64> + Sync) -> anyhow::Result<u64> {
        thread::scope(|scope| {
            let work = &work;
            let bound = |(item, rank)| {
                bind(rank);
                work(item)
            };
            let threads: Vec<_> = of.iter().zip(0..).map(|at| scope.spawn(move || bound(at))).collect();
            let times: anyhow::Result<Vec<u64>> =
                threads.into_iter().map(|thread| thread.join().expect("none panics")).collect();
            Ok(times?.into_iter().max().unwrap_or(0))
        })
    }

    fn mean(started: Instant, iterations: usize) -> anyhow::Result<u64> {
        Ok(u64::try_from(started.elapsed().as_nanos() / iterations as u128)?)
    }

    fn all_reduces(communicator: &HostCommunicator, bytes: usize, iterations: usize) -> anyhow::Result<u64> {
        let (rank, size) = (communicator.rank(), communicator.size());
        let elements = || (0..7_u32).cycle().take(bytes / 4);
        let src: Vec<u8> = elements().flat_map(|value| ((rank + value) as f32).to_ne_bytes()).collect();
        let mut dst = vec![0; bytes];
        let mut all_reduce = || {
            let (op, operands) = (CollectiveOp::AllReduce(ReduceOp::Sum), Slices::Both(&src, &mut dst));
            communicator
                .run_slices(&mut [SliceCall { op, dtype: DType::F32, operands, custom: None }], WITHIN)
        };
        for _ in 0..=iterations / 10 {
            all_reduce()?;
        }
        let started = Instant::now();
        for _ in 0..iterations {
            all_reduce()?;
        }
        let took = mean(started, iterations)?;
        let sum = |value: u32| (size * (size - 1) / 2 + size * value) as f32;
        let is_right = dst.chunks(4).zip(elements()).all(|(got, value)| got == sum(value).to_ne_bytes());
        ensure!(is_right, "the result is wrong");
        Ok(took)
    }
}
