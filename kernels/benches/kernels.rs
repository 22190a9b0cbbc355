//! Single kernels on one thread, by Criterion: products, attention, convolutions (elements per second are multiply-adds), and generated
//! loops (bytes read and written). `cargo bench -p dcc-kernels`; a word filters by name. Whole steps: `dcc bench step`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dcc_kernels::library::attention::{Attention, Inputs, Mask, Shape, Strides};
use dcc_kernels::library::convolution::{Convolution, Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use dcc_kernels::library::half::Half;
use dcc_kernels::library::matmul::{DotGeneral, Factor};
use dcc_kernels::{Jit, Nest, Pool};
use dcc_program::kernel::{Argument, BinaryOp, DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode, UnaryOp, VarId};
use dcc_program::mesh::Extent;
use dcc_program::types::{DType, Reduce};

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37).sin()).collect()
}

/// Tokens, outputs and inputs of a product; the weight lies as PyTorch has it.
const PRODUCTS: [[usize; 3]; 7] =
    [[512, 3072, 768], [1024, 256, 256], [128, 1024, 784], [8, 1024, 1024], [7, 1200, 300], [4, 1024, 256], [1, 1024, 256]];

fn products(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("product");
    let pool = Pool::new(1);
    for [m, n, k] in PRODUCTS {
        let factors = [
            Factor { size: m, lhs: Some(k), rhs: None, out: Some(n) },
            Factor { size: n, lhs: None, rhs: Some(k), out: Some(1) },
            Factor { size: k, lhs: Some(1), rhs: Some(1), out: None },
        ];
        let (lhs, rhs, mut out) = (numbers(m * k), numbers(n * k), vec![0.0; m * n]);
        group.throughput(Throughput::Elements((m * n * k) as u64));
        let plan = DotGeneral::<f32>::new(&factors);
        group.bench_function(format!("f32/{m}x{n}x{k}"), |b| b.iter(|| plan.run(&pool, 1.0, 0.0, &lhs, &rhs, &mut out)));
        let Some(plan) = DotGeneral::of_halves(&factors, DType::BF16) else { continue };
        let half = Half::of(DType::BF16).expect("a half type");
        let narrow = |wide: &[f32]| {
            let mut halves = vec![0; wide.len()];
            half.narrow(&pool, wide, &mut halves);
            halves
        };
        let (lhs, rhs) = (narrow(&lhs), narrow(&rhs));
        group.bench_function(format!("bf16/{m}x{n}x{k}"), |b| b.iter(|| plan.run(&pool, 1.0, 0.0, &lhs, &rhs, &mut out)));
    }
}

/// Causal attention of GPTs, laid out as `[batch, position, head, channel]`.
fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    let pool = Pool::new(1);
    for (batch, heads, positions, channels) in [(2, 12, 256, 64), (4, 8, 128, 32), (1, 8, 1024, 128)] {
        let width = heads * channels;
        let strides = Strides { batch: positions * width, head: channels, group: 0, position: width, channel: 1 };
        let shape = Shape {
            batch,
            heads,
            groups: 1,
            queries: positions,
            keys: positions,
            channels,
            values: channels,
            scale: 1.0 / (channels as f64).sqrt(),
            causal: Some(0),
            q: strides,
            k: strides,
            v: strides,
            o: strides,
            lse: Strides { batch: heads * positions, head: positions, group: 0, position: 1, channel: 0 },
            mask: Strides::default(),
        };
        let plan = Attention::<f32>::new(&shape);
        let count = batch * positions * width;
        let (q, k, v) = (numbers(count), numbers(count + 1), numbers(count + 2));
        let (mut o, mut lse) = (vec![0.0; count], vec![0.0; batch * heads * positions]);
        let mut workspace = vec![0.0; plan.forward_workspace()];
        group.throughput(Throughput::Elements(plan.flops() as u64 / 2));
        group.bench_function(format!("forward/{batch}x{heads}x{positions}x{channels}"), |b| {
            let inputs = Inputs { q: &q, k: &k, v: &v, mask: Mask::None };
            b.iter(|| plan.forward(&pool, inputs, &mut o, &mut lse, &mut workspace));
        });
    }
}

