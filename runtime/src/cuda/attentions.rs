//! Attention by cuDNN, where it is installed and faster than dcc's own kernels.
//!
//! For each attention, and each gradient of one, the library's plans that repeat to the bit and the own kernel are timed once (`choices`); before,
//! the library's results on made-up operands are compared with the own kernel's. Without a folder to keep choices in, the library's first plan is
//! taken. A gradient's plans keep dS in memory, so that dQ is summed in one order.

use super::Arch;
use super::choices::{self, Choice, timed};
use super::cudnn::{Graph, Library, Place, Plan, Pointwise, Tensor, dense};
use super::driver::{Buffer, Gpu};
use crate::error::Result;
use dcc_kernels::cuda::Source;
use dcc_kernels::cuda::library::Terms;
use dcc_kernels::cuda::library::heads::Heads;
use dcc_program::types::DType;
use half::{bf16, f16};

/// The number of the graphs that are made below: choices are of plans for them. To be raised when they change.
const GRAPHS: u32 = 1;
/// Plans that are timed.
const CANDIDATES: usize = 4;
/// The library may use so much memory beside the arena: a share of that.
const SHARE: usize = 8;
/// How far the library's results may be from the own kernel's: the norm of the difference as a share of theirs. Roundings of half floats are some
/// thousandths.
const AGREEMENT: f64 = 1.0 / 32.0;
/// Made-up numbers repeat after so many: a prime, so that no two rows are alike.
const PATTERN: u32 = 65_521;
/// The operand of a gradient that is Lse.
const LSE: usize = 5;

/// The library on one GPU.
pub struct Attentions {
    library: Library,
    /// What plans share; the last is as large as any needs. Recordings may still use earlier ones.
    workspaces: Vec<Buffer>,
    /// The GPU and the library's version: what a choice is for.
    place: String,
}

/// An attention by the library.
pub struct Attending {
    plan: Plan,
    _graph: Graph,
    /// Operands of the own kernel that the graph has.
    operands: usize,
}

/// What operands lie in before the arena has contents, and what the own kernel does with them there.
pub struct Trial<'a> {
    pub gpu: &'a Gpu,
    pub arena: &'a Buffer,
    /// Where operands are, and how large.
    pub at: &'a [u64],
    pub bytes: &'a [usize],
    pub own: &'a mut dyn FnMut() -> Result<()>,
}

impl Attentions {
    /// `None` where the library is not installed, is too old, or does not fit the driver.
    pub fn open(gpu: &Gpu) -> Result<Option<Attentions>> {
        let attentions = |library: Library| {
            let place = format!("{} {} attention {} {GRAPHS}", gpu.name(), gpu.arch().name(), library.version());
            Attentions { library, workspaces: Vec::new(), place }
        };
        Ok(Library::open(gpu)?.map(attentions))
    }

    /// The fastest way to compute `heads`; `None`: the own kernel. What lies where the operands are is lost.
    pub fn choose(&mut self, heads: &Heads, mut trial: Trial<'_>) -> Result<Option<Attending>> {
        let key = format!("{} {heads:?}", self.place);
        let choice = choices::chosen(key, || self.fastest(heads, &mut trial))?;
        let Choice::Library([number, ..]) = choice else { return Ok(None) };
        // The library loads a plan's code when it is first used: not where steps are recorded.
        let ready = self.made(heads, number as usize, &trial).and_then(|attending| {
            let started = attending.as_ref().map(|attending| self.start(attending, trial.at));
            started.transpose().map(|_| attending)
        });
        match ready {
            Ok(attending) => {
                trial.gpu.wait()?;
                Ok(attending)
            }
            Err(error) => {
                tracing::warn!(%error, ?heads, "cuDNN no longer has the plan that was chosen: dcc's own kernel computes it");
                Ok(None)
            }
        }
    }

