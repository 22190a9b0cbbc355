//! One pass over a tile in vector registers: machine code of straight-line arithmetic, comparisons and choices on f32, for processors with
//! vectors of 256 or 512 bits.
//!
//! Primitives do one operation a pass, through the first-level cache; this does many, and passes between them nothing but registers. The
//! generator of the code around it has no such vectors. Elements are computed `LANES` at a time, as primitives do, with the same bits.
//!
//! The function takes what a primitive takes, of which two count: the address of a table of pointers, and the number of elements.
//! (Encodings: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, sections 2.3 and 2.7; the calling convention is that
//! of the System V ABI.)

mod avx2;
mod avx512;
mod code;

use super::isa::Isa;
use code::{Code, POINTERS, RCX, VOLATILE};
use dcc_program::kernel::{BinaryOp, CompareOp, Expr, ExprId, UnaryOp};
use smallvec::SmallVec;

/// The value of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lane(usize);

/// An entry of the table of pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pointer(pub usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
}

impl Arithmetic {
    fn of(op: BinaryOp) -> Option<Arithmetic> {
        match op {
            BinaryOp::Add => Some(Arithmetic::Add),
            BinaryOp::Sub => Some(Arithmetic::Sub),
            BinaryOp::Mul => Some(Arithmetic::Mul),
            BinaryOp::Div => Some(Arithmetic::Div),
            _ => None,
        }
    }

    /// The code of its instruction, beside that of `add`.
    fn code(self) -> u8 {
        match self {
            Arithmetic::Add => 0x58,
            Arithmetic::Mul => 0x59,
            Arithmetic::Sub => 0x5c,
            Arithmetic::Div => 0x5e,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The elements of a tile.
    Load(Pointer),
    /// Which of a tile of bool are not zero.
    LoadMask(Pointer),
    /// One element, repeated.
    Splat(Pointer),
    Compute(Arithmetic, Lane, Lane),
    Negate(Lane),
    Root(Lane),
    Compare(CompareOp, Lane, Lane),
    /// Where the first holds the second, else the third.
    Select(Lane, Lane, Lane),
    /// Elements become those of a tile.
    Store(Pointer, Lane),
    /// The same of a tile of bool.
    StoreMask(Pointer, Lane),
    /// One element plus the sum of all, in the order of `reduce`.
    Sum(Pointer, Lane),
}

impl Step {
    /// The values that it reads, each once.
    fn reads(&self) -> SmallVec<[Lane; 3]> {
        let mut read: SmallVec<[Lane; 3]> = match *self {
            Step::Load(_) | Step::LoadMask(_) | Step::Splat(_) => SmallVec::new(),
            Step::Negate(x) | Step::Root(x) | Step::Store(_, x) | Step::StoreMask(_, x) | Step::Sum(_, x) => [x][..].into(),
            Step::Compute(_, x, y) | Step::Compare(_, x, y) => [x, y][..].into(),
            Step::Select(c, x, y) => [c, x, y][..].into(),
        };
        read.dedup();
        read
    }

    /// Whether it makes a vector that is free again behind its last reader.
    fn makes_vector(&self) -> bool {
        matches!(self, Step::Load(_) | Step::Compute(..) | Step::Negate(_) | Step::Root(_) | Step::Select(..))
    }

    fn makes_mask(&self) -> bool {
        matches!(self, Step::LoadMask(_) | Step::Compare(..))
    }

    /// The tile that it reads or writes.
    fn tile(&self) -> Option<Pointer> {
        match *self {
            Step::Load(at) | Step::LoadMask(at) | Step::Store(at, _) | Step::StoreMask(at, _) => Some(at),
            _ => None,
        }
    }
}

/// Whether lines compute it, if what it consists of is of f32, and what it compares or chooses by of bool.
pub(super) fn is_arithmetic(expr: &Expr) -> bool {
    match expr {
        Expr::Unary(op, _) => matches!(op, UnaryOp::Neg | UnaryOp::Sqrt),
        Expr::Binary(op, ..) => Arithmetic::of(*op).is_some(),
        Expr::Compare(..) | Expr::Select(..) => true,
        _ => false,
    }
}

/// What is done to each element of some tiles, in order. A store to a tile comes behind all loads from it.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    steps: Vec<Step>,
}

impl Line {
    fn add(&mut self, step: Step) -> Lane {
        self.steps.push(step);
        Lane(self.steps.len() - 1)
    }

