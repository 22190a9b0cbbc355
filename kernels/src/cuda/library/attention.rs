//! Attention and its gradient: half floats by tensor cores (`attention_tensor.cuh`), others by plain threads (`attention.cuh`).

use super::heads::Heads;
use super::{THREADS, Terms, entry, source};
use crate::cuda::emit::stored;
use crate::cuda::{Launch, Source};
use crate::library::attention::{Shape, Strides};
use dcc_program::program::MaskKind;
use dcc_program::types::DType;

const TEXT: &str = include_str!("attention.cuh");
const TENSOR: [&str; 2] = [include_str!("tensor.cuh"), include_str!("attention_tensor.cuh")];

/// Shared memory that a block has on every GPU of compute capability 8.0 and later.
const SHARED: usize = 99 << 10;
/// Channels of which a block's tiles fit into a GPU's shared memory: all of f64 only where that is 163 KiB, as in data centres.
const MAX_CHANNELS: usize = 256;
/// Channels whose sums tensor cores keep in registers.
const TENSOR_CHANNELS: usize = 128;

/// O and Lse from Q, K, V and the mask. Halves are computed in f32, in which Lse and an additive mask are.
/// Errors: operands that the kernel does not take.
pub fn forward(shape: &Shape, dtype: DType, mask: MaskKind, name: &str) -> Result<Source, String> {
    let attending = Attending::new(shape, dtype, mask)?;
    let Attending { stored, computed, .. } = attending;
    let inputs = [("q", stored), ("k", stored), ("v", stored)];
    let arguments = attending.arguments(&inputs, &[("o", stored), ("lse", computed)]);
    let body = format!("    attention::forward<{name}_shape>(q, k, v, {}, o, lse);\n", attending.mask_argument());
    let Pass { prefix, block, threads, shared, .. } = attending.forward;
    let body = body.replace("attention::", &format!("attention::{prefix}"));
    let blocks = shape.queries.div_ceil(block) * attending.query_heads();
    let launched = entry(name, &arguments, &body, ([blocks, 1], threads, shared))?;
    let bytes = attending.bytes();
    let operands = [bytes.q, bytes.k, bytes.v].into_iter().chain(bytes.mask).chain([bytes.o, bytes.lse]);
    let terms = Heads::new(shape, dtype, mask, false).map(Terms::Attention);
    Ok(Source { terms, ..source(attending.text(name), vec![launched], 0, operands.collect()) })
}

/// dQ, dK and dV, laid out as Q, K and V, from dO, Q, K, V, O, Lse and the mask. dO is laid out as O.
/// Errors: operands that the kernel does not take.
pub fn backward(shape: &Shape, dtype: DType, mask: MaskKind, name: &str) -> Result<Source, String> {
    let attending = Attending::new(shape, dtype, mask)?;
    let Attending { stored, computed, .. } = attending;
    let inputs = [("dy", stored), ("q", stored), ("k", stored), ("v", stored), ("o", stored), ("lse", computed)];
    let outputs = [("dq", stored), ("dk", stored), ("dv", stored), ("workspace", computed)];
    let arguments = attending.arguments(&inputs, &outputs);
    let masked = attending.mask_argument();
    let Pass { prefix, block, threads, shared, .. } = attending.backward;
    let launch =
        |function: &str, given: &str, (blocks, threads, shared): (usize, usize, usize)| -> Result<(String, Launch), String> {
            let body = format!("    attention::{function}<{name}_shape>({given});\n");
            let entry_name = format!("{name}_{}", function.trim_start_matches(prefix).trim_start_matches("backward_"));
            entry(&entry_name, &arguments, &body, ([blocks, 1], threads, shared))
        };
    let rows = attending.query_heads() * shape.queries;
    let key_blocks = shape.keys.div_ceil(block) * shape.batch * shape.heads;
    let query_blocks = shape.queries.div_ceil(block) * attending.query_heads();
    let [of_keys, of_queries] = ["keys", "queries"].map(|what| format!("{prefix}backward_{what}"));
    let read = format!("dy, q, k, v, lse, {masked}");
    let launches = vec![
        launch("dots", "dy, o, workspace", (rows.div_ceil(THREADS / attending.dot_lanes()), THREADS, 0))?,
        launch(&of_keys, &format!("{read}, dk, dv, workspace"), (key_blocks, threads, shared))?,
        launch(&of_queries, &format!("{read}, dq, workspace"), (query_blocks, threads, shared))?,
    ];
    let bytes = attending.bytes();
    let read = [bytes.o, bytes.q, bytes.k, bytes.v, bytes.o, bytes.lse].into_iter().chain(bytes.mask);
    let operands = read.chain([bytes.q, bytes.k, bytes.v]);
    let terms = Heads::new(shape, dtype, mask, true).map(Terms::Attention);
    let workspace = rows.max(1) * attending.computed_bytes;
    Ok(Source { terms, ..source(attending.text(name), launches, workspace, operands.collect()) })
}

