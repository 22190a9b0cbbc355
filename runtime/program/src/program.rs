//! The effectful half of dcc: what the ranks of one pipeline stage do in a step.
//!
//! A program is sections plus an order; its meaning is the sections inlined in that order. All ranks of a stage share it and
//! instantiate it from their mesh coordinates. Buffers are typed offsets into blocks of planned memory.

use crate::factors::FactorSpec;
use crate::kernel::{Kernel, Stmt};
use crate::mesh::{AxisId, Mesh};
use crate::types::{DType, Reduce, TensorType};
use crate::window::{Pool, Window};
use smallvec::SmallVec;
use std::cmp::Ordering;

/// Index into `Program::buffers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);
/// Pairs a `start` with its `wait`. Variants of a section repeat its tokens; the waits of a token match its starts in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub u32);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub name: String,
    pub mode: Mode,
    /// This program's stage and the number of stages (the size of `pp`).
    pub stage: u32,
    pub stages: u32,
    pub mesh: Mesh,
    pub persistent_bytes: u64,
    pub scratch_bytes: u64,
    pub areas: Vec<Area>,
    /// Sets of stages that sum a value between them: `group tied = pp{0,3}`.
    pub groups: Vec<StageGroup>,
    pub params: Vec<Param>,
    pub inputs: Vec<Input>,
    pub scalars: Vec<Scalar>,
    pub outputs: Vec<Output>,
    pub buffers: Vec<Buffer>,
    pub kernels: Vec<Kernel>,
    pub sections: Vec<Section>,
    pub order: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    Train,
    Eval,
}

/// Memory for values that cross sections: one region per slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// The section that defines its values and the last that reads them.
    pub from: SectionId,
    pub to: SectionId,
    /// Bytes of one slot.
    pub bytes: u64,
    pub slots: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageGroup {
    pub name: String,
    /// Ascending.
    pub stages: Vec<u32>,
}

/// Part of a tensor along one dim: `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Piece {
    pub dim: u8,
    pub start: u64,
    pub end: u64,
}

/// What a persistent tensor is to training.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamKind {
    /// A weight or constant tensor of the model.
    Weight,
    /// Optimizer or running state of that weight: `m`, `v`, `momentum`, …; starts at zero.
    State(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    pub buffer: BufferId,
    /// Initializer name in the model.
    pub name: String,
    pub kind: ParamKind,
    pub piece: Option<Piece>,
    /// Changed by the update section.
    pub trained: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// In an area; filled before the first section of its microbatch that reads it.
    pub buffer: BufferId,
    pub name: String,
}

/// Values that the runtime writes before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScalarKind {
    /// Learning rate, f32 or f64.
    LearningRate,
    /// Step number from 1, i64.
    Step,
    /// Random seed, i64.
    Seed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scalar {
    pub buffer: BufferId,
    pub kind: ScalarKind,
}

/// A result that the runtime reads after a step (train: `loss`, `grad_norm`, …) or a microbatch (eval: graph outputs).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub buffer: BufferId,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub ty: TensorType,
    pub place: Place,
    /// Bytes from the start of the block (of the slot, in an area).
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Parameters, optimizer state, accumulators, scalars, values of `begin` and `ready`.
    Persistent,
    /// Within one section.
    Scratch,
    /// Index into `Program::areas`.
    Area(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SectionKind {
    /// Once per step, before all; depends on no batched input.
    Begin,
    /// Per microbatch, before `Ready`: what `forward` must know of the whole batch.
    Count,
    /// Once per step, after all of `Count`.
    Ready,
    Forward,
    Backward,
    /// The backward pass in halves: what the stage before waits for, then what only the update does.
    BackwardInput,
    BackwardWeight,
    /// Once per step, after all microbatches.
    Update,
}

/// Which section: what it does, and in which of the stage's chunks, parts of the model with stages of the pipeline in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SectionId {
    pub kind: SectionKind,
    /// 0 but for forward and backward.
    pub chunk: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub kind: SectionKind,
    pub chunk: u32,
    pub body: Vec<Instr>,
}

