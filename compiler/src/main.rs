//! `dcc`: see `cli`.

fn main() {
    std::process::exit(dcc::cli::main());
}
