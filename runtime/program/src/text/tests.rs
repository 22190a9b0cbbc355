//! Round trips and hostile texts.

use super::{parse, print};

const MLP: &str = include_str!("../../tests/programs/mlp_tp2.txt");

#[test]
fn mlp_round_trips() {
    let p = parse(MLP).unwrap();
    assert_eq!(print(&p), MLP);
    assert_eq!(parse(&print(&p)).unwrap(), p);
}
