//! Machine code of earlier runs: what the driver made of PTX, kept in a folder of the user's.
//!
//! A file is named by everything that went into it, carries a digest of what it holds, and is written under
//! another name first. So a file is whole or it is not used, whoever writes beside us.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::driver::Driver;

/// The first bytes of a file: its form may change, then this does.
const MAGIC: &[u8; 16] = b"warpweft cubin 1";

/// More files than this are not kept; the oldest go first.
const MOST_FILES: usize = 512;

/// The folder of ours in a folder of the user's, who may have other things there.
const FOLDER: &str = "cubin";

/// How the files end that hold code, and how those begin that are being written.
const SUFFIX: &str = ".cubin";
const UNFINISHED: &str = ".warpweft-new-";

/// Nobody writes a file for as long: one that is older was left behind.
const ABANDONED: Duration = Duration::from_secs(60 * 60);

/// Where a cache is, if there is one. Whatever goes wrong with it costs time and nothing else.
#[derive(Debug, Clone, Default)]
pub(crate) struct CubinCache {
    folder: Option<PathBuf>,
}

/// What a file is named by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(blake3::Hash);

impl CubinCache {
    /// A cache in `cubin` of this folder, which is made when something is first kept; none if the path is empty.
    pub(crate) fn at(folder: PathBuf) -> Self {
        let folder = Some(folder).filter(|folder| !folder.as_os_str().is_empty());
        Self { folder: folder.map(|folder| folder.join(FOLDER)) }
    }

    /// The folder that the environment names: `WARPWEFT_CACHE_DIR`, or `warpweft` in `XDG_CACHE_HOME`, or
    /// `.cache/warpweft` at home. An empty `WARPWEFT_CACHE_DIR` turns the cache off, and so does a relative one:
    /// where it leads depends on where the program was started.
    pub(crate) fn of_environment() -> Self {
        let folder = |name: &str| env::var_os(name).map(PathBuf::from);
        let folder = folder("WARPWEFT_CACHE_DIR")
            .or_else(|| folder("XDG_CACHE_HOME").map(|folder| folder.join("warpweft")))
            .or_else(|| folder("HOME").map(|home| home.join(".cache/warpweft")));
        Self::at(folder.filter(|folder| folder.is_absolute()).unwrap_or_default())
    }

    /// What this driver makes of `ptx` for a compute capability.
    pub(crate) fn key(driver: &Driver, (major, minor): (u32, u32), ptx: &[u8]) -> Key {
        let mut hasher = blake3::Hasher::new();
        let version = driver.version();
        hasher.update(format!("{version:?} sm_{major}{minor}\n").as_bytes());
        hasher.update(ptx);
        Key(hasher.finalize())
    }

    pub(crate) fn get(&self, key: Key) -> Option<Vec<u8>> {
        let file = fs::read(self.path(key)?).ok()?;
        let rest = file.strip_prefix(MAGIC)?;
        let (digest, cubin) = rest.split_at_checked(blake3::OUT_LEN)?;
        (blake3::hash(cubin).as_bytes() == digest).then(|| cubin.to_vec())
    }

    pub(crate) fn put(&self, key: Key, cubin: &[u8]) {
        if let Some(path) = self.path(key) {
            // A full or read-only disk leaves the cache as it was.
            let _kept = write(&path, cubin);
        }
    }

    fn path(&self, key: Key) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        Some(folder.join(format!("{}{SUFFIX}", key.0.to_hex())))
    }
}

fn write(path: &Path, cubin: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
    fs::create_dir_all(folder)?;
    make_room(folder);
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(folder)?;
    for part in [MAGIC.as_slice(), blake3::hash(cubin).as_bytes(), cubin] {
        io::Write::write_all(&mut file, part)?;
    }
    file.persist(path)?;
    Ok(())
}

/// Takes files of ours away, so that one more can come. Another program may do the same at the same time.
fn make_room(folder: &Path) {
    let mut files: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(ours).collect();
    let excess = (files.len() + 1).saturating_sub(MOST_FILES);
    files.sort_unstable();
    for (_, path) in files.iter().take(excess) {
        // One that cannot go stays, and one that is gone is as good.
        let _gone = fs::remove_file(path);
    }
}

