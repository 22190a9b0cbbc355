//! Elements that ONNX leaves undefined: floats cast to integers that cannot hold them. tract is given dcc's there, so that
//! what follows is compared all the same.

use super::compare::numbers;
use dcc_program::DType;
use dcc_runtime::exec::whole::Tensor;

/// Which elements of `operand`, cast to `to`, have no defined result; `None` where all have one.
pub fn undefined(operand: &Tensor, to: DType) -> Option<Vec<bool>> {
    let (least, beyond) = range(to).filter(|_| operand.dtype.is_float())?;
    let holds = |x: &f64| (least..beyond).contains(&x.trunc());
    let undefined: Vec<bool> = numbers(operand).iter().map(|x| !holds(x)).collect();
    undefined.contains(&true).then_some(undefined)
}

/// The least number of an integer type, and the first beyond its greatest; both are exact.
fn range(dtype: DType) -> Option<(f64, f64)> {
    let signed = |bits: i32| Some((-(2_f64.powi(bits - 1)), 2_f64.powi(bits - 1)));
    let unsigned = |bits: i32| Some((0.0, 2_f64.powi(bits)));
    match dtype {
        DType::I8 => signed(8),
        DType::I16 => signed(16),
        DType::I32 => signed(32),
        DType::I64 => signed(64),
        DType::U8 => unsigned(8),
        DType::U16 => unsigned(16),
        DType::U32 => unsigned(32),
        DType::U64 => unsigned(64),
        DType::Bool | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => None,
    }
}

#[test]
fn what_an_integer_cannot_hold_is_undefined() {
    let cast = |values: &[f32], to| {
        let bytes = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        undefined(&Tensor { dtype: DType::F32, shape: vec![values.len() as u64], bytes }, to)
    };
    assert_eq!(cast(&[255.9, 256.0, -0.9, -1.0], DType::U8), Some(vec![false, true, false, true]));
    assert_eq!(cast(&[127.5, 128.0, -128.9, -129.0], DType::I8), Some(vec![false, true, false, true]));
    assert_eq!(cast(&[2_147_483_520.0, 2_147_483_648.0, -2_147_483_648.0], DType::I32), Some(vec![false, true, false]));
    assert_eq!(cast(&[f32::NAN, 9.3e18, f32::NEG_INFINITY, 0.0], DType::I64), Some(vec![true, true, true, false]));
    assert_eq!((cast(&[1.0, -3.0], DType::I32), cast(&[f32::NAN], DType::Bool), cast(&[1e30], DType::F16)), (None, None, None));
}
