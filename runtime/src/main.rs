//! `dcc-run`: trains an artifact. The slim binary, without the compiler, for cluster nodes.

#[cfg(target_os = "linux")]
fn main() {
    std::process::exit(dcc_runtime::command::main());
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("error[DCC0803]: dcc-run needs Linux: shared memory between processes and its wake-ups are Linux's");
    std::process::exit(8);
}
