//! Products of plain matrices, in the terms of vendors' libraries: column-major, an operand transposed or not, batches apart by strides.

use super::product::Types;
use dcc_program::types::DType;

/// A product out = lhs . rhs (or +=) of whole matrices, one for each of a batch; strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Of the batch, m and k; of the batch, k and n; of the batch, m and n.
    pub lhs: [usize; 3],
    pub rhs: [usize; 3],
    pub out: [usize; 3],
}

/// The same as D = op(A) . op(B) of column-major matrices: D is `rows` x `columns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    pub rows: usize,
    pub columns: usize,
    pub sums: usize,
    pub batch: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub d: Matrix,
    pub operands: DType,
    pub result: DType,
    /// Adds to D.
    pub accumulate: bool,
}

/// Where a matrix lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// 0 is lhs, 1 rhs, 2 the result.
    pub operand: usize,
    pub transposed: bool,
    /// Elements from one stored column to the next, and from one matrix of the batch to the next.
    pub leading: usize,
    pub batch: usize,
}

impl Matrix {
    /// A matrix of `rows` x `columns` with those strides. `None`: no dim of it is dense.
    fn new(operand: usize, batch: usize, [rows, columns]: [usize; 2], [row, column]: [usize; 2]) -> Option<Matrix> {
        let matrix = |transposed, leading| Some(Matrix { operand, transposed, leading, batch });
        let one_row = rows == 1 && column >= 1;
        if (row == 1 || one_row) && (columns == 1 || column >= rows) {
            return matrix(false, if columns == 1 { rows } else { column });
        }
        let one_column = columns == 1 && row >= 1;
        if (column == 1 || one_column) && (rows == 1 || row >= columns) {
            return matrix(true, if rows == 1 { columns } else { row });
        }
        None
    }

    /// Rows and columns as it is stored, of a matrix that is used as `rows` x `columns`.
    pub fn stored(&self, rows: usize, columns: usize) -> [usize; 2] {
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }
}

impl Gemm {
    /// `None` where a library cannot do it: strides in no dim of a matrix are one, or the dtypes are no floats.
    pub fn new(plain: &Plain, types: &Types) -> Option<Gemm> {
        let Plain { batch, m, n, k, lhs, rhs, out } = *plain;
        let floats = types.operands.is_float() && [types.operands, DType::F32].contains(&types.result);
        if !floats || [batch, m, n, k].contains(&0) || (types.operands == DType::F64) != (types.result == DType::F64) {
            return None;
        }
        let made = |rows, columns, a, b, d| Gemm {
            rows,
            columns,
            sums: k,
            batch,
            a,
            b,
            d,
            operands: types.operands,
            result: types.result,
            accumulate: types.mode == dcc_program::kernel::StoreMode::Accumulate,
        };
        let upright = Matrix::new(2, out[0], [m, n], [out[1], out[2]]).filter(|d| !d.transposed);
        if let Some(d) = upright {
            let a = Matrix::new(0, lhs[0], [m, k], [lhs[1], lhs[2]])?;
            let b = Matrix::new(1, rhs[0], [k, n], [rhs[1], rhs[2]])?;
            return Some(made(m, n, a, b, d));
        }
        // The transpose: out^T = rhs^T . lhs^T.
        let d = Matrix::new(2, out[0], [n, m], [out[2], out[1]]).filter(|d| !d.transposed)?;
        let a = Matrix::new(1, rhs[0], [n, k], [rhs[2], rhs[1]])?;
        let b = Matrix::new(0, lhs[0], [k, m], [lhs[2], lhs[1]])?;
        Some(made(n, m, a, b, d))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dcc_program::kernel::StoreMode;

    const TYPES: Types = Types { operands: DType::BF16, result: DType::F32, mode: StoreMode::Assign };

    fn gemm(lhs: [usize; 3], rhs: [usize; 3], out: [usize; 3]) -> Option<Gemm> {
        Gemm::new(&Plain { batch: 2, m: 5, n: 7, k: 3, lhs, rhs, out }, &TYPES)
    }

    #[test]
    fn row_major_products_are_transposed_column_major_ones() {
        let found = gemm([15, 3, 1], [21, 7, 1], [35, 7, 1]).unwrap();
        assert_eq!([found.rows, found.columns, found.sums], [7, 5, 3]);
        assert_eq!(found.a, Matrix { operand: 1, transposed: false, leading: 7, batch: 21 });
        assert_eq!(found.b, Matrix { operand: 0, transposed: false, leading: 3, batch: 15 });
        assert_eq!(found.d, Matrix { operand: 2, transposed: false, leading: 7, batch: 35 });
        // The weight of a linear layer lies as n x k; a gradient's lhs as k x m; a batch may share an operand.
        assert_eq!(
            gemm([15, 3, 1], [0, 1, 3], [35, 7, 1]).unwrap().a,
            Matrix { operand: 1, transposed: true, leading: 3, batch: 0 }
        );
        assert!(gemm([15, 1, 5], [21, 7, 1], [35, 7, 1]).unwrap().b.transposed);
        let upright = gemm([15, 3, 1], [21, 7, 1], [35, 1, 5]).unwrap();
        assert_eq!([upright.rows, upright.columns], [5, 7]);
        assert!(upright.a.operand == 0 && upright.a.transposed && upright.b.transposed);
    }

    #[test]
    fn what_no_library_can_do_is_left() {
        assert_eq!(gemm([15, 6, 2], [21, 7, 1], [35, 7, 1]), None, "a stride of two");
        assert_eq!(gemm([15, 3, 1], [21, 7, 1], [35, 14, 2]), None);
        assert_eq!(gemm([15, 0, 1], [21, 7, 1], [35, 7, 1]), None, "rows that are one");
        let plain = Plain { batch: 1, m: 1, n: 7, k: 3, lhs: [0, 0, 1], rhs: [0, 7, 1], out: [0, 0, 1] };
        assert!(Gemm::new(&plain, &TYPES).is_some(), "one row");
        let ints = Types { operands: DType::I32, result: DType::I32, ..TYPES };
        assert_eq!(Gemm::new(&plain, &ints), None);
    }
}