/// Bytes of each operand.
struct Bytes {
    q: usize,
    k: usize,
    v: usize,
    o: usize,
    lse: usize,
    mask: Option<usize>,
}

/// An attention whose operands the text takes.
struct Attending<'a> {
    shape: &'a Shape,
    dtype: DType,
    mask: MaskKind,
    stored: &'static str,
    computed: &'static str,
    computed_bytes: usize,
    forward: Pass,
    backward: Pass,
}

/// How a pass runs, and the constants of its text.
struct Pass {
    prefix: &'static str,
    /// Queries, or keys, of a block.
    block: usize,
    threads: usize,
    /// Bytes of shared memory.
    shared: usize,
    constants: Vec<(&'static str, usize)>,
}

impl<'a> Attending<'a> {
    fn new(shape: &'a Shape, dtype: DType, mask: MaskKind) -> Result<Attending<'a>, String> {
        let (computed, bytes) = match dtype {
            DType::F64 => ("double", 8),
            DType::F32 | DType::F16 | DType::BF16 => ("float", 4),
            other => return Err(format!("no attention of {}", other.name())),
        };
        let widest = shape.channels.max(shape.values);
        if widest > MAX_CHANNELS {
            return Err(format!("attention heads of {widest} channels: a GPU takes {MAX_CHANNELS}"));
        }
        let operands = [
            (&shape.q, shape.queries, shape.channels),
            (&shape.k, shape.keys, shape.channels),
            (&shape.v, shape.keys, shape.values),
            (&shape.o, shape.queries, shape.values),
        ];
        let packed =
            operands.iter().all(|(strides, positions, channels)| pack(shape, dtype, strides, *positions, *channels) == 8);
        let (forward, backward) = if dtype.bytes() == 2 && packed && widest <= TENSOR_CHANNELS {
            (tensor_forward(shape, mask), tensor_backward(shape, mask))
        } else {
            let tiles = Tiles::new(shape, bytes);
            (tiles.forward(shape.queries), tiles.backward(shape.queries.max(shape.keys)))
        };
        Ok(Attending { shape, dtype, mask, stored: stored(dtype), computed, computed_bytes: bytes, forward, backward })
    }

    fn query_heads(&self) -> usize {
        self.shape.batch * self.shape.heads * self.shape.groups
    }

    /// Threads that share a query's sum of dO times O.
    fn dot_lanes(&self) -> usize {
        let s = self.shape;
        s.values.div_ceil(pack(s, self.dtype, &s.o, s.queries, s.values)).next_power_of_two().clamp(1, 32)
    }

    /// Elements from the first to the last of an operand.
    fn reach(&self, strides: &Strides, positions: usize, channels: usize) -> usize {
        let sizes = [self.shape.batch, self.shape.heads, self.shape.groups, positions, channels];
        let strides = [strides.batch, strides.head, strides.group, strides.position, strides.channel];
        if sizes.contains(&0) {
            0
        } else {
            1 + sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
        }
    }

    fn bytes(&self) -> Bytes {
        let s = self.shape;
        let of =
            |strides: &Strides, positions, channels| self.reach(strides, positions, channels) * self.dtype.bytes() as usize;
        let mask_bytes = match self.mask {
            MaskKind::None => None,
            MaskKind::Additive => Some(self.computed_bytes),
            MaskKind::Boolean => Some(1),
        };
        Bytes {
            q: of(&s.q, s.queries, s.channels),
            k: of(&s.k, s.keys, s.channels),
            v: of(&s.v, s.keys, s.values),
            o: of(&s.o, s.queries, s.values),
            lse: self.reach(&s.lse, s.queries, 1) * self.computed_bytes,
            mask: mask_bytes.map(|bytes| bytes * self.reach(&s.mask, s.queries, s.keys)),
        }
    }

    fn arguments(&self, inputs: &[(&str, &str)], outputs: &[(&str, &str)]) -> String {
        let mask = (self.mask != MaskKind::None).then(|| ("mask", self.mask_type()));
        let inputs = inputs.iter().copied().chain(mask).map(|(name, ty)| format!("const {ty}* {name}"));
        let outputs = outputs.iter().map(|(name, ty)| format!("{ty}* {name}"));
        inputs.chain(outputs).collect::<Vec<_>>().join(", ")
    }

    fn mask_type(&self) -> &'static str {
        if self.mask == MaskKind::Boolean { "unsigned char" } else { self.computed }
    }

