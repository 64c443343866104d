//! A compiler that is too old: it says its version, and has none of the functions that came later.

use std::ffi::c_int;

use crate::{
    control::setting,
    exports::{Code, exports},
};

exports! {
    /// `nvrtc` is the version, 11.1 unless a test sets it.
    fn nvrtcVersion(out major: c_int, out minor: c_int) {
        let version = setting("nvrtc").unwrap_or_else(|| "11.1".to_owned());
        let parts = version.split_once('.').ok_or(Code::INVALID_VALUE)?;
        let number = |text: &str| text.parse().map_err(|_| Code::INVALID_VALUE);
        major.set(number(parts.0)?)?;
        minor.set(number(parts.1)?)
    }
}
