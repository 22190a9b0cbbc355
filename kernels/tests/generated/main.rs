//! Generated kernels against the reference evaluator, on whole and on uneven shards.

mod named;
mod random;
mod registers;
mod shifts;
mod sums;

use dcc_kernels::library::half::Half;
use dcc_kernels::reference::{self, Scalar};
use dcc_kernels::tile::{Plan, Typing};
use dcc_kernels::{Isa, Jit, Nest, Pool};
use dcc_program::kernel::*;
use dcc_program::mesh::Extent;
use dcc_program::types::{DType, Reduce};

/// Builds kernels tersely.
#[derive(Default)]
struct Build {
    kernel: Kernel,
    vars: u32,
}

impl Build {
    fn new(dims: &[&str]) -> Build {
        let mut build = Build::default();
        dims.iter().for_each(|name| _ = build.kernel.dim(*name));
        build
    }
    fn outer(mut self, dims: &[u8]) -> Build {
        self.kernel.outer = dims.iter().map(|d| DimId(*d)).collect();
        self
    }
    fn input(&mut self, dtype: DType, dims: &[u8]) -> ExprId {
        let input = self.kernel.inputs.len() as u8;
        self.kernel.inputs.push(Argument { dtype, rank: dims.len() as u8 });
        let index = dims.iter().map(|d| Index::Dim(DimId(*d))).collect();
        self.kernel.expr(Expr::Load { input, index, outside: Outside::Never })
    }
    fn indexed(&mut self, dtype: DType, index: Vec<Index>, outside: Outside) -> ExprId {
        let input = self.kernel.inputs.len() as u8;
        self.kernel.inputs.push(Argument { dtype, rank: index.len() as u8 });
        self.kernel.expr(Expr::Load { input, index, outside })
    }
    fn float(&mut self, dtype: DType, x: f64) -> ExprId {
        self.kernel.expr(Expr::Const { dtype, bits: x.to_bits() })
    }
    fn int(&mut self, x: i64) -> ExprId {
        self.kernel.expr(Expr::Const { dtype: DType::I64, bits: x as u64 })
    }
    fn un(&mut self, op: UnaryOp, x: ExprId) -> ExprId {
        self.kernel.expr(Expr::Unary(op, x))
    }
    fn bin(&mut self, op: BinaryOp, x: ExprId, y: ExprId) -> ExprId {
        self.kernel.expr(Expr::Binary(op, x, y))
    }
    fn add(&mut self, x: ExprId, y: ExprId) -> ExprId {
        self.bin(BinaryOp::Add, x, y)
    }
    fn sub(&mut self, x: ExprId, y: ExprId) -> ExprId {
        self.bin(BinaryOp::Sub, x, y)
    }
    fn mul(&mut self, x: ExprId, y: ExprId) -> ExprId {
        self.bin(BinaryOp::Mul, x, y)
    }
    fn reduce(&mut self, op: Reduce, over: &[u8], value: ExprId) -> ExprId {
        let var = VarId(self.vars);
        self.vars += 1;
        let over = over.iter().map(|d| DimId(*d)).collect();
        self.kernel.body.push(Stmt::Reduce { var, op, over, value });
        self.kernel.expr(Expr::Var(var))
    }
    fn bind(&mut self, value: ExprId) -> ExprId {
        let var = VarId(self.vars);
        self.vars += 1;
        self.kernel.body.push(Stmt::Let { var, value });
        self.kernel.expr(Expr::Var(var))
    }
    fn store(&mut self, dtype: DType, over: &[u8], dims: &[u8], value: ExprId) {
        self.store_as(dtype, over, dims, value, StoreMode::Assign);
    }
    fn store_as(&mut self, dtype: DType, over: &[u8], dims: &[u8], value: ExprId, mode: StoreMode) {
        let output = self.kernel.outputs.len() as u8;
        self.kernel.outputs.push(Argument { dtype, rank: dims.len() as u8 });
        let index = dims.iter().map(|d| Index::Dim(DimId(*d))).collect();
        let over = over.iter().map(|d| DimId(*d)).collect();
        self.kernel.body.push(Stmt::Store { output, over, index, value, mode });
    }
}

/// Whether tiles of the kernel have two dims.
fn is_paired(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>]) -> bool {
    let nest = Nest::bind(kernel, inputs, outputs).unwrap().simplified();
    Plan::new(&nest, &Typing::new(&nest.kernel), 4096, 2).behind.is_some()
}

fn whole(size: u64) -> Extent {
    Extent { offset: 0, valid: size, block: size }
}

/// A generator of small pseudo-random numbers.
struct Random(u64);
impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
    fn scalar(&mut self, dtype: DType) -> Scalar {
        match dtype {
            DType::Bool => Scalar::Int(self.below(2) as i64),
            // Exact in every float type.
            d if d.is_float() => Scalar::Float((self.below(257) as f64 - 128.0) / 64.0),
            _ => Scalar::Int(self.below(11) as i64),
        }
    }
}

