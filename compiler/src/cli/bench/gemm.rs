//! `dcc bench gemm`: matrix products as programs run them, beside the multiply-adds that this machine does without memory.

use super::machine::Machine;
use crate::cli::failure::Outcome;
use crate::cli::output;
use crate::error::Error;
use dcc_kernels::Isa;
use dcc_program::DType;
use dcc_program::program::Program;
use dcc_program::text;
use dcc_runtime::comm::Patience;
use dcc_runtime::error as runtime;
use dcc_runtime::exec::ranks::{Rank, local_ranks};
use dcc_runtime::exec::{Executor, Fresh, Io, Scalars, World};
use dcc_runtime::run::Instructions;
use serde::Serialize;
use std::fmt::Write;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// A figure is the median of at least so many rounds, that take at least so long together.
const ROUNDS: usize = 7;
const SPAN: Duration = Duration::from_millis(100);
/// Multiplications and additions of a round, at least: the clock and the walk over instructions are to be small beside them.
const ROUND_FLOPS: u64 = 100_000_000;
const MOST_BYTES: u64 = 64 << 30;

/// Products of GPT-2's layers and of a 4 × 256 GPT's, forward and both gradients; a vocabulary; an MLP; a skinny one.
const SHAPES: [&str; 12] = [
    "512x768x768:nt",
    "512x3072x768:nn",
    "512x768x3072:nn",
    "768x3072x512:tn",
    "512x50257x768:nt",
    "1024x256x256:nn",
    "1024x256x256:nt",
    "256x256x1024:tn",
    "1024x8192x256:nt",
    "128x1024x784:nt",
    "1024x784x128:tn",
    "128x10x1024:nt",
];

#[derive(clap::Args)]
pub struct Args {
    /// Products of m x k and k x n; after a colon, which operand is stored transposed (default: the products of transformers and MLPs)
    #[arg(long, value_name = "MxNxK[:nn|nt|tn|tt]", num_args = 1..)]
    shapes: Vec<String>,
    /// Element types of the operands and the result
    #[arg(long, num_args = 1.., default_values = ["f32", "bf16"], value_parser = ["f32", "f64", "bf16", "f16"])]
    dtype: Vec<String>,
    /// Compute threads, at most 64 a core (default: all cores)
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    instructions: Instructions,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// out[m, n] = lhs · rhs, summed over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    m: u64,
    n: u64,
    k: u64,
    /// Whether lhs is stored as [k, m], and rhs as [n, k].
    transposed: [bool; 2],
}

#[derive(Clone, Debug, Serialize)]
struct Figure {
    dtype: &'static str,
    m: u64,
    n: u64,
    k: u64,
    layout: String,
    /// Multiplications and additions, as the kernel counts them.
    flops: u64,
    microseconds: f64,
    gflops: f64,
    /// Of the f32 multiply-add peak.
    peak_fraction: f64,
}

#[derive(Serialize)]
struct Report {
    schema: u32,
    #[serde(flatten)]
    machine: Machine,
    figures: Vec<Figure>,
}

pub fn run(args: &Args) -> Outcome<i32> {
    let given = args.shapes.iter().map(String::as_str);
    let texts: Vec<&str> = if args.shapes.is_empty() { SHAPES.to_vec() } else { given.collect() };
    let shapes = texts.into_iter().map(Shape::from_str).collect::<Result<Vec<Shape>, Error>>()?;
    let dtypes: Vec<DType> = args.dtype.iter().map(|name| DType::parse(name).expect("clap has seen it")).collect();
    for dtype in &dtypes {
        shapes.iter().try_for_each(|shape| shape.check(*dtype))?;
    }
    let threads = super::threads(args.threads)?;
    args.instructions.limit()?;
    output::status("Measuring", &format!("matrix products, {threads} threads, {}", Isa::detect().name()));
    let machine = Machine::measure(threads);
    let mut figures = Vec::new();
    for dtype in dtypes {
        for shape in &shapes {
            figures.push(shape.measure(dtype, &machine)?);
        }
    }
    let report = Report { schema: 1, machine, figures };
    match args.json {
        true => output::json(&report)?,
        false => output::data(&table(&report))?,
    }
    Ok(0)
}

