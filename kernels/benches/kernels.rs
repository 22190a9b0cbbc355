//! Speed of the library kernels and of generated ones on the shapes that decide whole steps, by Criterion: elements per second are
//! multiplications and additions. `cargo bench -p dcc-kernels`; a word filters by name, `DCC_BENCH_THREADS` sets the threads (1).

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dcc_kernels::library::attention::{Attention, Gradient, Gradients, Inputs, Mask, Shape, Strides};
use dcc_kernels::library::convolution::{Convolution, Form, IMAGE, KERNEL, OUTPUT, Plain, Spatial};
use dcc_kernels::library::half::Half;
use dcc_kernels::library::matmul::{self, DotGeneral};
use dcc_kernels::library::pool::{Axis, MaxPool};
use dcc_kernels::library::scatter::{Factor, Indexed, Indices, ScatterAdd};
use dcc_kernels::{Jit, Nest, Pool};
use dcc_program::kernel::{Argument, BinaryOp, DimId, Expr, ExprId, Index, Kernel, Outside, Stmt, StoreMode, UnaryOp, VarId};
use dcc_program::mesh::Extent;
use dcc_program::types::{DType, Reduce};
use std::cell::RefCell;

fn all(criterion: &mut Criterion) {
    let threads = std::env::var("DCC_BENCH_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let bench = Bench { criterion: RefCell::new(criterion), pool: Pool::new(threads) };
    bench.matmul();
    bench.halves();
    bench.convolution();
    bench.depthwise();
    bench.pooling();
    bench.scatter();
    bench.attention();
    bench.generated();
}

criterion_group! {
    name = kernels;
    config = Criterion::default().sample_size(20).without_plots();
    targets = all
}
criterion_main!(kernels);

struct Bench<'a> {
    criterion: RefCell<&'a mut Criterion>,
    pool: Pool,
}