fn bytes(dtype: DType, values: &[Scalar]) -> Vec<u8> {
    if let Some(half) = Half::of(dtype) {
        let single = |value: &Scalar| if let Scalar::Float(x) = value { *x as f32 } else { panic!("{value:?}") };
        let (wide, mut halves) = (values.iter().map(single).collect::<Vec<f32>>(), vec![0; values.len()]);
        half.narrow(&Pool::new(1), &wide, &mut halves);
        return halves.into_iter().flat_map(u16::to_le_bytes).collect();
    }
    let mut raw = vec![];
    for value in values {
        match (dtype, *value) {
            (DType::F32, Scalar::Float(x)) => raw.extend((x as f32).to_le_bytes()),
            (DType::F64, Scalar::Float(x)) => raw.extend(x.to_le_bytes()),
            (_, Scalar::Int(x)) => raw.extend(&x.to_le_bytes()[..dtype.bytes() as usize]),
            other => panic!("{other:?}"),
        }
    }
    raw
}

fn scalars(dtype: DType, raw: &[u8]) -> Vec<Scalar> {
    let size = dtype.bytes() as usize;
    if let Some(half) = Half::of(dtype) {
        let halves: Vec<u16> = raw.chunks_exact(size).map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect();
        let mut wide = vec![0.0; halves.len()];
        half.widen(&Pool::new(1), &halves, &mut wide);
        return wide.into_iter().map(|x| Scalar::Float(x.into())).collect();
    }
    raw.chunks_exact(size)
        .map(|b| match dtype {
            DType::F32 => Scalar::Float(f32::from_le_bytes(b.try_into().unwrap()).into()),
            DType::F64 => Scalar::Float(f64::from_le_bytes(b.try_into().unwrap())),
            DType::I32 => Scalar::Int(i32::from_le_bytes(b.try_into().unwrap()).into()),
            DType::I64 => Scalar::Int(i64::from_le_bytes(b.try_into().unwrap())),
            _ => Scalar::Int(b[0].into()),
        })
        .collect()
}

fn compare(got: &[Scalar], expected: &[Scalar], tolerance: f64, what: &str) {
    for (i, (got, want)) in got.iter().zip(expected).enumerate() {
        let fine = match (*got, *want) {
            (Scalar::Float(x), Scalar::Float(y)) => {
                (x - y).abs() <= tolerance * (1.0 + y.abs()) || x == y || (x.is_nan() && y.is_nan())
            }
            (x, y) => x == y,
        };
        assert!(fine, "{i}: {got:?}, expected {want:?}, in {what}");
    }
}

/// Runs `kernel` by JIT and by reference and compares; every instruction set and 1 and 3 threads must agree in all bits.
fn check(kernel: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>], tolerance: f64) {
    check_as(kernel, kernel, inputs, outputs, tolerance);
}

/// Runs `kernel` by JIT, `meant` by reference.
fn check_as(kernel: &Kernel, meant: &Kernel, inputs: &[Vec<Extent>], outputs: &[Vec<Extent>], tolerance: f64) {
    let [nest, meant] = [kernel, meant].map(|kernel| Nest::bind(kernel, inputs, outputs).unwrap());
    let parameters = Nest::parameters(kernel, inputs, outputs).unwrap();
    let mut random = Random(7);
    let size = |dims: &Vec<Extent>| dims.iter().map(|e| e.block as usize).product::<usize>();
    let given: Vec<Vec<Scalar>> =
        kernel.inputs.iter().zip(inputs).map(|(a, dims)| (0..size(dims)).map(|_| random.scalar(a.dtype)).collect()).collect();
    let preset = |dtype: DType| if dtype.is_float() { Scalar::Float(3.0) } else { Scalar::Int(1) };
    let mut expected: Vec<Vec<Scalar>> =
        kernel.outputs.iter().zip(outputs).map(|(a, dims)| vec![preset(a.dtype); size(dims)]).collect();
    let start = expected.clone();
    reference::run(&meant, &parameters, &given, &mut expected);
    let mut first: Option<Vec<Vec<u8>>> = None;
    for isa in Isa::available() {
        for threads in [1, 3] {
            let mut nest = nest.clone();
            // Whether or not it is known that no operands share memory.
            nest.shared = (threads == 3).then(|| vec![vec![]; outputs.len()]);
            let compiled = Jit::with_isa(isa).unwrap().for_threads(threads).compile(nest).unwrap();
            let raw: Vec<Vec<u8>> = kernel.inputs.iter().zip(&given).map(|(a, v)| bytes(a.dtype, v)).collect();
            let mut copies: Vec<Vec<u8>> = kernel.outputs.iter().zip(&start).map(|(a, v)| bytes(a.dtype, v)).collect();
            let refs: Vec<&[u8]> = raw.iter().map(|r| &r[..]).collect();
            let mut slices: Vec<&mut [u8]> = copies.iter_mut().map(|c| &mut c[..]).collect();
            compiled.run_slices(&Pool::new(threads), &parameters, &refs, &mut slices);
            for (o, argument) in kernel.outputs.iter().enumerate() {
                compare(
                    &scalars(argument.dtype, &copies[o]),
                    &expected[o],
                    tolerance,
                    &format!("{isa:?} output {o} of {kernel:#?}"),
                );
            }
            assert!(first.get_or_insert_with(|| copies.clone()) == &copies, "{isa:?} with {threads} threads differs");
        }
    }
}

const F: DType = DType::F32;