    /// The library's plan of that number with memory for it; none where it has not so many, or it takes too much memory.
    fn made(&mut self, heads: &Heads, number: usize, trial: &Trial<'_>) -> Result<Option<Attending>> {
        let (graph, operands) = graph(heads)?;
        let mut candidates = self.library.candidates(&graph)?;
        if number >= candidates.len() {
            return Ok(None);
        }
        let plan = self.library.plan(&graph, candidates.swap_remove(number))?;
        if plan.bytes() > trial.arena.bytes() / SHARE {
            return Ok(None);
        }
        self.make_room(trial.gpu, plan.bytes())?;
        Ok(Some(Attending { plan, _graph: graph, operands }))
    }

    fn make_room(&mut self, gpu: &Gpu, bytes: usize) -> Result<()> {
        if self.workspaces.last().map_or(0, Buffer::bytes) < bytes {
            self.workspaces.push(gpu.allocate(bytes)?);
        }
        Ok(())
    }

    fn fastest(&mut self, heads: &Heads, trial: &mut Trial<'_>) -> Result<Choice> {
        let kept = self.workspaces.len();
        let choice = self.tried_out(heads, trial);
        // Nothing that was recorded uses what only candidates needed.
        self.workspaces.truncate(kept);
        choice
    }

    fn tried_out(&mut self, heads: &Heads, trial: &mut Trial<'_>) -> Result<Choice> {
        // Whatever the library has against the attention, dcc's own kernel computes it.
        let count = match graph(heads).and_then(|(graph, _)| self.library.candidates(&graph)) {
            Ok(candidates) => candidates.len().min(CANDIDATES),
            Err(error) => {
                tracing::debug!(%error, ?heads, "cuDNN has no plan");
                0
            }
        };
        if count == 0 {
            return Ok(Choice::Own);
        }
        let stream = trial.gpu.stream();
        trial.fill(heads)?;
        (trial.own)()?;
        let expected = trial.results(heads)?;
        let mut best = None;
        for number in 0..count {
            let took = self.agreeing(heads, number, trial, &expected).and_then(|attending| {
                let time = |attending: Attending| timed(stream, &mut || self.start(&attending, trial.at));
                attending.map(time).transpose()
            });
            match took {
                Ok(Some(took)) if best.is_none_or(|(least, _)| took < least) => {
                    best = Some((took, Choice::Library([number as u64, 0, 0, 0, 0, 0, 0, 0])));
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, ?heads, number, "cuDNN refuses a plan of its own"),
            }
            // The first will do where nothing can be kept.
            if let (Some((_, choice)), false) = (best, choices::are_kept()) {
                return Ok(choice);
            }
        }
        let Some((took, choice)) = best else { return Ok(Choice::Own) };
        Ok(if took < timed(stream, trial.own)? { choice } else { Choice::Own })
    }

    /// A plan, if it computes what is `expected`, and takes not too much memory for it.
    fn agreeing(
        &mut self,
        heads: &Heads,
        number: usize,
        trial: &Trial<'_>,
        expected: &[(DType, Vec<u8>)],
    ) -> Result<Option<Attending>> {
        let Some(attending) = self.made(heads, number, trial)? else { return Ok(None) };
        trial.fill(heads)?;
        self.start(&attending, trial.at)?;
        let found = trial.results(heads)?;
        let far: Vec<f64> = expected.iter().zip(&found).map(|((dtype, x), (_, y))| distance(*dtype, x, y)).collect();
        let agrees = far.iter().all(|far| *far <= AGREEMENT);
        if !agrees {
            tracing::warn!(?heads, ?far, "cuDNN computes another attention than dcc: it is left out");
        }
        Ok(agrees.then_some(attending))
    }

    /// Starts an attention on the own kernel's operands, behind all work of the stream so far.
    pub fn start(&self, attending: &Attending, operands: &[u64]) -> Result<()> {
        let tensors: Vec<(i64, u64)> = (1..).zip(operands[..attending.operands].iter().copied()).collect();
        let workspace = self.workspaces.last().map_or(0, Buffer::address);
        // SAFETY: who prepared the call saw that the operands are as large as the own kernel uses them, from whose sizes the graph was made; all are
        // alive until the work is done; the workspace is as large as that of any plan.
        unsafe { self.library.start(&attending.plan, &tensors, workspace) }
    }
}