impl Bench<'_> {
    fn time(&self, name: &str, work: Throughput, mut body: impl FnMut(&Pool)) {
        let mut criterion = self.criterion.borrow_mut();
        let (kind, rest) = name.split_once(' ').unwrap_or((name, ""));
        let mut group = criterion.benchmark_group(kind);
        group.throughput(work).bench_function(rest, |b| b.iter(|| body(&self.pool)));
    }

    fn matmul(&self) {
        let shapes = [
            (512, 512, 512, "NN"),
            (1024, 768, 768, "NT"),
            (1024, 768, 768, "TN"),
            (1024, 3072, 768, "NN"),
            (1024, 768, 3072, "NT"),
            (64, 4096, 4096, "NT"),
            (64, 4096, 4096, "NN"),
            (256, 50257, 768, "NT"),
            (128, 10, 1024, "NT"),
            (8, 1024, 1024, "NT"),
            (7, 1200, 300, "NT"),
            (1, 1024, 256, "NT"),
            (128, 1024, 784, "NT"),
            (1024, 784, 128, "TN"),
            (1024, 256, 256, "NT"),
            (1024, 256, 256, "NN"),
            (256, 256, 1024, "TN"),
            (50257, 768, 256, "TN"),
            (1024, 1024, 256, "NN"),
            (1024, 256, 1024, "NN"),
            (1024, 256, 1024, "NT"),
            (1024, 256, 1024, "TN"),
            (512, 768, 50257, "NN"),
        ];
        for (m, n, k, layout) in shapes {
            let (a_row, a_step) = if layout.starts_with('N') { (k, 1) } else { (1, m) };
            let (b_step, b_column) = if layout.ends_with('N') { (n, 1) } else { (1, k) };
            let factors = [
                matmul::Factor { size: m, lhs: Some(a_row), rhs: None, out: Some(n) },
                matmul::Factor { size: n, lhs: None, rhs: Some(b_column), out: Some(1) },
                matmul::Factor { size: k, lhs: Some(a_step), rhs: Some(b_step), out: None },
            ];
            let (a, b, mut c) = (vec![1.0f32; m * k], vec![0.5f32; k * n], vec![0f32; m * n]);
            let dot = DotGeneral::<f32>::new(&factors);
            self.time(&format!("matmul f32 {m}x{n}x{k} {layout}"), Throughput::Elements(dot.flops() as u64), |pool| {
                dot.run(pool, 1.0, 0.0, &a, &b, &mut c)
            });
            let (a, b, mut rounded) = (vec![0x3f80u16; m * k], vec![0x3f00u16; k * n], vec![0u16; m * n]);
            for dtype in [DType::BF16, DType::F16] {
                let Some(dot) = DotGeneral::of_halves(&factors, dtype) else { continue };
                let mut workspace = vec![0.0; dot.workspace()];
                self.time(
                    &format!("matmul {} {m}x{n}x{k} {layout}", dtype.name()),
                    Throughput::Elements(dot.flops() as u64),
                    |pool| dot.run(pool, 1.0, 0.0, &a, &b, &mut c),
                );
                let name = format!("matmul {} {m}x{n}x{k} {layout} rounded", dtype.name());
                self.time(&name, Throughput::Elements(dot.flops() as u64), |pool| {
                    dot.run_rounded(pool, 1.0, &a, &b, &mut rounded, &mut workspace)
                });
            }
        }
    }

    fn halves(&self) {
        let (mut wide, mut half) = (vec![0.5f32; 1 << 15], vec![0x3f00u16; 1 << 15]);
        for dtype in [DType::BF16, DType::F16] {
            let by = Half::of(dtype).expect("a half type");
            let bytes = (wide.len() * 6) as f64;
            self.time(&format!("{} widened", dtype.name()), Throughput::Bytes((bytes) as u64), |pool| {
                by.widen(pool, &half, &mut wide)
            });
            self.time(&format!("{} narrowed", dtype.name()), Throughput::Bytes((bytes) as u64), |pool| {
                by.narrow(pool, &wide, &mut half)
            });
        }
    }

    /// Layers of ResNet-18 on 32 images of 64 x 64, and of a U-Net on 8: samples, channels, size of the image, taps, stride.
    fn convolution(&self) {
        for (samples, c, o, size, taps, stride) in [
            (32, 3, 64, 64, 7, 2),
            (32, 64, 64, 16, 3, 1),
            (32, 64, 128, 16, 3, 2),
            (32, 128, 128, 8, 3, 1),
            (32, 256, 256, 4, 3, 1),
            (32, 512, 512, 2, 3, 1),
            (32, 64, 128, 16, 1, 2),
            (8, 32, 32, 64, 3, 1),
            (8, 96, 32, 64, 3, 1),
            (8, 192, 64, 32, 3, 1),
        ] {
            let y = size / stride;
            let plain = [
                Plain { size: samples, strides: [Some(c * size * size), Some(o * y * y), None] },
                Plain { size: c, strides: [Some(size * size), None, Some(taps * taps)] },
                Plain { size: o, strides: [None, Some(y * y), Some(c * taps * taps)] },
            ];
            let sizes = [samples * c * size * size, samples * o * y * y, o * c * taps * taps];
            self.convolve(&format!("{c}->{o}"), &plain, sizes, [size, y, taps, stride]);
        }
    }

    /// MobileNetV2's and EfficientNet's, of 16 images: channels, size of the image, taps, stride.
    fn depthwise(&self) {
        for (c, size, taps, stride) in
            [(128, 48, 3, 1), (96, 24, 3, 1), (96, 12, 5, 1), (640, 3, 3, 1), (64, 48, 3, 2), (384, 6, 3, 2)]
        {
            let (samples, y) = (16, size / stride);
            let plain = [
                Plain { size: samples, strides: [Some(c * size * size), Some(c * y * y), None] },
                Plain { size: c, strides: [Some(size * size), Some(y * y), Some(taps * taps)] },
            ];
            let sizes = [samples * c * size * size, samples * c * y * y, c * taps * taps];
            self.convolve(&format!("depthwise {c}"), &plain, sizes, [size, y, taps, stride]);
        }
    }

    /// Both ways; elements of the image, the output and the kernel; square planes and windows: [image, output, taps, stride].
    fn convolve(&self, channels: &str, plain: &[Plain], sizes: [usize; 3], [size, y, taps, stride]: [usize; 4]) {
        let dim = |strides| Spatial { sizes: [size, y, taps], strides, stride, dilation: 1, pad: (taps / 2) as isize };
        let spatial = [dim([size, y, taps]), dim([1, 1, 1])];
        for (result, operands, what) in
            [(OUTPUT, [IMAGE, KERNEL], "forward"), (IMAGE, [OUTPUT, KERNEL], "image"), (KERNEL, [IMAGE, OUTPUT], "kernel")]
        {
            let convolution = Convolution::<f32>::new(Form { result, operands }, plain, &spatial);
            let [a, b] = operands.map(|role| vec![0.5f32; sizes[role]]);
            let (mut to, mut workspace) = (vec![0f32; sizes[result]], vec![0f32; convolution.workspace()]);
            let name = format!("convolution {what} {channels} {size}x{size} {taps}x{taps}/{stride}");
            self.time(&name, Throughput::Elements(convolution.flops() as u64), |pool| {
                convolution.run(pool, false, &a, &b, &mut to, &mut workspace)
            });
        }
    }

    /// Greatest elements of windows, ResNet's and VGG's: planes, size of the image, taps, stride. GB/s of image, values and places.
    fn pooling(&self) {
        for (planes, size, taps, stride) in [(32 * 64, 32, 3, 2), (16 * 64, 64, 2, 2), (16 * 512, 8, 2, 2), (8 * 32, 28, 3, 1)]
        {
            let pad = (taps / 2 * usize::from(taps % 2 == 1)) as isize;
            let axis = Axis { image: size, outputs: size / stride, taps, stride, dilation: 1, pad };
            let (image, outputs) = (size * size, axis.outputs * axis.outputs);
            let pooled = MaxPool { planes: (0..planes).map(|p| [p * image, p * outputs]).collect(), axes: vec![axis; 2] };
            let x: Vec<f32> = (0..planes * image).map(|i| (i * 7919 % 1009) as f32).collect();
            let (mut values, mut places) = (vec![0f32; planes * outputs], vec![0; planes * outputs]);
            let bytes = 4 * (x.len() + 2 * values.len()) as u64;
            self.time(&format!("pooling {planes} of {size}x{size} {taps}x{taps}/{stride}"), Throughput::Bytes(bytes), |pool| {
                pooled.run(pool, f32::NEG_INFINITY, &x, &mut values, &mut places)
            });
        }
    }

    /// Gradients of tables: tokens, rows, columns. GB/s of updates, and of rows read and written.
    fn scatter(&self) {
        for (tokens, rows, columns) in [(512, 50257, 768), (1024, 1000, 256), (4096, 100, 64)] {
            let factors = [
                Factor { size: tokens, index: Some(1), update: Some(columns), out: None },
                Factor { size: columns, index: None, update: Some(1), out: Some(1) },
            ];
            let scatter = ScatterAdd::new(&factors, Indexed { stride: columns, offset: 0, valid: rows });
            let indices: Vec<i64> = (0..tokens).map(|t| (t * 7919 % rows) as i64).collect();
            let (updates, mut table) = (vec![0.5f32; tokens * columns], vec![0f32; rows * columns]);
            let bytes = 12 * (tokens * columns) as u64;
            self.time(&format!("scatter {tokens} of {columns} into {rows}"), Throughput::Bytes(bytes), |pool| {
                scatter.run(pool, Indices::I64(&indices), &updates, &mut table)
            });
        }
    }

    /// GPT-2's head size, causal; and a small vision transformer's, which is not.
    fn attention(&self) {
        for (batch, heads, length, channels, causal) in
            [(2, 12, 256, 64, true), (8, 4, 128, 64, true), (1, 12, 1024, 64, true), (32, 3, 65, 64, false)]
        {
            let width = heads * channels;
            let layout = Strides { batch: length * width, head: channels, group: 0, position: width, channel: 1 };
            let shape = Shape {
                batch,
                heads,
                groups: 1,
                queries: length,
                keys: length,
                channels,
                values: channels,
                scale: 0.125,
                causal: causal.then_some(0),
                q: layout,
                k: layout,
                v: layout,
                o: layout,
                lse: Strides { batch: heads * length, head: length, group: 0, position: 1, channel: 0 },
                mask: Strides::default(),
            };
            let attention = Attention::<f32>::new(&shape);
            let x = vec![0.5f32; batch * length * width];
            let (mut o, mut lse) = (x.clone(), vec![0f32; batch * heads * length]);
            let mut workspace = vec![0f32; attention.forward_workspace().max(attention.backward_workspace())];
            let inputs = Inputs { q: &x, k: &x, v: &x, mask: Mask::None };
            let flops = attention.flops() as f64;
            let name = format!("{batch}x{heads}x{length}x{channels}");
            self.time(&format!("attention forward {name}"), Throughput::Elements(flops as u64), |pool| {
                attention.forward(pool, inputs, &mut o, &mut lse, &mut workspace)
            });
            let (mut dq, mut dk, mut dv) = (x.clone(), x.clone(), x.clone());
            let given = Gradient { output_gradient: &x, output_gradient_strides: layout, inputs, o: &o, lse: &lse };
            self.time(&format!("attention backward {name}"), Throughput::Elements((2.5 * flops) as u64), |pool| {
                let results = Gradients {
                    dq: &mut dq,
                    dk: &mut dk,
                    dv: &mut dv,
                    dq_strides: layout,
                    dk_strides: layout,
                    dv_strides: layout,
                };
                attention.backward(pool, &given, results, &mut workspace);
            });
        }
    }

    fn generated(&self) {
        self.kernel("gelu bias residual 1024x3072", gelu(), &[1024, 3072]);
        self.kernel("gelu bias residual 1024x256", gelu(), &[1024, 256]);
        self.kernel("layer norm 1024x768", layer_norm(768), &[1024, 768]);
        self.kernel("softmax 4096x1024", softmax(), &[4096, 1024]);
        self.kernel("softmax 512x50257", softmax(), &[512, 50257]);
        self.kernel("softmax 128x10", softmax(), &[128, 10]);
        self.kernel("sum of rows 1024x768", row_sum(), &[1024, 768]);
        self.kernel("adamw 4M", adamw(), &[4 << 20]);
        self.kernel("transpose 1024x768", transpose(), &[1024, 768]);
        self.kernel("add 4M", add(), &[4 << 20]);
    }

    /// GB/s of operand bytes.
    fn kernel(&self, name: &str, kernel: Kernel, sizes: &[u64]) {
        let extents = |dims: &[u8]| {
            dims.iter().map(|d| sizes[usize::from(*d)]).map(|n| Extent { offset: 0, valid: n, block: n }).collect::<Vec<_>>()
        };
        let mut inputs = vec![vec![]; kernel.inputs.len()];
        let dims = |index: &[Index]| index.iter().map(|i| if let Index::Dim(d) = i { d.0 } else { 0 }).collect::<Vec<u8>>();
        for expr in &kernel.exprs {
            if let Expr::Load { input, index, .. } = expr {
                inputs[usize::from(*input)] = extents(&dims(index));
            }
        }
        let mut outputs = vec![];
        for stmt in &kernel.body {
            if let Stmt::Store { index, .. } = stmt {
                outputs.push(extents(&dims(index)));
            }
        }
        let nest = Nest::bind(&kernel, &inputs, &outputs).expect("a bindable kernel");
        let parameters = Nest::parameters(&kernel, &inputs, &outputs).expect("a bindable kernel");
        let compiled = Jit::new().expect("a machine").for_threads(self.pool.threads()).compile(nest).expect("a kernel");
        // All bytes 0x3f: every element is 0.747.
        let mut memory: Vec<Vec<u8>> = compiled.operand_bytes.iter().map(|bytes| vec![0x3f; *bytes]).collect();
        let bytes: usize = compiled.operand_bytes.iter().sum();
        let count = kernel.inputs.len();
        let (given, results) = memory.split_at_mut(count);
        self.time(name, Throughput::Bytes(bytes as u64), |pool| {
            let inputs: Vec<&[u8]> = given.iter().map(|x| &x[..]).collect();
            let mut outputs: Vec<&mut [u8]> = results.iter_mut().map(|x| &mut x[..]).collect();
            compiled.run_slices(pool, &parameters, &inputs, &mut outputs);
        });
    }
}

