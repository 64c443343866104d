//! What was measured before, in a file for each set of devices, drivers and libraries.

use std::{
    fs, io,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::Measured;

/// A file that is larger was not made here.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    /// Everything that it depends on, so that names of files need not tell it.
    key: String,
    measured: Vec<Measured>,
}

fn path(folder: &Path, key: &str) -> PathBuf {
    let digest = blake3::hash(key.as_bytes()).to_hex();
    folder.join(format!("dispatch-{}.json", &digest[..32]))
}

/// What a file tells of these devices; nothing if it is not there, or is not what was written.
pub(crate) fn read(folder: &Path, key: &str) -> Option<Vec<Measured>> {
    let path = path(folder, key);
    let file = fs::File::open(&path).ok()?;
    let mut text = String::new();
    let read = file.take(MOST_BYTES + 1).read_to_string(&mut text);
    let kept = match read {
        Ok(length) if length as u64 <= MOST_BYTES => serde_json::from_str::<Kept>(&text).ok(),
        _ => None,
    };
    let Some(kept) = kept.filter(|kept| kept.key == key) else {
        tracing::warn!(path = %path.display(), "what it tells of engines is not understood");
        return None;
    };
    Some(kept.measured)
}

/// Keeps what was measured: the file is the old one or the new one, whole.
pub(crate) fn write(folder: &Path, key: &str, measured: &[Measured]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let path = path(folder, key);
    let text = serde_json::to_vec_pretty(&Kept { key: key.to_owned(), measured: measured.to_vec() })?;
    // Several processes may write at once.
    let temporary = path.with_extension(format!("{}.new", std::process::id()));
    let written = fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        let _removed = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementClass, EngineKind, Way};

    fn measured() -> Vec<Measured> {
        vec![Measured {
            op: "all_reduce".to_owned(),
            class: ElementClass::UsualSum,
            captured: true,
            bytes: 1024,
            ways: vec![(Way { engine: EngineKind::Native, shape: None }, 7000)],
        }]
    }

    #[test]
    fn what_was_written_is_read_for_the_same_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path(), "one"), None);
        write(folder.path(), "one", &measured()).unwrap();
        assert_eq!(read(folder.path(), "one"), Some(measured()));
        assert_eq!(read(folder.path(), "other"), None);
        // A file of another key, under this one's name.
        fs::copy(path(folder.path(), "one"), path(folder.path(), "other")).unwrap();
        assert_eq!(read(folder.path(), "other"), None);
    }

    #[test]
    fn what_is_damaged_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "key", &measured()).unwrap();
        let path = path(folder.path(), "key");
        let whole = fs::read(&path).unwrap();
        for text in [&whole[..whole.len() / 2], b"", b"{}", &[0xff; 100], &vec![b' '; 2 << 20]] {
            fs::write(&path, text).unwrap();
            assert_eq!(read(folder.path(), "key"), None);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
