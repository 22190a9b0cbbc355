//! Initial values of parameters without data: a function of seed, name and global element index, so that every rank makes its
//! own slice and PyTorch can make the same bits.
//!
//! Value i of parameter NAME is scale·√3·(2u − 1) with u from philox4x32-10 under key = halves of the seed and counter = halves
//! of i div 4 and of fnv1a64(NAME), word i mod 4. It is computed in f64 and rounded once, to the dtype of the model's
//! initializer: a run in f64 starts from the same f32 values, widened.

use crate::slice::{Run, Slice};
use dcc_kernels::library::random::{Stream, uniforms};
use dcc_program::DType;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    Zeros,
    Ones,
    /// Uniform with this standard deviation.
    Std(f64),
}

/// How one parameter begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Initial<'a> {
    pub name: &'a str,
    pub seed: u64,
    pub rule: Rule,
    /// Dtype of the model's initializer, which values are rounded to.
    pub stored: DType,
}

impl Rule {
    /// `zeros`, `ones` or `std:S`.
    pub fn parse(text: &str) -> Option<Rule> {
        match text {
            "zeros" => Some(Rule::Zeros),
            "ones" => Some(Rule::Ones),
            _ => text.strip_prefix("std:")?.parse().ok().filter(|s: &f64| s.is_finite() && *s >= 0.0).map(Rule::Std),
        }
    }
}

impl Initial<'_> {
    /// Writes the values of `slice` into `local`, a buffer of the slice's local shape in `dtype`. What lies outside of the slice
    /// stays as it is.
    pub fn fill(&self, slice: &Slice, dtype: DType, local: &mut [u8]) {
        let element = dtype.bytes() as usize;
        slice.for_each_run(|run| {
            let at = run.local as usize * element;
            self.fill_run(run, dtype, &mut local[at..at + run.len as usize * element]);
        });
    }

    fn fill_run(&self, run: Run, dtype: DType, out: &mut [u8]) {
        let element = dtype.bytes() as usize;
        let write = |(value, out): (f64, &mut [u8])| write_float(round(value, self.stored), dtype, out);
        match self.rule {
            Rule::Zeros => out.chunks_exact_mut(element).for_each(|out| write((0.0, out))),
            Rule::Ones => out.chunks_exact_mut(element).for_each(|out| write((1.0, out))),
            Rule::Std(scale) => {
                let (name, factor) = (fnv1a64(self.name), scale * 3f64.sqrt());
                let stream = Stream { seed: self.seed, op: name as u32, step: (name >> 32) as u32 };
                let value = |unit: f32| factor * (2.0 * f64::from(unit) - 1.0);
                let mut units = [0f32; STRETCH];
                for (first, out) in (run.global..).step_by(STRETCH).zip(out.chunks_mut(STRETCH * element)) {
                    let units = &mut units[..out.len() / element];
                    uniforms(&stream, first, units);
                    match (self.stored, dtype, out.as_chunks_mut()) {
                        // The common case, without a choice for each value.
                        (DType::F32, DType::F32, (out, _)) => {
                            out.iter_mut().zip(units).for_each(|(out, unit)| *out = (value(*unit) as f32).to_ne_bytes());
                        }
                        _ => units.iter().map(|unit| value(*unit)).zip(out.chunks_exact_mut(element)).for_each(write),
                    }
                }
            }
        }
    }
}

/// Values made at once.
const STRETCH: usize = 1024;

/// The 64-bit FNV-1a hash of a name's UTF-8 bytes.
fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

fn round(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => half::f16::from_f64(value).to_f64(),
        DType::BF16 => half::bf16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// Integer parameters (buffers such as counters) take the integer part.
fn write_float(value: f64, dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F64 => out.copy_from_slice(&value.to_ne_bytes()),
        DType::F32 => out.copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => out.copy_from_slice(&half::f16::from_f64(value).to_ne_bytes()),
        DType::BF16 => out.copy_from_slice(&half::bf16::from_f64(value).to_ne_bytes()),
        integer => out.copy_from_slice(&(value as i64).to_ne_bytes()[..integer.bytes() as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn initial<'a>(name: &'a str, seed: u64, rule: &str) -> Initial<'a> {
        Initial { name, seed, rule: Rule::parse(rule).unwrap(), stored: DType::F32 }
    }

    fn bits(initial: &Initial, slice: &Slice) -> Vec<u32> {
        let mut out = vec![0xEE; slice.local_elements() as usize * 4];
        initial.fill(slice, DType::F32, &mut out);
        out.as_chunks::<4>().0.iter().map(|&b| u32::from_ne_bytes(b)).collect()
    }

    /// Numbers of `samples/init.py`, which gives PyTorch its values.
    #[test]
    fn values_are_those_of_the_python_script() {
        let expected =
            [0x3d07a14a, 0xbc43d274, 0xbced2621, 0x3c2f4e1d, 0x3cbe5683, 0x3cd5210c, 0x3bd68e1a, 0x3c1a6e64, 0x3cc50034];
        assert_eq!(bits(&initial("wte", 7, "std:0.02"), &Slice::whole(&[9])), expected);
        let wide_seed = initial("a", (1 << 40) + 3, "std:1.0");
        let expected = [0xbfa78603, 0xbf9d1c4f, 0x3e016a4a, 0x3f5c6743, 0x3fc4e32c, 0xbe8c946b];
        assert_eq!(bits(&wide_seed, &Slice::whole(&[2, 3])), expected);
    }

    #[test]
    fn a_run_in_f64_starts_from_the_stored_dtype_or_exactly() {
        let mut out = [0; 72];
        let mut value = initial("wte", 7, "std:0.02");
        value.fill(&Slice::whole(&[9]), DType::F64, &mut out);
        assert_eq!(f64::from_ne_bytes(out[..8].try_into().unwrap()), f64::from(f32::from_bits(0x3d07a14a)));
        value.stored = DType::F64;
        value.fill(&Slice::whole(&[9]), DType::F64, &mut out);
        assert_eq!(u64::from_ne_bytes(out[..8].try_into().unwrap()), 0x3fa0f42937ac5be2);
    }

    #[test]
    fn fnv_gives_the_known_answers() {
        assert_eq!(fnv1a64(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a64("foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn a_slice_holds_the_values_of_the_whole() {
        let value = initial("h.0.w", 11, "std:0.5");
        let whole = bits(&value, &Slice::whole(&[6, 7]));
        let slice = Slice { global: vec![6, 7], start: vec![2, 4], extent: vec![3, 3], local: vec![3, 4] };
        let local = bits(&value, &slice);
        for (row, column) in (0..3).flat_map(|row| (0..3).map(move |column| (row, column))) {
            assert_eq!(local[row * 4 + column], whole[(row + 2) * 7 + column + 4]);
        }
        assert_eq!(local[3], 0xEEEE_EEEE, "the unspecified tail stays");
    }

    #[test]
    fn rules_parse() {
        for bad in ["", "one", "std:", "std:x", "std:-1", "std:inf"] {
            assert_eq!(Rule::parse(bad), None, "{bad}");
        }
        assert_eq!(bits(&initial("g", 1, "ones"), &Slice::whole(&[2])), [1f32.to_bits(); 2]);
    }
}