/// A kernel under construction, all f32.
struct Build(Kernel);

impl Build {
    fn new(dims: usize, outer: &[u8]) -> Build {
        let mut kernel = Kernel::default();
        (0..dims).for_each(|d| _ = kernel.dim(format!("d{d}")));
        kernel.outer = outer.iter().map(|d| DimId(*d)).collect();
        Build(kernel)
    }
    fn load(&mut self, dims: &[u8]) -> ExprId {
        let input = self.0.inputs.len() as u8;
        self.0.inputs.push(Argument { dtype: DType::F32, rank: dims.len() as u8 });
        let index = dims.iter().map(|d| Index::Dim(DimId(*d))).collect();
        self.0.expr(Expr::Load { input, index, outside: Outside::Never })
    }
    fn constant(&mut self, x: f64) -> ExprId {
        self.0.expr(Expr::Const { dtype: DType::F32, bits: x.to_bits() })
    }
    fn op(&mut self, op: BinaryOp, x: ExprId, y: ExprId) -> ExprId {
        self.0.expr(Expr::Binary(op, x, y))
    }
    fn mul(&mut self, x: ExprId, y: ExprId) -> ExprId {
        self.op(BinaryOp::Mul, x, y)
    }
    fn add(&mut self, x: ExprId, y: ExprId) -> ExprId {
        self.op(BinaryOp::Add, x, y)
    }
    fn unary(&mut self, op: UnaryOp, x: ExprId) -> ExprId {
        self.0.expr(Expr::Unary(op, x))
    }
    fn reduce(&mut self, op: Reduce, over: u8, value: ExprId) -> ExprId {
        let var = VarId(self.0.body.len() as u32);
        self.0.body.push(Stmt::Reduce { var, op, over: vec![DimId(over)], value });
        self.0.expr(Expr::Var(var))
    }
    fn store(mut self, over: &[u8], dims: &[u8], value: ExprId) -> Build {
        let output = self.0.outputs.len() as u8;
        self.0.outputs.push(Argument { dtype: DType::F32, rank: dims.len() as u8 });
        let index = dims.iter().map(|d| Index::Dim(DimId(*d))).collect();
        let over = over.iter().map(|d| DimId(*d)).collect();
        self.0.body.push(Stmt::Store { output, over, index, value, mode: StoreMode::Assign });
        self
    }
}