    pub fn load(&mut self, from: Pointer) -> Lane {
        self.add(Step::Load(from))
    }

    pub fn load_mask(&mut self, from: Pointer) -> Lane {
        self.add(Step::LoadMask(from))
    }

    pub fn splat(&mut self, from: Pointer) -> Lane {
        self.add(Step::Splat(from))
    }

    /// The value of `expr` from those of what it reads; none where it is not arithmetic.
    pub fn compute(&mut self, expr: &Expr, lane: impl Fn(ExprId) -> Lane) -> Option<Lane> {
        let step = match *expr {
            Expr::Unary(UnaryOp::Neg, x) => Step::Negate(lane(x)),
            Expr::Unary(UnaryOp::Sqrt, x) => Step::Root(lane(x)),
            Expr::Binary(op, x, y) => Step::Compute(Arithmetic::of(op)?, lane(x), lane(y)),
            Expr::Compare(op, x, y) => Step::Compare(op, lane(x), lane(y)),
            Expr::Select(c, x, y) => Step::Select(lane(c), lane(x), lane(y)),
            _ => return None,
        };
        Some(self.add(step))
    }

    pub fn store(&mut self, to: Pointer, x: Lane) {
        self.add(Step::Store(to, x));
    }

    pub fn store_mask(&mut self, to: Pointer, x: Lane) {
        self.add(Step::StoreMask(to, x));
    }

    pub fn sum(&mut self, to: Pointer, x: Lane) {
        self.add(Step::Sum(to, x));
    }

    /// The function; none where the instructions or the registers do not suffice.
    pub fn code(&self, isa: Isa) -> Option<Vec<u8>> {
        match isa {
            _ if !isa.has_lines() => None,
            _ if isa.has_avx512() => self.code_of::<avx512::Avx512>(),
            _ => self.code_of::<avx2::Avx2>(),
        }
    }

    fn code_of<V: Vectors>(&self) -> Option<Vec<u8>> {
        let places = Places::of(self, &V::REGISTERS)?;
        let mut code = Code::default();
        let kept = &places.pointers[VOLATILE.min(places.pointers.len())..];
        kept.iter().for_each(|(_, register)| code.push(*register));
        places.pointers.iter().for_each(|(pointer, register)| code.read_table(*register, *pointer));
        V::before(self, &places, &mut code);
        let none = code.begin_loop();
        let again = code.len();
        V::all(self, &places, &mut code);
        code.end_loop(again);
        code.land(none, code.len());
        let done = code.count_tail();
        V::tail(self, &places, &mut code);
        code.land(done, code.len());
        V::behind(self, &places, &mut code);
        kept.iter().rev().for_each(|(_, register)| code.pop(*register));
        code.bytes(&[0xc5, 0xf8, 0x77, 0xc3]); // vzeroupper, ret
        Some(code.0)
    }
}

/// Instructions of one length of vectors.
trait Vectors {
    const REGISTERS: Registers;

