//! Machine code of earlier runs: what the driver made of PTX, kept in a folder of the user's.
//!
//! A file is named by everything that went into it, carries a digest of what it holds, and is written under
//! another name first. So a file is whole or it is not used, whoever writes beside us.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use crate::driver::Driver;

/// The first bytes of a file: its form may change, then this does.
const MAGIC: &[u8; 16] = b"warpweft cubin 1";

/// More files than this are not kept; the oldest go first.
const MOST_FILES: usize = 512;

/// Where a cache is, if there is one. Whatever goes wrong with it costs time and nothing else.
#[derive(Debug, Clone, Default)]
pub(crate) struct CubinCache {
    folder: Option<PathBuf>,
}

/// What a file is named by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(blake3::Hash);

impl CubinCache {
    /// A cache in this folder, which is made when something is first kept; none if the path is empty.
    pub(crate) fn at(folder: PathBuf) -> Self {
        Self { folder: Some(folder).filter(|folder| !folder.as_os_str().is_empty()) }
    }

    /// The folder that the environment names: `WARPWEFT_CACHE_DIR`, or `warpweft` in `XDG_CACHE_HOME`, or
    /// `.cache/warpweft` at home. An empty `WARPWEFT_CACHE_DIR` turns the cache off.
    pub(crate) fn of_environment() -> Self {
        let folder = |name: &str| env::var_os(name).map(PathBuf::from);
        let folder = folder("WARPWEFT_CACHE_DIR")
            .or_else(|| folder("XDG_CACHE_HOME").map(|folder| folder.join("warpweft")))
            .or_else(|| folder("HOME").map(|home| home.join(".cache/warpweft")));
        Self { folder: folder.filter(|folder| folder.is_absolute()).map(|folder| folder.join("cubin")) }
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
        Some(folder.join(key.0.to_hex().as_str()).with_extension("cubin"))
    }
}

fn write(path: &Path, cubin: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
    fs::create_dir_all(folder)?;
    make_room(folder)?;
    let mut file = tempfile::Builder::new().prefix(".new").tempfile_in(folder)?;
    for part in [MAGIC.as_slice(), blake3::hash(cubin).as_bytes(), cubin] {
        io::Write::write_all(&mut file, part)?;
    }
    file.persist(path)?;
    Ok(())
}

fn make_room(folder: &Path) -> io::Result<()> {
    let mut files: Vec<_> = fs::read_dir(folder)?
        .filter_map(Result::ok)
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    let excess = (files.len() + 1).saturating_sub(MOST_FILES);
    files.sort_unstable();
    files.iter().take(excess).try_for_each(|(_, path)| fs::remove_file(path))
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
        let count = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(count, MOST_FILES);
        assert!(cache.get(key(&(MOST_FILES + 9).to_string())).is_some());
    }
}