/// When a file was written, if it is one of ours that may go.
fn ours(entry: fs::DirEntry) -> Option<(SystemTime, PathBuf)> {
    let name = entry.file_name();
    let name = name.to_str()?;
    let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
    let written = metadata.modified().ok()?;
    let is_digest =
        |stem: &str| stem.len() == 2 * blake3::OUT_LEN && stem.bytes().all(|b| b.is_ascii_hexdigit());
    let is_code = name.strip_suffix(SUFFIX).is_some_and(is_digest);
    let is_abandoned = || written.elapsed().is_ok_and(|age| age > ABANDONED);
    let goes = is_code || name.starts_with(UNFINISHED) && is_abandoned();
    goes.then(|| (written, entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Key {
        Key(blake3::hash(text.as_bytes()))
    }

    #[test]
    fn what_was_kept_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::at(folder.path().join("deep/er"));
        assert_eq!(cache.get(key("a")), None);
        cache.put(key("a"), b"machine code");
        cache.put(key("b"), b"");
        assert_eq!(cache.get(key("a")).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(cache.get(key("b")).as_deref(), Some(&b""[..]));
        assert_eq!(cache.get(key("c")), None);
        cache.put(key("a"), b"other code");
        assert_eq!(cache.get(key("a")).as_deref(), Some(&b"other code"[..]));
    }

    #[test]
    fn a_damaged_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::at(folder.path().to_path_buf());
        cache.put(key("a"), b"machine code");
        let path = cache.path(key("a")).unwrap();
        let whole = fs::read(&path).unwrap();
        for position in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[position] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.get(key("a")), None, "byte {position}");
            fs::write(&path, &whole[..position]).unwrap();
            assert_eq!(cache.get(key("a")), None, "{position} bytes");
        }
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let cache = CubinCache::default();
        cache.put(key("a"), b"machine code");
        assert_eq!(cache.get(key("a")), None);
    }

    #[test]
    fn the_oldest_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::at(folder.path().to_path_buf());
        for number in 0..MOST_FILES + 10 {
            cache.put(key(&number.to_string()), b"");
        }
        let count = fs::read_dir(folder.path().join(FOLDER)).unwrap().count();
        assert_eq!(count, MOST_FILES);
        assert!(cache.get(key(&(MOST_FILES + 9).to_string())).is_some());
    }

    #[test]
    fn what_is_not_ours_stays_and_is_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join(FOLDER);
        fs::create_dir(&place).unwrap();
        let digest = key("theirs").0.to_hex();
        let mut names: Vec<String> =
            (0..MOST_FILES + 10).map(|number| format!("thesis-{number}.txt")).collect();
        names.extend([format!("{digest}.txt"), format!("{}.cubin", &digest[1..]), "kernel.cubin".to_owned()]);
        names.push(format!("{UNFINISHED}by-another-program"));
        for name in &names {
            fs::write(place.join(name), "mine").unwrap();
        }
        // A folder that is called like a file of ours, and is the oldest.
        fs::create_dir(place.join(format!("{digest}.cubin"))).unwrap();
        let cache = CubinCache::at(folder.path().to_path_buf());
        for number in 0..MOST_FILES + 10 {
            cache.put(key(&number.to_string()), b"");
        }
        assert!(names.iter().all(|name| place.join(name).exists()));
        assert_eq!(fs::read_dir(&place).unwrap().count(), names.len() + 1 + MOST_FILES);
        assert!(cache.get(key(&(MOST_FILES + 9).to_string())).is_some());
    }

    #[test]
    fn files_that_were_left_half_written_go_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::at(folder.path().to_path_buf());
        cache.put(key("a"), b"");
        let left = folder.path().join(FOLDER).join(format!("{UNFINISHED}123456"));
        fs::write(&left, "half").unwrap();
        let yesterday = SystemTime::now() - 24 * ABANDONED;
        fs::File::options().write(true).open(&left).unwrap().set_modified(yesterday).unwrap();
        for number in 0..MOST_FILES {
            cache.put(key(&number.to_string()), b"");
        }
        assert!(!left.exists());
    }
}