/// One execution of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index into `Program::sections`.
    pub section: u32,
    pub microbatch: u32,
    /// Slot of each area in this execution.
    pub slots: SmallVec<[u32; 4]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instr {
    pub results: SmallVec<[BufferId; 1]>,
    pub action: Action,
    pub operands: SmallVec<[BufferId; 4]>,
    /// Where it comes from in the model; a comment.
    pub origin: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Runs `Program::kernels[n]` with its outputs in `results`, its inputs in `operands`.
    Kernel(u32),
    Library(Library),
    /// Starts a transfer from the operand (none for `Recv`) to the result (none for `Send`); neither may be touched until its
    /// `Wait`. A collective over axes may take several operands, up to `MOST_TENSORS`, each to the result in its place.
    Start {
        token: TokenId,
        transfer: Transfer,
    },
    Wait(TokenId),
}

/// Tensors that one transfer may move at most.
pub const MOST_TENSORS: usize = 32;

/// Whether a library kernel overwrites its result or adds to it.
pub use crate::kernel::StoreMode;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Library {
    /// `Σ` over factors missing from the result of the product of both operands.
    Dot { spec: FactorSpec, mode: StoreMode },
    /// As a dot, over those triples of image, output and tap that each window relates. Which of the three the result has makes it
    /// a convolution, the gradient of its image (a transposed convolution) or the gradient of its kernel.
    Convolution { spec: FactorSpec, windows: Vec<Window>, mode: StoreMode },
    /// Results: the greatest element of each window, NaN if it has one; where it is in `x` (the first of equal ones, the last NaN),
    /// i32, -1 for a window without elements.
    MaxPool(Pool),
    /// Adds rows of operand 1 into a zeroed (or, accumulating, existing) result at the indices of operand 0. `indexed` is the
    /// result's factor that operand 0's values select; indices outside of the shard are dropped.
    ScatterAdd { spec: FactorSpec, indexed: String, mode: StoreMode },
    /// Results O, Lse of operands Q, K, V and, if `mask` says so, an additive or boolean mask.
    Attention(Attention),
    /// Results dQ, dK, dV of operands dO, Q, K, V, O, Lse and the mask.
    AttentionGrad(Attention),
    /// Running sum along `dim`.
    Cumsum { dim: u8, exclusive: bool, reverse: bool },
    /// The indices, i64, of the `k` first elements along `dim`, in order: from the largest or the smallest, of equal ones the first
    /// first, NaN above all others.
    TopK { dim: u8, k: u64, largest: bool },
    /// The same elements under another shape; no work where operand and result share their place.
    Reshape { spec: FactorSpec },
    /// The same bytes in another buffer of the same type.
    Copy,
    /// All elements zero: an accumulator in `begin`, to which each microbatch adds that many terms.
    Zero { terms: u32 },
    /// `+mb` becomes whole: the accumulator after its last addition. Operand and result share their place.
    ResolveMicrobatches,
    /// Rank's own block of a whole dim; the result's dim gains `axis` as its last.
    SliceAxis { axis: AxisId, dim: u8 },
    /// Whole → pending: coordinate 0 of `axis` keeps the value, the others zero it.
    KeepFirst { axis: AxisId },
    /// A `/mb` dim loses its axis; only where `mb` is 1. Operand and result share their place.
    DropMicrobatch { dim: u8 },
}

/// Scaled dot-product attention. Factors: b batch, h query heads (`g` groups per key head where fewer), t queries, s keys, e
/// head dim, f value head dim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Attention {
    /// Q, K, V (, mask) -> O; Lse has O's factors without `f`.
    pub spec: FactorSpec,
    pub causal: bool,
    pub mask: MaskKind,
    /// f64 bits of the factor on Q·K.
    pub scale: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskKind {
    None,
    /// Added to the scores.
    Additive,
    /// True keeps.
    Boolean,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Pending over `axes` → whole.
    AllReduce {
        reduce: Reduce,
        axes: SmallVec<[AxisId; 2]>,
    },
    /// Pending sum over `axis` → `axis` last on `dim`.
    ReduceScatter {
        axis: AxisId,
        dim: u8,
    },
    /// The last axis of `dim` → whole.
    AllGather {
        axis: AxisId,
        dim: u8,
    },
    /// The last axis of `from` → last on `to`.
    AllToAll {
        axis: AxisId,
        from: u8,
        to: u8,
    },
    /// To the rank with the same other coordinates on stage `to`. Messages of one lane arrive in the order in which they are sent.
    Send {
        to: u32,
        lane: u32,
    },
    Recv {
        from: u32,
        lane: u32,
    },
    /// Sum over the stages of `Program::groups[group]`, whole on each of them.
    StageSum {
        group: u32,
        reduce: Reduce,
    },
}

