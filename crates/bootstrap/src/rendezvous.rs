//! How members find rank 0.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use warpweft_core_types::Deadline;

use crate::{
    Bind, Host, JoinError, Rank, RunId, Token, UniqueId, address,
    config::JoinConfig,
    service::{Contact, Source},
};

/// How members find rank 0.
#[derive(Debug)]
#[non_exhaustive]
pub enum Rendezvous {
    /// Rank 0 listens on a port that everybody knows.
    Tcp {
        /// `host:port` or `address:port`.
        address: String,
        /// The job's secret.
        token: Token,
        /// The run.
        run: RunId,
    },
    /// Rank 0 listens on a port that it was given already; the others get its [`id`](Host::id).
    Hosting(Host),
    /// Rank 0 made this id and handed it over.
    Id(UniqueId),
    /// Rank 0 writes where it is into a file, which it removes once everybody has come.
    ///
    /// Only the user can read the file, since it holds the job's token, and one that another user could have
    /// written is not believed. A file of another run is not used, so each run needs a name of its own.
    File {
        /// The file, in a folder that all members see.
        path: PathBuf,
        /// The run.
        run: RunId,
    },
    /// The members are threads of one process.
    Meeting(Arc<Meeting>),
}

impl Rendezvous {
    /// A port that everybody knows.
    pub fn tcp(address: impl Into<String>, token: Token, run: RunId) -> Self {
        Self::Tcp { address: address.into(), token, run }
    }

    /// A file that everybody sees.
    pub fn file(path: impl Into<PathBuf>, run: RunId) -> Self {
        Self::File { path: path.into(), run }
    }
}

/// Where threads of one process find each other.
#[derive(Debug, Default)]
pub struct Meeting {
    place: Mutex<Option<UniqueId>>,
}

impl Meeting {
    /// A place to meet; one group forms there at a time.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn set(&self, id: Option<UniqueId>) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = id;
    }

    fn find(&self) -> Result<Contact, JoinError> {
        let id = *self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let id =
            id.ok_or_else(|| JoinError::NotPublished { reason: "it has not come to the meeting".into() })?;
        Ok(id.contact())
    }
}

/// Rank 0's end of a rendezvous.
pub(crate) struct Led {
    pub(crate) listener: Option<std::net::TcpListener>,
    pub(crate) contact: Contact,
    pub(crate) withdraw: Option<Box<dyn FnOnce() + Send>>,
}

impl Rendezvous {
    /// Opens rank 0's end.
    pub(crate) fn lead(self, config: &JoinConfig, deadline: Deadline) -> Result<Led, JoinError> {
        if config.size == 1 {
            return alone();
        }
        let led = |host: Host, withdraw: Option<Box<dyn FnOnce() + Send>>| {
            let contact = host.id().contact();
            Led { listener: Some(host.listener), contact, withdraw }
        };
        match self {
            Self::Tcp { address, token, run } => lead_tcp(&address, token, run, &config.bind, deadline),
            Self::Hosting(host) => Ok(led(host, None)),
            Self::Id(_) => Err(wrong("rank 0 makes the id: it joins with the host that the id came from")),
            Self::File { path, run } => {
                let host = Host::new(&config.bind)?;
                publish(&path, &run, host.id())?;
                let id = host.id();
                Ok(led(host, Some(Box::new(move || withdraw(&path, id)))))
            }
            Self::Meeting(meeting) => {
                let host = Host::new(&Bind::Loopback)?;
                meeting.set(Some(host.id()));
                Ok(led(host, Some(Box::new(move || meeting.set(None)))))
            }
        }
    }

    /// Another member's end.
    pub(crate) fn follow(self, deadline: Deadline) -> Result<Source, JoinError> {
        match self {
            Self::Tcp { address, token, run } => {
                let addresses = address::resolve(&address, deadline)?;
                if addresses.iter().any(|address| address.port() == 0) {
                    return Err(wrong(PORT_ZERO));
                }
                let mut turn = 0;
                Ok(Box::new(move || {
                    let address = addresses[turn % addresses.len()];
                    turn += 1;
                    Ok(Contact { address, token: token.clone(), run: run.clone() })
                }))
            }
            Self::Id(id) => Ok(Box::new(move || Ok(id.contact()))),
            Self::File { path, run } => Ok(Box::new(move || read(&path, &run))),
            Self::Meeting(meeting) => Ok(Box::new(move || meeting.find())),
            Self::Hosting(_) => Err(wrong("only rank 0 hosts: the others join with its id")),
        }
    }
}

const PORT_ZERO: &str = "port 0 is known to nobody: use a host and its id, a file, or a port";

