//! Operands read at a distance from the loop's points: slices, pads and their like, in tiles of two dims where rows are short.

use super::random::{dims_in, random_value};
use super::*;

const WIDTHS: [u64; 10] = [2, 3, 7, 16, 24, 32, 33, 64, 80, 130];

/// `dim + offset`.
fn shifted(dim: u8, offset: i64) -> Index {
    Index::Affine { terms: vec![(DimId(dim), 1)], offset }
}

/// The values of loads, in the type that all is computed in, and the operands' extents.
struct Operands {
    float: DType,
    /// Samples, rows, columns.
    sizes: [u64; 3],
    values: Vec<ExprId>,
    extents: Vec<Vec<Extent>>,
}

impl Operands {
    fn add(&mut self, b: &mut Build, dtype: DType, index: Vec<Index>, outside: Outside, sizes: &[u64]) {
        let loaded = b.indexed(dtype, index, outside);
        self.values.push(if dtype == self.float { loaded } else { b.kernel.expr(Expr::Cast(self.float, loaded)) });
        self.extents.push(sizes.iter().map(|size| whole(*size)).collect());
    }

    fn random(&mut self, b: &mut Build, random: &mut Random) {
        let [n, r, c] = self.sizes;
        let plain = |d: u8| Index::Dim(DimId(d));
        let dtype = [self.float, self.float, DType::BF16][random.below(3)];
        let apart = random.below(c as usize + 3) as u64;
        match random.below(8) {
            // A part of wider rows.
            0 => {
                let index = vec![plain(0), plain(1), shifted(2, apart as i64)];
                self.add(b, dtype, index, Outside::Never, &[n, r, c + apart + random.below(3) as u64]);
            }
            // Rows that begin and end anywhere.
            1 | 2 => {
                let offset = random.below(2 * c as usize + 5) as i64 - c as i64 - 2;
                let index = vec![plain(0), plain(1), shifted(2, offset)];
                self.add(b, dtype, index, Outside::Zero, &[n, r, 1 + random.below(2 * c as usize) as u64]);
            }
            3 => self.add(b, dtype, vec![plain(1), plain(0), plain(2)], Outside::Never, &[r, n, c]),
            4 => {
                let index = vec![plain(1), shifted(2, -(apart as i64))];
                self.add(b, dtype, index, Outside::Zero, &[r, c]);
            }
            // Samples outside, too.
            5 => {
                let index = vec![shifted(0, 1 - random.below(3) as i64), plain(1), shifted(2, apart as i64 - 2)];
                self.add(b, dtype, index, Outside::Zero, &[n, r, c]);
            }
            6 => {
                let sample = b.indexed(DType::I64, vec![plain(0)], Outside::Never);
                self.extents.push(vec![whole(n)]);
                let index = vec![Index::Expr(sample), plain(1), shifted(2, 1 - random.below(3) as i64)];
                self.add(b, dtype, index, Outside::Zero, &[7, r, c]);
            }
            _ => {
                let index = vec![shifted(2, -(apart as i64) / 2)];
                self.add(b, dtype, index, Outside::Zero, &[c]);
            }
        }
    }
}

#[test]
fn random_shifts() {
    let (mut random, mut paired) = (Random(41), 0);
    for case in 0..240 {
        let float = [F, DType::F64][case % 2];
        let sizes = [[1, 2, 5, 17][random.below(4)], [1, 2, 9, 40][random.below(4)], WIDTHS[random.below(WIDTHS.len())]];
        let mut b = Build::new(&["n", "r", "c"]).outer(&[0, 1, 2]);
        let whole_input = b.input(float, &[0, 1, 2]);
        let all = sizes.iter().map(|size| whole(*size)).collect::<Vec<Extent>>();
        let mut operands = Operands { float, sizes, values: vec![whole_input], extents: vec![all.clone()] };
        for _ in 0..1 + random.below(3) {
            operands.random(&mut b, &mut random);
        }
        // A row is cut where a position says so.
        let (position, at) = (b.kernel.expr(Expr::Position(DimId(2))), b.int(random.below(sizes[2] as usize + 1) as i64));
        let left = b.kernel.expr(Expr::Compare(CompareOp::ALL[random.below(6)], position, at));
        let [x, y] = [0; 2].map(|_| operands.values[random.below(operands.values.len())]);
        operands.values.push(b.kernel.expr(Expr::Select(left, x, y)));
        if random.below(3) == 0 {
            let loaded = operands.values[1];
            let mode = [StoreMode::Assign, StoreMode::Accumulate][random.below(2)];
            b.store_as(float, &[], &[0, 1, 2], loaded, mode);
        }
        let scalar = b.float(float, 0.75);
        let value = random_value(&mut random, &mut b, &operands.values, &[scalar], Some(float));
        b.store(float, &[], &[0, 1, 2], value);
        let outputs = vec![all; dims_in(&b.kernel).len()];
        check(&b.kernel, &operands.extents, &outputs, if float == F { 2e-4 } else { 1e-11 });
        paired += usize::from(is_paired(&b.kernel, &operands.extents, &outputs));
    }
    assert!(paired > 100, "{paired}");
}