fn table(report: &Report) -> String {
    let mut text = report.machine.text();
    let _ = writeln!(text, "{:<6}{:>18}  {:<8}{:>12}{:>10}{:>9}", "dtype", "m x n x k", "layout", "µs", "GF/s", "of peak");
    for f in &report.figures {
        let shape = format!("{} x {} x {}", f.m, f.n, f.k);
        let fraction = format!("{:.1} %", 100.0 * f.peak_fraction);
        let _ =
            writeln!(text, "{:<6}{shape:>18}  {:<8}{:>12.2}{:>10.1}{fraction:>9}", f.dtype, f.layout, f.microseconds, f.gflops);
    }
    text
}

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Shape, Error> {
        let wrong = || Error::usage(format!("--shapes {text} is no MxNxK")).help("write sizes and a layout: 1024x768x3072:nt");
        let (sizes, layout) = text.split_once(':').unwrap_or((text, "nn"));
        let sizes: Option<Vec<u64>> = sizes.split('x').map(|size| size.parse().ok().filter(|&size| size > 0)).collect();
        let transposed = match layout {
            "nn" => [false, false],
            "nt" => [false, true],
            "tn" => [true, false],
            "tt" => [true, true],
            _ => return Err(wrong()),
        };
        match sizes.as_deref() {
            Some(&[m, n, k]) => Ok(Shape { m, n, k, transposed }),
            _ => Err(wrong()),
        }
    }
}

impl Shape {
    fn layout(&self) -> String {
        self.transposed.iter().map(|&transposed| if transposed { 't' } else { 'n' }).collect()
    }

    /// Dims of lhs, rhs and the result as they are stored.
    fn dims(&self) -> [[u64; 2]; 3] {
        let turned = |dims: [u64; 2], turn: bool| if turn { [dims[1], dims[0]] } else { dims };
        [turned([self.m, self.k], self.transposed[0]), turned([self.k, self.n], self.transposed[1]), [self.m, self.n]]
    }

    /// Errors: tensors that no machine has room for.
    fn check(&self, dtype: DType) -> Result<(), Error> {
        let bytes = |[a, b]: [u64; 2]| a.checked_mul(b)?.checked_mul(dtype.bytes());
        let all = self.dims().map(bytes).into_iter().try_fold(0u64, |sum, bytes| sum.checked_add(bytes?));
        match all.filter(|&bytes| bytes <= MOST_BYTES) {
            Some(_) => Ok(()),
            None => {
                Err(Error::usage(format!("--shapes {}x{}x{}: more than 64 GiB", self.m, self.n, self.k))
                    .help("give smaller sizes"))
            }
        }
    }

    /// The product `times` times.
    fn program(&self, dtype: DType, times: u64) -> Program {
        let [lhs, rhs, out] = self.dims();
        let spec = |dims: [&str; 2], turn: bool| if turn { format!("{} {}", dims[1], dims[0]) } else { dims.join(" ") };
        let rule = format!("{}, {} -> m n", spec(["m", "k"], self.transposed[0]), spec(["k", "n"], self.transposed[1]));
        let bytes = |[a, b]: [u64; 2]| (a * b * dtype.bytes()).next_multiple_of(64);
        let (second, third) = (bytes(lhs), bytes(lhs) + bytes(rhs));
        let mut lines =
            format!("program gemm train stage 0/1 mesh(mb=1)\nmemory persistent={} scratch=0\n", third + bytes(out));
        for (buffer, ([rows, columns], at)) in [(lhs, 0), (rhs, second), (out, third)].into_iter().enumerate() {
            let _ = writeln!(lines, "param b{buffer} {}[{rows}, {columns}] @p{at} weight w{buffer} trained", dtype.name());
        }
        lines.push_str("section forward\n");
        (0..times).for_each(|_| lines += &format!("b2 = dot({rule}) b0, b1\n"));
        lines.push_str("order forward 0\n");
        text::parse(&lines).unwrap_or_else(|error| panic!("the program of a product: {error}\n{lines}"))
    }