fn wrong(reason: &str) -> JoinError {
    JoinError::InvalidConfig { reason: reason.to_owned() }
}

/// A group of one needs no socket.
fn alone() -> Result<Led, JoinError> {
    let token = Token::random().map_err(JoinError::system("make a token"))?;
    let run = RunId::random().map_err(JoinError::system("make a token"))?;
    let address = ([127, 0, 0, 1], 0).into();
    Ok(Led { listener: None, contact: Contact { address, token, run }, withdraw: None })
}

fn lead_tcp(
    address: &str,
    token: Token,
    run: RunId,
    bind: &Bind,
    deadline: Deadline,
) -> Result<Led, JoinError> {
    let address = address::resolve(address, deadline)?[0];
    if address.port() == 0 {
        return Err(wrong(PORT_ZERO));
    }
    let listener = match bind {
        Bind::Loopback if address.ip().is_loopback() => address::listen_at(address)?,
        Bind::Loopback => return Err(JoinError::NotLoopback { address }),
        Bind::Any | Bind::Interface(_) => address::listen(bind, address.port())?,
    };
    Ok(Led { listener: Some(listener), contact: Contact { address, token, run }, withdraw: None })
}

const FILE_HEADER: &str = "warpweft rendezvous 1";

/// Longer files are none of ours.
const FILE_LIMIT: u64 = 4096;

/// Writes the file whole or not at all, for this user alone.
fn publish(path: &Path, run: &RunId, id: UniqueId) -> Result<(), JoinError> {
    let text = format!("{FILE_HEADER}\nrun {run}\nid {id}\n");
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", id.run()));
    let temporary = PathBuf::from(name);
    let written = write_private(&temporary, &text).and_then(|()| fs::rename(&temporary, path));
    written.map_err(|cause| {
        // It may not have been made.
        let _absent = fs::remove_file(&temporary);
        JoinError::System { action: "write the rendezvous file", cause }
    })
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    use io::Write as _;

    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)?.write_all(text.as_bytes())
}

/// Removes the file, unless another run has replaced it.
fn withdraw(path: &Path, id: UniqueId) {
    let is_ours = read_text(path).is_ok_and(|text| text.contains(&id.to_string()));
    if is_ours && let Err(error) = fs::remove_file(path) {
        tracing::debug!(%error, path = %path.display(), "a rendezvous file was not removed");
    }
}

fn read(path: &Path, expected: &RunId) -> Result<Contact, JoinError> {
    let not_yet = |reason: String| JoinError::NotPublished { reason };
    let text = read_text(path).map_err(|error| not_yet(format!("{}: {error}", path.display())))?;
    let (found, id) =
        parse(&text).ok_or_else(|| not_yet(format!("{} is no rendezvous file", path.display())))?;
    if found != *expected {
        return Err(JoinError::StaleFile { path: path.to_owned(), found, expected: expected.clone() });
    }
    Ok(id.contact())
}

fn read_text(path: &Path) -> io::Result<String> {
    use io::Read as _;

    let mut options = fs::OpenOptions::new();
    options.read(true);
    // Opening a pipe would wait for somebody who writes to it.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, NONBLOCK);
    let file = options.open(path)?;
    check_owner(&file)?;
    let mut text = String::new();
    file.take(FILE_LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(unix)]
const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();

/// Whoever else could write the file could say where rank 0 is, and with which token it proves to be it.
#[cfg(unix)]
fn check_owner(file: &fs::File) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt as _;

    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("this is no file"));
    }
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        let reason = "it belongs to another user, or others can change it";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(_: &fs::File) -> io::Result<()> {
    Ok(())
}

/// The run and the id in the text of a rendezvous file.
pub(crate) fn parse(text: &str) -> Option<(RunId, UniqueId)> {
    let mut lines = text.lines();
    if lines.next()? != FILE_HEADER {
        return None;
    }
    let run = RunId::from(lines.next()?.strip_prefix("run ")?);
    let id = lines.next()?.strip_prefix("id ")?.parse().ok()?;
    Some((run, id))
}

impl JoinConfig {
    pub(crate) fn leads(&self) -> bool {
        self.rank == Rank(0)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_a_file_that_is_ours_alone_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rendezvous");
        write_private(&path, "text").unwrap();
        assert_eq!(read_text(&path).unwrap(), "text");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read_text(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // A file that is root's is foreign to everybody else.
        if !rustix::process::geteuid().is_root() {
            assert!(check_owner(&fs::File::open("/etc/passwd").unwrap()).is_err());
        }
    }

    #[test]
    fn a_pipe_in_its_place_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rendezvous");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(read_text(&path).is_err());
    }
}