fn gelu() -> Kernel {
    let mut b = Build::new(2, &[0, 1]);
    let (x, bias, residual) = (b.load(&[0, 1]), b.load(&[1]), b.load(&[0, 1]));
    let (cubic, scale, half, one) = (b.constant(0.044715), b.constant(0.797_884_56), b.constant(0.5), b.constant(1.0));
    let x = b.add(x, bias);
    let square = b.mul(x, x);
    let inner = b.mul(square, cubic);
    let inner = b.add(inner, one);
    let inner = b.mul(inner, x);
    let inner = b.mul(inner, scale);
    let t = b.unary(UnaryOp::Tanh, inner);
    let t = b.add(t, one);
    let y = b.mul(x, half);
    let y = b.mul(y, t);
    let y = b.add(y, residual);
    b.store(&[], &[0, 1], y).0
}

fn layer_norm(width: u32) -> Kernel {
    let mut b = Build::new(2, &[0]);
    let (x, gain, bias) = (b.load(&[0, 1]), b.load(&[1]), b.load(&[1]));
    let (n, eps) = (b.constant(1.0 / f64::from(width)), b.constant(1e-5));
    let sum = b.reduce(Reduce::Sum, 1, x);
    let mean = b.mul(sum, n);
    let centred = b.op(BinaryOp::Sub, x, mean);
    let square = b.mul(centred, centred);
    let sum = b.reduce(Reduce::Sum, 1, square);
    let variance = b.mul(sum, n);
    let variance = b.add(variance, eps);
    let r = b.unary(UnaryOp::Rsqrt, variance);
    let y = b.mul(centred, r);
    let y = b.mul(y, gain);
    let y = b.add(y, bias);
    b.store(&[1], &[0, 1], y).store(&[], &[0], mean).store(&[], &[0], r).0
}