/// `n` images of `c` channels to `o`, in groups, 3 × 3, channels last.
fn convolution(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("convolution");
    let pool = Pool::new(1);
    for (n, g, c, o, size) in [(16, 1, 64, 64, 16), (16, 1, 256, 256, 4), (8, 1, 3, 32, 64), (8, 96, 1, 1, 28)] {
        let (from, to) = (g * c, g * o);
        let plain = [
            Plain { size: n, strides: [Some(size * size * from), Some(size * size * to), None] },
            Plain { size: g, strides: [Some(c), Some(o), Some(o * 9 * c)] },
            Plain { size: c, strides: [Some(1), None, Some(1)] },
            Plain { size: o, strides: [None, Some(1), Some(9 * c)] },
        ];
        let along = |image: usize, output: usize, tap: usize| Spatial {
            sizes: [size, size, 3],
            strides: [image, output, tap],
            stride: 1,
            dilation: 1,
            pad: 1,
        };
        let spatial = [along(size * from, size * to, 3 * c), along(from, to, c)];
        let [image, output, kernel] = [n * size * size * from, n * size * size * to, to * 9 * c].map(numbers);
        let tensors = [&image, &output, &kernel];
        for (name, result, operands) in
            [("forward", OUTPUT, [IMAGE, KERNEL]), ("image", IMAGE, [OUTPUT, KERNEL]), ("kernel", KERNEL, [IMAGE, OUTPUT])]
        {
            let plan = Convolution::<f32>::new(Form { result, operands }, &plain, &spatial);
            let (mut out, mut workspace) = (tensors[result].clone(), vec![0.0; plan.workspace()]);
            let [a, b] = operands.map(|operand| &tensors[operand][..]);
            group.throughput(Throughput::Elements(plan.flops() as u64 / 2));
            group.bench_function(format!("{name}/{n}x{g}x{c}x{o}x{size}"), |bench| {
                bench.iter(|| plan.run(&pool, false, a, b, &mut out, &mut workspace));
            });
        }
    }
}

/// A kernel over rows `i` of columns `j`, of operands with both dims.
struct Rows {
    kernel: Kernel,
}

impl Rows {
    fn new(operands: usize) -> (Rows, Vec<ExprId>) {
        let mut kernel = Kernel::default();
        let (i, j) = (kernel.dim("i"), kernel.dim("j"));
        kernel.outer = vec![i];
        kernel.inputs = vec![Argument { dtype: DType::F32, rank: 2 }; operands];
        kernel.outputs = vec![Argument { dtype: DType::F32, rank: 2 }];
        let index = vec![Index::Dim(i), Index::Dim(j)];
        let load = |input| Expr::Load { input, index: index.clone(), outside: Outside::Never };
        let loads = (0..operands as u8).map(|input| kernel.expr(load(input))).collect();
        (Rows { kernel }, loads)
    }

    fn reduce(&mut self, op: Reduce, value: ExprId) -> ExprId {
        let var = VarId(self.kernel.body.len() as u32);
        self.kernel.body.push(Stmt::Reduce { var, op, over: vec![DimId(1)], value });
        self.kernel.expr(Expr::Var(var))
    }

    fn unary(&mut self, op: UnaryOp, x: ExprId) -> ExprId {
        self.kernel.expr(Expr::Unary(op, x))
    }

    fn binary(&mut self, op: BinaryOp, x: ExprId, y: ExprId) -> ExprId {
        self.kernel.expr(Expr::Binary(op, x, y))
    }

    fn store(mut self, value: ExprId) -> Kernel {
        let index = vec![Index::Dim(DimId(0)), Index::Dim(DimId(1))];
        self.kernel.body.push(Stmt::Store { output: 0, over: vec![DimId(1)], index, value, mode: StoreMode::Assign });
        self.kernel
    }
}

fn softmax() -> Kernel {
    let (mut rows, x) = Rows::new(1);
    let most = rows.reduce(Reduce::Max, x[0]);
    let below = rows.binary(BinaryOp::Sub, x[0], most);
    let power = rows.unary(UnaryOp::Exp, below);
    let sum = rows.reduce(Reduce::Sum, power);
    let share = rows.binary(BinaryOp::Div, power, sum);
    rows.store(share)
}

fn bias_gelu() -> Kernel {
    let (mut rows, x) = Rows::new(2);
    let sum = rows.binary(BinaryOp::Add, x[0], x[1]);
    let y = rows.unary(UnaryOp::Gelu, sum);
    rows.store(y)
}

fn generated(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("generated");
    let pool = Pool::new(1);
    let whole = |size: usize| Extent { offset: 0, valid: size as u64, block: size as u64 };
    for (name, kernel) in [("softmax", softmax()), ("bias_gelu", bias_gelu())] {
        for (rows, columns) in [(512, 768), (4096, 256), (64, 50257)] {
            let extents = vec![whole(rows), whole(columns)];
            let (inputs, outputs) = (vec![extents.clone(); kernel.inputs.len()], vec![extents]);
            let nest = Nest::bind(&kernel, &inputs, &outputs).expect("a kernel");
            let parameters = Nest::parameters(&kernel, &inputs, &outputs).expect("its parameters");
            let code = Jit::new().expect("a compiler").compile(nest).expect("code");
            let bytes: Vec<u8> = numbers(rows * columns).into_iter().flat_map(f32::to_le_bytes).collect();
            let mut out = bytes.clone();
            group.throughput(Throughput::Bytes((bytes.len() * (inputs.len() + 1)) as u64));
            group.bench_function(format!("{name}/{rows}x{columns}"), |b| {
                let inputs = vec![&bytes[..]; inputs.len()];
                b.iter(|| code.run_slices(&pool, &parameters, &inputs, &mut [&mut out[..]]));
            });
        }
    }
}

criterion_group! {
    name = kernels;
    config = Criterion::default().sample_size(20).without_plots();
    targets = products, attention, convolution, generated
}
criterion_main!(kernels);
