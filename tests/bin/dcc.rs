//! `dcc` for the tests of this package, which may start binaries of their own package only.

fn main() {
    std::process::exit(dcc::cli::main());
}
