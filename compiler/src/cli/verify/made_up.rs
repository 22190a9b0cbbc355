//! Inputs that are made up: the same for every plan and every run.

use dcc_program::{DType, philox};
use dcc_runtime::data::Convert;
use dcc_runtime::exec::whole::Tensor;

/// An input's values for a seed and a step: floats in [-1, 1), integers below `below`, which is 2 where nothing bounds them.
pub fn made_up(name: &str, dtype: DType, shape: &[u64], below: Option<u64>, (seed, step): (i64, i64)) -> Tensor {
    let hash = u32::from_le_bytes(*blake3::hash(name.as_bytes()).as_bytes().first_chunk().expect("32 bytes"));
    let random = |i: u64| f64::from(philox::uniform(hash, seed, step, i));
    let count: u64 = shape.iter().product();
    let mut bytes = vec![0; (count * dtype.bytes()) as usize];
    match dtype.is_float() {
        true => {
            let values: Vec<u8> = (0..count).flat_map(|i| f64::from(2.0 * random(i) as f32 - 1.0).to_le_bytes()).collect();
            Convert::new(DType::F64, dtype).run(&values, &mut bytes);
        }
        false => {
            let classes = below.unwrap_or(2) as f64;
            let values: Vec<u8> = (0..count).flat_map(|i| ((random(i) * classes) as i64).to_le_bytes()).collect();
            Convert::new(DType::I64, dtype).run(&values, &mut bytes);
        }
    }
    Tensor { dtype, shape: shape.to_vec(), bytes }
}