fn softmax() -> Kernel {
    let mut b = Build::new(2, &[0]);
    let x = b.load(&[0, 1]);
    let max = b.reduce(Reduce::Max, 1, x);
    let shifted = b.op(BinaryOp::Sub, x, max);
    let e = b.unary(UnaryOp::Exp, shifted);
    let sum = b.reduce(Reduce::Sum, 1, e);
    let y = b.op(BinaryOp::Div, e, sum);
    b.store(&[1], &[0, 1], y).0
}

fn row_sum() -> Kernel {
    let mut b = Build::new(2, &[1]);
    let x = b.load(&[0, 1]);
    let sum = b.reduce(Reduce::Sum, 0, x);
    b.store(&[], &[1], sum).0
}

fn adamw() -> Kernel {
    let mut b = Build::new(1, &[0]);
    let (p, m, v, g) = (b.load(&[0]), b.load(&[0]), b.load(&[0]), b.load(&[0]));
    let [b1, b2, c1, c2, rate, eps, decay] = [0.9, 0.999, 0.1, 0.001, 1e-3, 1e-8, 0.99].map(|x| b.constant(x));
    let (x, y) = (b.mul(m, b1), b.mul(g, c1));
    let m2 = b.add(x, y);
    let square = b.mul(g, g);
    let (x, y) = (b.mul(v, b2), b.mul(square, c2));
    let v2 = b.add(x, y);
    let root = b.unary(UnaryOp::Sqrt, v2);
    let root = b.add(root, eps);
    let update = b.op(BinaryOp::Div, m2, root);
    let update = b.mul(update, rate);
    let decayed = b.mul(p, decay);
    let p2 = b.op(BinaryOp::Sub, decayed, update);
    b.store(&[], &[0], p2).store(&[], &[0], m2).store(&[], &[0], v2).0
}

fn transpose() -> Kernel {
    let mut b = Build::new(2, &[0, 1]);
    let x = b.load(&[0, 1]);
    b.store(&[], &[1, 0], x).0
}

fn add() -> Kernel {
    let mut b = Build::new(1, &[0]);
    let (x, y) = (b.load(&[0]), b.load(&[0]));
    let sum = b.add(x, y);
    b.store(&[], &[0], sum).0
}