impl Trial<'_> {
    /// Makes up inputs, numbers from -1 to 1 without a pattern and logarithms of as many keys as there are, and makes all results NaN.
    fn fill(&self, heads: &Heads) -> Result<()> {
        // Scores of some ones, whatever they are scaled by.
        let scale = f32::from_bits(heads.scale).abs() * (heads.channels as f32).sqrt();
        let most = (2.0 / scale.max(f32::MIN_POSITIVE)).sqrt().min(1.0);
        let numbers = || {
            (0..PATTERN).map(|i| {
                most * (i.wrapping_mul(0x9e37_79b1).rotate_left(15).wrapping_mul(0x85eb_ca6b) as i32 as f32 / i32::MAX as f32)
            })
        };
        let pattern: Vec<u8> = match heads.dtype {
            DType::F16 => numbers().flat_map(|x| f16::from_f32(x).to_ne_bytes()).collect(),
            _ => numbers().flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
        };
        for (operand, &bytes) in self.bytes.iter().enumerate() {
            let whole = |part: &[u8]| part.iter().copied().cycle().take(bytes).collect::<Vec<u8>>();
            let made = match operand {
                _ if operand >= inputs(heads) => whole(&[0xff]),
                LSE => whole(&(heads.keys as f32).ln().to_ne_bytes()),
                // Each operand has others.
                _ => whole(&[&pattern[2 * 1000 * operand..], &pattern[..2 * 1000 * operand]].concat()),
            };
            self.gpu.write(self.arena, self.offset(operand), &made)?;
        }
        Ok(())
    }

    /// The results, with their types.
    fn results(&self, heads: &Heads) -> Result<Vec<(DType, Vec<u8>)>> {
        let of = |operand: usize| {
            let mut bytes = vec![0; self.bytes[operand]];
            self.gpu.read(self.arena, self.offset(operand), &mut bytes)?;
            let is_lse = !heads.gradient && operand + 1 == self.bytes.len();
            Ok((if is_lse { DType::F32 } else { heads.dtype }, bytes))
        };
        (inputs(heads)..self.bytes.len()).map(of).collect()
    }

    fn offset(&self, operand: usize) -> usize {
        (self.at[operand] - self.arena.address()) as usize
    }
}

/// How many of the own kernel's operands are inputs; of a gradient, this one is Lse.
fn inputs(heads: &Heads) -> usize {
    if heads.gradient { LSE + 1 } else { 3 }
}

/// The norm of the difference as a share of that of `x`; what neither has written (NaN in both) aside.
fn distance(dtype: DType, x: &[u8], y: &[u8]) -> f64 {
    let value = |element: &[u8]| match (dtype, element) {
        (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
        (_, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
        (_, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]).into(),
        _ => f64::NAN,
    };
    let width = dtype.bytes() as usize;
    let (mut difference, mut whole) = (0.0, 0.0);
    for (x, y) in x.chunks(width).zip(y.chunks(width)).map(|(x, y)| (value(x), value(y))) {
        if !(x.is_nan() && y.is_nan()) {
            difference += (x - y) * (x - y);
            whole += x * x;
        }
    }
    if difference == 0.0 { 0.0 } else { (difference / whole).sqrt() }
}

/// What the library computes, and how many of the own kernel's operands that has, by their numbers from 1 on.
fn graph(heads: &Heads) -> Result<(Graph, usize)> {
    if heads.gradient { gradient(heads).map(|graph| (graph, 9)) } else { forward(heads).map(|graph| (graph, 5)) }
}

/// What a library that is installed would compute on GPUs that need not be here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// The library's version.
    pub version: usize,
    /// Attentions and gradients that could be the library's, and those that it has a plan for.
    pub asked: usize,
    pub planned: usize,
}

impl Planned {
    /// Both.
    pub fn and(self, other: Planned) -> Planned {
        Planned { version: self.version, asked: self.asked + other.asked, planned: self.planned + other.planned }
    }
}

