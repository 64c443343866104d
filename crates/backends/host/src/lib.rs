//! CPU devices.