impl Program {
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    pub fn ty(&self, id: BufferId) -> &TensorType {
        &self.buffer(id).ty
    }

    /// Whether an action adds to its result `n`, rather than overwriting it.
    pub fn accumulates(&self, action: &Action, n: usize) -> bool {
        let adds = |s: &Stmt| matches!(s, Stmt::Store { output, mode: StoreMode::Accumulate, .. } if *output as usize == n);
        match action {
            Action::Kernel(k) => self.kernels[*k as usize].body.iter().any(adds),
            Action::Library(
                Library::Dot { mode, .. } | Library::ScatterAdd { mode, .. } | Library::Convolution { mode, .. },
            ) => *mode == StoreMode::Accumulate,
            _ => false,
        }
    }
}

impl Section {
    pub fn id(&self) -> SectionId {
        SectionId { kind: self.kind, chunk: self.chunk }
    }
}

impl SectionId {
    /// `forward`, or `forward:1` in the second chunk.
    pub fn name(self) -> String {
        match self.chunk {
            0 => self.kind.name().to_owned(),
            chunk => format!("{}:{chunk}", self.kind.name()),
        }
    }
}

impl From<SectionKind> for SectionId {
    fn from(kind: SectionKind) -> SectionId {
        SectionId { kind, chunk: 0 }
    }
}

/// As a microbatch meets them: backward from the last chunk to the first.
impl Ord for SectionId {
    fn cmp(&self, other: &SectionId) -> Ordering {
        let chunks = self.chunk.cmp(&other.chunk);
        self.kind.cmp(&other.kind).then(if self.kind.is_backward() { chunks.reverse() } else { chunks })
    }
}

impl PartialOrd for SectionId {
    fn partial_cmp(&self, other: &SectionId) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl ScalarKind {
    pub const ALL: [ScalarKind; 3] = [ScalarKind::LearningRate, ScalarKind::Step, ScalarKind::Seed];

    pub fn name(self) -> &'static str {
        match self {
            ScalarKind::LearningRate => "lr",
            ScalarKind::Step => "step",
            ScalarKind::Seed => "seed",
        }
    }

    /// `float` is the dtype of training.
    pub fn dtype(self, float: DType) -> DType {
        match self {
            ScalarKind::LearningRate => float,
            ScalarKind::Step | ScalarKind::Seed => DType::I64,
        }
    }
}

impl SectionKind {
    pub const ALL: [SectionKind; 8] = [
        SectionKind::Begin,
        SectionKind::Count,
        SectionKind::Ready,
        SectionKind::Forward,
        SectionKind::Backward,
        SectionKind::BackwardInput,
        SectionKind::BackwardWeight,
        SectionKind::Update,
    ];

    pub fn name(self) -> &'static str {
        match self {
            SectionKind::Begin => "begin",
            SectionKind::Count => "count",
            SectionKind::Ready => "ready",
            SectionKind::Forward => "forward",
            SectionKind::Backward => "backward",
            SectionKind::BackwardInput => "backward_input",
            SectionKind::BackwardWeight => "backward_weight",
            SectionKind::Update => "update",
        }
    }

    /// Runs once per microbatch.
    pub fn is_per_microbatch(self) -> bool {
        matches!(self, SectionKind::Count | SectionKind::Forward) || self.is_backward()
    }

    /// Each chunk has its own.
    pub fn is_pass(self) -> bool {
        self == SectionKind::Forward || self.is_backward()
    }

    /// The backward pass or a half of it.
    pub fn is_backward(self) -> bool {
        matches!(self, SectionKind::Backward | SectionKind::BackwardInput | SectionKind::BackwardWeight)
    }
}
