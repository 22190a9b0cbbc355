//! Kernels whose outputs lie where inputs do.

use super::isa::Isa;
use super::jit::Jit;
use super::pool::Pool;
use crate::tile::Nest;
use dcc_program::kernel::*;
use dcc_program::mesh::Extent;
use dcc_program::types::{DType, Reduce};

const COLUMNS: usize = 300;
const ROWS: usize = 7;

fn below(state: &mut u64, n: usize) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize % n
}

fn extents(rank: u8) -> Vec<Extent> {
    let of = |size: usize| Extent { offset: 0, valid: size as u64, block: size as u64 };
    if rank == 2 { vec![of(ROWS), of(COLUMNS)] } else { vec![of(COLUMNS)] }
}

/// A kernel of `inputs` matrices and a vector: some of its values are variables, some of which are stored at the end, as are other values;
/// where it works in rows, some are sums of rows. One in three is nothing but arithmetic.
fn random_kernel(state: &mut u64, inputs: usize, in_rows: bool) -> Kernel {
    let mut kernel = Kernel::default();
    let (i, j) = (kernel.dim("i"), kernel.dim("j"));
    kernel.outer = if in_rows { vec![i] } else { vec![i, j] };
    let over = if in_rows { vec![j] } else { vec![] };
    let load = |kernel: &mut Kernel, dims: &[DimId]| {
        let input = kernel.inputs.len() as u8;
        kernel.inputs.push(Argument { dtype: DType::F32, rank: dims.len() as u8 });
        let index = dims.iter().map(|dim| Index::Dim(*dim)).collect();
        kernel.expr(Expr::Load { input, index, outside: Outside::Never })
    };
    let mut values: Vec<ExprId> = (0..inputs).map(|_| load(&mut kernel, &[i, j])).collect();
    values.push(load(&mut kernel, &[j]));
    values.push(kernel.expr(Expr::Const { dtype: DType::F32, bits: 0.75f64.to_bits() }));
    let arithmetic = below(state, 3) == 0;
    let functions =
        if arithmetic { [UnaryOp::Neg, UnaryOp::Neg, UnaryOp::Sqrt] } else { [UnaryOp::Tanh, UnaryOp::Neg, UnaryOp::Abs] };
    let last = if arithmetic { BinaryOp::Div } else { BinaryOp::Max };
    let mut stored = vec![];
    for var in (0..2 + below(state, 5) as u32).map(VarId) {
        for _ in 0..1 + below(state, 4) {
            let [x, y] = [0, 1].map(|_| values[below(state, values.len())]);
            if below(state, 4) == 0 {
                let less = kernel.expr(Expr::Compare(CompareOp::Le, x, y));
                values.push(kernel.expr(Expr::Select(less, values[0], x)));
            }
            let op = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Mul, last][below(state, 5)];
            let value = kernel.expr(Expr::Binary(op, x, y));
            values.push(kernel.expr(Expr::Unary(functions[below(state, 3)], value)));
            values.push(value);
        }
        let mut value = values[values.len() - 1 - below(state, 3)];
        match below(state, 3) {
            0 if in_rows => {
                kernel.body.push(Stmt::Reduce { var, op: Reduce::Sum, over: over.clone(), value });
                values.push(kernel.expr(Expr::Var(var)));
                continue;
            }
            0 | 1 if !in_rows => {
                kernel.body.push(Stmt::Let { var, value });
                value = kernel.expr(Expr::Var(var));
                values.push(value);
            }
            _ => {}
        }
        if below(state, 3) > 0 {
            stored.push(value);
        }
    }
    stored.push(values[values.len() - 1]);
    for (output, value) in (0..).zip(stored) {
        kernel.outputs.push(Argument { dtype: DType::F32, rank: 2 });
        let index = vec![Index::Dim(i), Index::Dim(j)];
        kernel.body.push(Stmt::Store { output, over: over.clone(), index, value, mode: StoreMode::Assign });
    }
    kernel
}

/// The outputs of `kernel`, each in the place of an input or in one of its own; `shared` as the nest says it.
fn outputs(kernel: &Kernel, places: &[Option<u8>], shared: Option<Vec<Vec<u8>>>, isa: Isa) -> Vec<Vec<u32>> {
    let [inputs, outputs] =
        [&kernel.inputs, &kernel.outputs].map(|all| all.iter().map(|a| extents(a.rank)).collect::<Vec<_>>());
    let parameters = Nest::parameters(kernel, &inputs, &outputs).unwrap();
    let mut nest = Nest::bind(kernel, &inputs, &outputs).unwrap();
    nest.shared = shared;
    let mut given: Vec<Vec<f32>> = (0..kernel.inputs.len())
        .map(|n| (0..ROWS * COLUMNS).map(|at| ((at * (2 * n + 7)) % 129) as f32 / 64.0 - 1.0).collect())
        .collect();
    let mut own: Vec<Vec<f32>> = places.iter().map(|_| vec![0.0; ROWS * COLUMNS]).collect();
    let mut words: Vec<u64> = given.iter_mut().map(|buffer| buffer.as_mut_ptr() as u64).collect();
    for (place, own) in places.iter().zip(&mut own) {
        words.push(place.map_or(own.as_mut_ptr() as u64, |input| words[usize::from(input)]));
    }
    words.extend(parameters.iter().map(|parameter| *parameter as u64));
    let compiled = Jit::with_isa(isa).unwrap().compile(nest).unwrap();
    // SAFETY: all buffers have as many elements as the kernel's largest operand; each point reads just the elements that it writes.
    unsafe { compiled.run(&Pool::new(1), &words) };
    // Of two that are no numbers, one may become the result or the other.
    let bits = |value: &f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
    let result = |(place, own): (&Option<u8>, Vec<f32>)| {
        place.map_or(own, |input| given[usize::from(input)].clone()).iter().map(bits).collect()
    };
    places.iter().zip(own).map(result).collect()
}

/// Places of outputs: in inputs, each in another, as far as there are any.
fn random_places(state: &mut u64, kernel: &Kernel, inputs: usize) -> Vec<Option<u8>> {
    let mut free: Vec<u8> = (0..inputs as u8).collect();
    let mut place = || match below(state, 4) {
        0 => None,
        _ if free.is_empty() => None,
        _ => Some(free.remove(below(state, free.len()))),
    };
    kernel.outputs.iter().map(|_| place()).collect()
}

#[test]
fn outputs_in_place_are_the_same() {
    let (mut state, mut told, mut misled) = (5, 0, 0);
    for case in 0..400 {
        let inputs = 2 + below(&mut state, 3);
        let kernel = random_kernel(&mut state, inputs, case % 2 == 0);
        let places = random_places(&mut state, &kernel, inputs);
        let shared: Vec<Vec<u8>> = places.iter().map(|place| place.iter().copied().collect()).collect();
        for isa in Isa::available() {
            let apart = outputs(&kernel, &vec![None; places.len()], None, isa);
            assert!(outputs(&kernel, &places, None, isa) == apart, "{places:?} of {kernel:#?}");
            assert!(outputs(&kernel, &places, Some(shared.clone()), isa) == apart, "{places:?}, known, of {kernel:#?}");
            told += 1;
            // The control: kernels that are told that nothing is shared.
            misled += usize::from(outputs(&kernel, &places, Some(vec![vec![]; places.len()]), isa) != apart);
        }
    }
    assert!(told > 300 && misled > 20, "{misled} of {told} were wrong when misled");
}
