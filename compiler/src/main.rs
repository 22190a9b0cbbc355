//! `dcc`: see `cli`.

fn main() {}