/// Half of each row from `right`, turned round, the rest from `left`: x · cos + rotated · sin, by rows of positions.
fn rotary(by_head: bool, cut: i64, shift: i64) -> Kernel {
    let mut b = Build::new(&["n", "r", "h", "c"]).outer(&[0, 1, 2, 3]);
    let rows = |last: Index| [0, 1, 2].map(|d| Index::Dim(DimId(d))).into_iter().chain([last]).collect::<Vec<Index>>();
    let of = if by_head { 2 } else { 1 };
    let (x, cos) = (b.input(F, &[0, 1, 2, 3]), b.input(F, &[of, 3]));
    let right = b.indexed(F, rows(shifted(3, 0)), Outside::Zero);
    let left = b.indexed(F, rows(shifted(3, -shift)), Outside::Zero);
    let sin = b.input(F, &[of, 3]);
    let (position, at) = (b.kernel.expr(Expr::Position(DimId(3))), b.int(cut));
    let first = b.kernel.expr(Expr::Compare(CompareOp::Lt, position, at));
    let turned = b.un(UnaryOp::Neg, right);
    let rotated = b.kernel.expr(Expr::Select(first, turned, left));
    let (kept, moved) = (b.mul(x, cos), b.mul(rotated, sin));
    let y = b.add(kept, moved);
    b.store(F, &[], &[0, 1, 2, 3], y);
    b.kernel
}

fn rotary_operands(by_head: bool, [n, r, h, c]: [u64; 4]) -> ([Vec<Extent>; 5], Vec<Extent>) {
    let extents = |sizes: &[u64]| sizes.iter().map(|size| whole(*size)).collect::<Vec<Extent>>();
    let (x, half, angles) = (extents(&[n, r, h, c]), extents(&[n, r, h, c / 2]), extents(&[if by_head { h } else { r }, c]));
    ([x.clone(), angles.clone(), half.clone(), half, angles], x)
}

#[test]
fn rotary_embeddings() {
    for sizes in [[2, 5, 8, 32], [1, 3, 4, 16], [2, 7, 3, 80], [1, 1, 9, 24], [3, 40, 2, 64], [2, 3, 5, 256]] {
        for by_head in [false, true] {
            let half = sizes[3] as i64 / 2;
            let (inputs, output) = rotary_operands(by_head, sizes);
            check(&rotary(by_head, half, half), &inputs, std::slice::from_ref(&output), 1e-6);
            assert!(sizes[3] > 128 || is_paired(&rotary(by_head, half, half), &inputs, &[output]), "{sizes:?}");
        }
    }
}

/// The control: a row shifted by one place too many is seen.
#[test]
#[should_panic(expected = "expected Float")]
fn control_of_shifts() {
    let (inputs, output) = rotary_operands(false, [2, 5, 8, 32]);
    check_as(&rotary(false, 16, 17), &rotary(false, 16, 16), &inputs, &[output], 1e-6);
}

/// The control: a row cut one place too early is seen.
#[test]
#[should_panic(expected = "expected Float")]
fn control_of_cuts() {
    let (inputs, output) = rotary_operands(true, [2, 5, 8, 32]);
    check_as(&rotary(true, 15, 16), &rotary(true, 16, 16), &inputs, &[output], 1e-6);
}

/// Parts of rows and rows in another order, copied and turned round.
#[test]
fn slices_of_short_rows() {
    for (width, from, whole_width) in [(16, 16, 32), (3, 0, 5), (24, 1, 25), (80, 7, 90), (2, 3, 9), (100, 28, 128)] {
        for negative in [false, true] {
            let mut b = Build::new(&["n", "r", "c"]).outer(&[0, 1, 2]);
            let rows = vec![Index::Dim(DimId(0)), Index::Dim(DimId(1)), shifted(2, from)];
            let x = b.indexed(F, rows, Outside::Never);
            let y = b.input(F, &[1, 0, 2]);
            let [x, y] = if negative { [x, y].map(|x| b.un(UnaryOp::Neg, x)) } else { [x, y] };
            b.store(F, &[], &[0, 1, 2], x);
            b.store(F, &[], &[0, 1, 2], y);
            let [n, r, c] = [3, 21, width].map(whole);
            let (inputs, outputs) = ([vec![n, r, whole(whole_width)], vec![r, n, c]], vec![vec![n, r, c]; 2]);
            check(&b.kernel, &inputs, &outputs, 0.0);
            assert!(is_paired(&b.kernel, &inputs, &outputs), "{width}");
        }
    }
}