/// Plans all attentions of `sources` for GPUs of a generation. `None`: cuDNN is not installed or too old, or has not heard of them.
pub fn planned(sources: &[Source], arch: Arch) -> Option<Planned> {
    let opened = properties(arch).map_or(Ok(None), |properties| Library::without_gpu(&properties));
    // It may want a driver even so.
    let opened = opened.inspect_err(|error| tracing::debug!(%error, "cuDNN does not open"));
    let Ok(Some(library)) = opened else { return None };
    let mut found = Planned { version: library.version(), ..Planned::default() };
    for source in sources {
        let Some(Terms::Attention(heads)) = &source.terms else { continue };
        let is_planned = graph(heads).and_then(|(graph, _)| {
            let mut candidates = library.candidates(&graph)?.into_iter();
            Ok(candidates.any(|candidate| library.plan(&graph, candidate).is_ok()))
        });
        found.asked += 1;
        match is_planned {
            Ok(is_planned) => found.planned += usize::from(is_planned),
            Err(error) => tracing::debug!(%error, ?heads, "cuDNN has no plan"),
        }
    }
    Some(found)
}

/// What cuDNN wants to know of a GPU: those of data centres.
fn properties(arch: Arch) -> Option<String> {
    let (name, processors, shared, l2) = match (arch.major, arch.minor) {
        (8, 0) => ("NVIDIA A100", 108, 163 << 10, 40 << 20),
        (9, 0) => ("NVIDIA H200", 132, 227 << 10, 60 << 20),
        (10, 0) => ("NVIDIA B200", 148, 227 << 10, 126 << 20),
        _ => return None,
    };
    let version = 100 * arch.major + 10 * arch.minor;
    let all = serde_json::json!({
        "cudaDeviceId": 0, "deviceName": name, "deviceVer": version, "driverVer": 13000, "runtimeVer": 13000,
        "maxGridSize": [i32::MAX, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "multiProcessorCount": processors, "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 48 << 10,
        "maxSharedMemoryPerBlockOptin": shared, "oversizedSharedMemoryPerBlock": 0, "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0,
        "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1_980_000, "memClockRateKHz": 3_201_000,
        "memoryBusWidth": 6144, "l2CacheSize": l2, "totalGlobalMem": 80u64 << 30,
    });
    Some(all.to_string())
}

/// The dims of Q, K, V, O, Lse and the scores.
struct Dims {
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    o: [usize; 4],
    lse: [usize; 4],
    scores: [usize; 4],
}

impl Dims {
    fn new(heads: &Heads) -> Dims {
        let &Heads { batch, heads: [own, of_keys], queries, keys, channels, values, .. } = heads;
        Dims {
            q: [batch, own, queries, channels],
            k: [batch, of_keys, keys, channels],
            v: [batch, of_keys, keys, values],
            o: [batch, own, queries, values],
            lse: [batch, own, queries, 1],
            scores: [batch, own, queries, keys],
        }
    }
}

fn forward(heads: &Heads) -> Result<Graph> {
    let (mut graph, dims, given) = (Graph::new(6), Dims::new(heads), Place::Given);
    let q = graph.tensor(given(1), heads.dtype, dims.q, heads.q)?;
    let k = graph.tensor(given(2), heads.dtype, dims.k, heads.k)?;
    let v = graph.tensor(given(3), heads.dtype, dims.v, heads.v)?;
    let o = graph.tensor(given(4), heads.dtype, dims.o, heads.o)?;
    let lse = graph.tensor(given(5), DType::F32, dims.lse, heads.lse)?;
    let scale = graph.value(f32::from_bits(heads.scale))?;
    graph.attention([q, k, v], scale, [o, lse], heads.causal.then_some(dims.scores))?;
    Ok(graph)
}

/// dV = Pᵀ dO, dP = dO Vᵀ, dS = scale · P (dP - Σ dO · O), dK = dSᵀ Q, dQ = dS K with P = exp(scale · Q Kᵀ - Lse). (That it adds to no sum in
/// memory is what asks for one order.)
fn gradient(heads: &Heads) -> Result<Graph> {
    let (mut graph, dims, given) = (Graph::new(10), Dims::new(heads), Place::Given);
    let swapped = |[a, b, c, d]: [usize; 4]| [a, b, d, c];
    let (dtype, wide) = (heads.dtype, DType::F32);
    let dy = graph.tensor(given(1), dtype, dims.o, heads.o)?;
    let q = graph.tensor(given(2), dtype, dims.q, heads.q)?;
    let k = graph.tensor(given(3), dtype, swapped(dims.k), swapped(heads.k))?;
    let v = graph.tensor(given(4), dtype, swapped(dims.v), swapped(heads.v))?;
    let o = graph.tensor(given(5), dtype, dims.o, heads.o)?;
    let lse = graph.tensor(given(6), wide, dims.lse, heads.lse)?;
    let dq = graph.tensor(given(7), dtype, dims.q, heads.q)?;
    let dk = graph.tensor(given(8), dtype, dims.k, heads.k)?;
    let dv = graph.tensor(given(9), dtype, dims.v, heads.v)?;
    let [scale, one] = [graph.value(f32::from_bits(heads.scale))?, graph.value(1.0)?];

    let products = graph.passing(wide, dims.o)?;
    graph.pointwise(Pointwise::Mul, dy, Some(o), products)?;
    let sums = graph.passing(wide, dims.lse)?;
    graph.sum(products, sums)?;
    // The engines want a factor, and memory, here.
    let dots = graph.tensor(Place::Scratch, wide, dims.lse, dense(dims.lse))?;
    graph.pointwise(Pointwise::Mul, sums, Some(one), dots)?;

    let [products, scaled, shifted, p] = graph.several(wide, dims.scores)?;
    graph.matmul(q, k, products)?;
    graph.pointwise(Pointwise::Mul, products, Some(scale), scaled)?;
    graph.pointwise(Pointwise::Sub, scaled, Some(lse), shifted)?;
    let seen = match heads.causal {
        true => {
            let seen = graph.passing(wide, dims.scores)?;
            graph.causal(shifted, seen)?;
            seen
        }
        false => shifted,
    };
    graph.pointwise(Pointwise::Exp, seen, None, p)?;
    transposed_product(&mut graph, heads, [p, dy, dv], dims.v)?;

    let [dp, centred, weighted, ds] = graph.several(wide, dims.scores)?;
    graph.matmul(dy, v, dp)?;
    graph.pointwise(Pointwise::Sub, dp, Some(dots), centred)?;
    graph.pointwise(Pointwise::Mul, centred, Some(p), weighted)?;
    graph.pointwise(Pointwise::Mul, weighted, Some(scale), ds)?;
    transposed_product(&mut graph, heads, [ds, q, dk], dims.k)?;

    let rows = graph.tensor(Place::Passing, wide, dims.k, heads.k)?;
    graph.reshape(k, rows)?;
    graph.matmul(ds, rows, dq)?;
    Ok(graph)
}

/// y = xᵀ · by for scores x; of several query heads that share a key head, their sum. `dims`: y's.
fn transposed_product(graph: &mut Graph, heads: &Heads, [x, by, y]: [Tensor; 3], dims: [usize; 4]) -> Result<()> {
    let Heads { batch, heads: [own, of_keys], queries, keys, dtype, .. } = *heads;
    let (scores, strides) = ([batch, own, keys, queries], [own * queries * keys, queries * keys, 1, keys]);
    let transposed = graph.tensor(Place::Passing, dtype, scores, strides)?;
    graph.reshape(x, transposed)?;
    if own == of_keys {
        return graph.matmul(transposed, by, y);
    }
    let all = graph.passing(dtype, [batch, own, dims[2], dims[3]])?;
    graph.matmul(transposed, by, all)?;
    graph.sum(all, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let bytes = |all: &[f32]| all.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        let far = |x: &[f32], y: &[f32]| distance(DType::F32, &bytes(x), &bytes(y));
        assert_eq!(far(&[3.0, 4.0, f32::NAN], &[3.0, 4.0, f32::NAN]), 0.0);
        assert_eq!(far(&[3.0, 4.0], &[3.0, 3.0]), 0.2);
        assert!(far(&[3.0, 4.0], &[3.0, f32::NAN]).is_nan() && far(&[0.0], &[1.0]).is_infinite());
        let halves = |x: f32| bf16::from_f32(x).to_ne_bytes();
        assert_eq!(distance(DType::BF16, &halves(2.0), &halves(1.0)), 0.5);
    }
}