    fn mask_argument(&self) -> String {
        if self.mask == MaskKind::None { format!("(const {}*)nullptr", self.mask_type()) } else { "mask".to_owned() }
    }

    /// The kernels' text and the shape that specialises it.
    fn text(&self, name: &str) -> String {
        let Attending { shape: s, stored, computed, .. } = self;
        let ints = [
            ("BATCH", s.batch),
            ("HEADS", s.heads),
            ("GROUPS", s.groups),
            ("QUERIES", s.queries),
            ("KEYS", s.keys),
            ("CHANNELS", s.channels),
            ("VALUES", s.values),
            ("DOT_LANES", self.dot_lanes()),
            (
                "MASK",
                [MaskKind::None, MaskKind::Additive, MaskKind::Boolean].iter().position(|kind| *kind == self.mask).unwrap_or(0),
            ),
        ];
        let ints = ints.iter().chain(&self.forward.constants).chain(&self.backward.constants);
        let ints: String = ints.map(|(name, value)| format!("    static constexpr int {name} = {value};\n")).collect();
        let layouts = [
            self.layout("q", &s.q, s.queries, s.channels),
            self.layout("k", &s.k, s.keys, s.channels),
            self.layout("v", &s.v, s.keys, s.values),
            self.layout("o", &s.o, s.queries, s.values),
            self.layout("lse", &s.lse, s.queries, 1),
            self.layout("mask", &s.mask, s.queries, s.keys),
        ];
        let texts = if self.forward.prefix.is_empty() { TEXT.to_owned() } else { TENSOR[0].to_owned() + TEXT + TENSOR[1] };
        format!(
            "{texts}struct {name}_shape {{\n    typedef {stored} Stored;\n    typedef {computed} Computed;\n    typedef {} Mask;\n{ints}    \
             static constexpr bool CAUSAL = {};\n    static constexpr long long OFFSET = {};\n    \
             __device__ static constexpr double scale() {{ return {:?}; }}\n{}}};\n",
            self.mask_type(),
            s.causal.is_some(),
            s.causal.unwrap_or(0),
            s.scale,
            layouts.concat()
        )
    }

    /// An operand's strides, and how many of its channels one instruction moves.
    fn layout(&self, name: &str, strides: &Strides, positions: usize, channels: usize) -> String {
        let Strides { batch, head, group, position, channel } = *strides;
        let pack = pack(self.shape, self.dtype, strides, positions, channels);
        let strides = [("BATCH", batch), ("HEAD", head), ("GROUP", group), ("POSITION", position), ("CHANNEL", channel)];
        let strides: Vec<String> = strides.iter().map(|(name, stride)| format!("{name} = {stride}")).collect();
        let strides = strides.join(", ");
        format!("    struct {name} {{ static constexpr long long {strides}; static constexpr int PACK = {pack}; }};\n")
    }
}

/// How many channels of an operand one instruction moves.
fn pack(s: &Shape, dtype: DType, strides: &Strides, positions: usize, channels: usize) -> usize {
    let others = [(s.batch, strides.batch), (s.heads, strides.head), (s.groups, strides.group), (positions, strides.position)];
    let even = |pack: &usize| {
        channels.is_multiple_of(*pack) && others.iter().all(|(size, stride)| *size <= 1 || stride.is_multiple_of(*pack))
    };
    let most = 16 / dtype.bytes() as usize;
    let packs = [most, most / 2, most / 4, 1].into_iter().filter(|pack| *pack > 0);
    if strides.channel == 1 { packs.into_iter().find(even).unwrap_or(1) } else { 1 }
}

/// Tiles of `attention.cuh`.
struct Tiles {
    /// Bytes of a computed number.
    computed: usize,
    channels_apart: usize,
    values_apart: usize,
}

impl Tiles {
    fn new(shape: &Shape, computed: usize) -> Tiles {
        // An odd number of packs: neighbouring rows begin in other banks.
        let apart = |width: usize| (width.div_ceil(16 / computed) | 1) * (16 / computed);
        Tiles { computed, channels_apart: apart(shape.channels), values_apart: apart(shape.values) }
    }

