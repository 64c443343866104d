//! Builds, checks and tests the workspace.
fn main() {}