    /// What is the same for all elements.
    fn before(line: &Line, places: &Places, code: &mut Code);
    /// All steps for the `LANES` elements from the index on.
    fn all(line: &Line, places: &Places, code: &mut Code);
    /// The same for those that are left, 1 to `LANES` - 1: as many as ecx says, and the low bits of the number of all elements. Changes rax
    /// and rcx.
    fn tail(line: &Line, places: &Places, code: &mut Code);
    /// Sums over the lanes, by halves, join their totals.
    fn behind(line: &Line, places: &Places, code: &mut Code);
}

/// What there is to compute in.
struct Registers {
    vectors: usize,
    /// Vectors that have `LANES` elements.
    parts: usize,
    /// Registers of masks for what is compared; where there are none, vectors hold that, and a tile of bool has no instructions.
    masks: std::ops::Range<u8>,
}

/// Where all values of a line are.
struct Places {
    /// The register of each step's value; of a sum the first of one for each part, of a store any, of a comparison that of a mask.
    values: Vec<u8>,
    /// The signs of all lanes, if something is negated.
    signs: Option<Vector>,
    /// Bytes that are true, if bool is stored, and what bool goes through.
    ones: Option<Vector>,
    bytes: Option<Vector>,
    /// Which lanes of a tail's vector there are, where no register of masks says that.
    tail: Option<Vector>,
    /// Registers of tiles' pointers, as far as they go.
    pointers: Vec<(Pointer, u8)>,
}

impl Places {
    fn of(line: &Line, registers: &Registers) -> Option<Places> {
        let (steps, in_vectors) = (&line.steps, registers.masks.is_empty());
        if in_vectors && steps.iter().any(|step| matches!(step, Step::LoadMask(_) | Step::StoreMask(..))) {
            return None;
        }
        let mut last = vec![0; steps.len()];
        for (n, step) in steps.iter().enumerate() {
            step.reads().iter().for_each(|lane| last[lane.0] = n);
        }
        let mut pinned = 0;
        let mut pin = |count: usize| {
            pinned += count;
            (pinned - count) as u8
        };
        let mut values = vec![0; steps.len()];
        for (step, value) in steps.iter().zip(&mut values) {
            match step {
                Step::Sum(..) => *value = pin(registers.parts),
                Step::Splat(_) => *value = pin(1),
                _ => {}
            }
        }
        let mut pin_for = |needs: &dyn Fn(&Step) -> bool| steps.iter().any(needs).then(|| Vector(pin(1)));
        let signs = pin_for(&|step| matches!(step, Step::Negate(_)));
        let ones = pin_for(&|step| matches!(step, Step::StoreMask(..)));
        let bytes = pin_for(&|step| matches!(step, Step::LoadMask(_) | Step::StoreMask(..)));
        let tail = pin_for(&|_| in_vectors);
        let mut free: Vec<u8> = (pinned..registers.vectors).rev().map(|n| n as u8).collect();
        let mut masks: Vec<u8> = registers.masks.clone().rev().collect();
        for (n, step) in steps.iter().enumerate() {
            // What was read for the last time leaves its register to the result.
            for lane in step.reads().iter().filter(|lane| last[lane.0] == n) {
                match &steps[lane.0] {
                    made if made.makes_vector() || in_vectors && made.makes_mask() => free.push(values[lane.0]),
                    made if made.makes_mask() => masks.push(values[lane.0]),
                    _ => {}
                }
            }
            match step {
                made if made.makes_vector() || in_vectors && made.makes_mask() => values[n] = free.pop()?,
                made if made.makes_mask() => values[n] = masks.pop()?,
                _ => {}
            }
        }
        let mut pointers: Vec<(Pointer, u8)> = vec![];
        for pointer in steps.iter().filter_map(Step::tile) {
            if let (Some(register), false) = (POINTERS.get(pointers.len()), pointers.iter().any(|known| known.0 == pointer)) {
                pointers.push((pointer, *register));
            }
        }
        (pinned <= registers.vectors).then_some(Places { values, signs, ones, bytes, tail, pointers })
    }

    /// The register that points to a tile, now.
    fn register(&self, pointer: Pointer, code: &mut Code) -> u8 {
        match self.pointers.iter().find(|known| known.0 == pointer) {
            Some(known) => known.1,
            None => {
                code.read_table(RCX, pointer);
                RCX
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Vector(u8);

/// The last operand of an instruction.
#[derive(Clone, Copy)]
enum Place {
    Vector(Vector),
    /// Where a register points to.
    At(u8),
    /// So many vectors behind where it points to and the index, of elements of two to this power bytes.
    Along(u8, u8, u8),
}

#[derive(Clone, Copy)]
enum Length {
    Quarter = 0,
    Half = 1,
    Whole = 2,
}

/// An instruction's prefix and code: the map of codes, the obligatory prefix, the width of its elements.
#[derive(Clone, Copy)]
struct Instruction {
    map: u8,
    prefix: u8,
    wide: u8,
    length: Length,
    code: u8,
}

impl Instruction {
    const fn new(map: u8, prefix: u8, wide: u8, length: Length, code: u8) -> Self {
        Instruction { map, prefix, wide, length, code }
    }

    const fn of(self, length: Length) -> Self {
        Instruction { length, ..self }
    }
}

/// Of a comparison that raises nothing; what is no number is unequal to all, and neither less nor more.
fn predicate(op: CompareOp) -> u8 {
    match op {
        CompareOp::Eq => 0x00,
        CompareOp::Ne => 0x04,
        CompareOp::Lt => 0x11,
        CompareOp::Le => 0x12,
        CompareOp::Ge => 0x1d,
        CompareOp::Gt => 0x1e,
    }
}
