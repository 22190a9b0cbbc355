//! `dcc-run` for the tests of this package, which may start binaries of their own package only.

#[cfg(target_os = "linux")]
fn main() {
    std::process::exit(dcc_runtime::command::main());
}

#[cfg(not(target_os = "linux"))]
fn main() {
    std::process::exit(8);
}