    fn scores_bytes(&self, block: usize) -> usize {
        block * (block + 16 / self.computed) * self.computed
    }

    /// Queries, keys or values, probabilities.
    fn forward_bytes(&self, block: usize) -> usize {
        let rows = self.channels_apart + self.channels_apart.max(self.values_apart);
        block * rows * self.computed + self.scores_bytes(block)
    }

    /// Queries, their gradients, keys, values, a block of scores, and two numbers a query.
    fn backward_bytes(&self, block: usize) -> usize {
        block * (2 * (self.channels_apart + self.values_apart) + 2) * self.computed + self.scores_bytes(block)
    }

    fn forward(&self, positions: usize) -> Pass {
        let block = block(positions, |block| self.forward_bytes(block));
        let constants =
            vec![("FORWARD_BLOCK", block), ("CHANNELS_APART", self.channels_apart), ("VALUES_APART", self.values_apart)];
        Pass { prefix: "", block, threads: THREADS, shared: self.forward_bytes(block), constants }
    }

    fn backward(&self, positions: usize) -> Pass {
        let block = block(positions, |block| self.backward_bytes(block));
        Pass {
            prefix: "",
            block,
            threads: THREADS,
            shared: self.backward_bytes(block),
            constants: vec![("BACKWARD_BLOCK", block)],
        }
    }
}

/// The most queries or keys of a block whose tiles fit, and not many more than there are.
fn block(positions: usize, bytes: impl Fn(usize) -> usize) -> usize {
    [64, 32].into_iter().find(|block| bytes(*block) <= SHARED && positions * 2 > *block).unwrap_or(16)
}

/// Threads of `attention_tensor.cuh`.
const TENSOR_THREADS: usize = 128;

/// Bytes of a row of channels and one of values.
fn tensor_row_bytes(shape: &Shape) -> usize {
    [shape.channels, shape.values].iter().map(|width| (width.next_multiple_of(16) + 8) * 2).sum()
}

fn tensor_forward(shape: &Shape, mask: MaskKind) -> Pass {
    let (narrow, masked) = (shape.channels.max(shape.values) <= 64, mask != MaskKind::None);
    // Each warp has so many times 16 queries, for which it reads keys and values once; as many as registers have room for.
    let height = if shape.queries > 64 && (narrow || !masked) { 2 } else { 1 };
    let step = if narrow && !masked { 64 } else { 32 };
    let block = 64 * height;
    let shared = block * (shape.channels.next_multiple_of(16) + 8) * 2 + 2 * step * tensor_row_bytes(shape);
    let constants = vec![("FORWARD_HEIGHT", height), ("FORWARD_STEP", step)];
    Pass { prefix: "tensor_", block, threads: TENSOR_THREADS, shared, constants }
}

fn tensor_backward(shape: &Shape, mask: MaskKind) -> Pass {
    let (narrow, long) = (shape.channels.max(shape.values) <= 64, shape.queries.max(shape.keys) > 64);
    let masked = mask != MaskKind::None;
    let height = if narrow && long && !masked { 2 } else { 1 };
    let step = match (narrow, masked) {
        (true, false) if height == 1 => 64,
        (false, true) => 16,
        _ => 32,
    };
    let block = 64 * height;
    let shared = (block + 2 * step) * tensor_row_bytes(shape) + 4 * step * 4;
    let constants = vec![("BACKWARD_HEIGHT", height), ("BACKWARD_STEP", step)];
    Pass { prefix: "tensor_", block, threads: TENSOR_THREADS, shared, constants }
}
