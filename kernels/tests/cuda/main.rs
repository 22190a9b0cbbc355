//! CUDA kernels on the emulation of `tests/stand_in`: those of the library against f64 evaluations written here, generated ones against
//! the reference evaluator; the threads of a block in three orders, under AddressSanitizer. And the same with bugs planted in the texts,
//! each of which must be found by the check that the text passes without it.

mod attention;
mod emulation;
mod generated;
mod groups;
mod numbers;
mod pools;
mod products;
mod rows;
mod scatters;
mod tails;
mod top_k;
mod transfers;

use emulation::{Bug, Planted};
use std::collections::BTreeSet;

/// All that the tests of the families plant.
fn planted() -> Vec<Planted> {
    let families = [
        attention::planted(),
        attention::planted_in_tensor_cores(),
        generated::planted(),
        groups::planted(),
        products::planted(),
        scatters::planted(),
        tails::planted(),
        top_k::planted(),
    ];
    families.into_iter().flatten().chain(rows::planted()).collect()
}

#[test]
fn every_kind_of_bug_is_planted() {
    let kinds: BTreeSet<Bug> = planted().iter().map(|planted| planted.kind).collect();
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), Bug::ALL);
}