    fn measure(&self, dtype: DType, machine: &Machine) -> Outcome<Figure> {
        let times = ROUND_FLOPS.div_ceil(2 * self.m * self.n * self.k).clamp(1, 1000);
        let programs = [self.program(dtype, times)];
        let world = World::new(&[&programs])?;
        let ones = Scalars { learning_rate: 0.0, step: 1, seed: 0 };
        let found = local_ranks(&world, machine.threads, Patience::default(), |rank| timed(rank, &programs[0], &ones))?;
        let (seconds, flops) = found[0];
        let (seconds, flops) = (seconds / times as f64, flops / times);
        let gflops = 1e-9 * flops as f64 / seconds;
        Ok(Figure {
            dtype: dtype.name(),
            m: self.m,
            n: self.n,
            k: self.k,
            layout: self.layout(),
            flops,
            microseconds: 1e6 * seconds,
            gflops,
            peak_fraction: gflops / machine.gflops,
        })
    }
}

/// Seconds of a step, the median of the rounds, and its flops.
fn timed(rank: &mut Rank<'_>, program: &Program, scalars: &Scalars) -> runtime::Result<(f64, u64)> {
    rank.device.memory().fault_in(0..rank.world.planned_bytes(rank.rank));
    let mut executor = Executor::new(&mut rank.device, rank.world, program, rank.rank, Fresh::AsIs)?;
    let width = program.ty(program.params[0].buffer).dtype;
    for parameter in executor.parameters() {
        // Small numbers, so that no sum overflows; their speed is that of all others.
        let pattern = half_of(width);
        rank.device.memory_mut().with(parameter.range.clone(), |bytes| {
            bytes.chunks_exact_mut(pattern.len()).for_each(|element| element.copy_from_slice(&pattern));
            Ok::<(), runtime::Error>(())
        })?;
    }
    let mut io = Io { fill: &mut |_, _, _| Ok(()), take: &mut |_, _, _| Ok(()) };
    executor.put_parameters(&mut rank.device)?;
    executor.step(&mut rank.device, &mut rank.comm, scalars, &mut io, None)?;
    let (began, mut rounds) = (Instant::now(), Vec::new());
    while rounds.len() < ROUNDS || began.elapsed() < SPAN {
        let start = Instant::now();
        executor.put_parameters(&mut rank.device)?;
        executor.step(&mut rank.device, &mut rank.comm, scalars, &mut io, None)?;
        rounds.push(start.elapsed().as_secs_f64());
    }
    rounds.sort_by(f64::total_cmp);
    Ok((rounds[rounds.len() / 2], executor.tally().flops))
}

/// The bytes of 0.5.
fn half_of(dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => 0.5f64.to_ne_bytes().to_vec(),
        DType::BF16 => 0x3f00u16.to_ne_bytes().to_vec(),
        DType::F16 => 0x3800u16.to_ne_bytes().to_vec(),
        _ => 0.5f32.to_ne_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read() {
        let shape: Shape = "2x3x4:tn".parse().expect("a shape");
        assert_eq!(shape, Shape { m: 2, n: 3, k: 4, transposed: [true, false] });
        assert_eq!((shape.layout(), shape.dims()), ("tn".to_owned(), [[4, 2], [4, 3], [2, 3]]));
        for wrong in ["2x3", "2x3x0", "2x3x4:nnn", "2x3x4x5", "axbxc", ""] {
            assert!(wrong.parse::<Shape>().is_err(), "{wrong}");
        }
    }
}
