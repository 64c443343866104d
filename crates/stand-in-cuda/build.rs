//! The library is copied for every test that loads it: without what only debuggers read, a copy is small.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-link-arg-cdylib=-Wl,--strip-all");
    }
}
