//! One pass over a tile in vector registers: machine code of straight-line arithmetic, comparisons and choices on f32, for processors with
//! 512-bit vectors.
//!
//! Primitives do one operation a pass, through the first-level cache; this does many, and passes between them nothing but registers. The
//! generator of the code around it has no vectors as wide. Elements are computed `LANES` at a time, as primitives do, with the same bits.
//!
//! The function takes what a primitive takes, of which two count: the address of a table of pointers, and the number of elements.
//! (Encodings: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, sections 2.3 and 2.7; the calling convention is that
//! of the System V ABI.)

use crate::library::vector::LANES;
use dcc_program::kernel::{BinaryOp, CompareOp, Expr, ExprId, UnaryOp};
use smallvec::SmallVec;

/// Elements of a vector.
const WIDTH: usize = 16;
/// Vector registers.
const VECTORS: usize = 32;
// A loop's body is two vectors, with a mask each at the end.
const _: () = assert!(LANES == 2 * WIDTH);

/// Registers of masks: what is compared. The two before are those of the tail's vectors.
const MASKS: std::ops::Range<u8> = 3..8;

// General registers: r8 is the number of all elements.
const RAX: u8 = 0;
/// The count of a shift; in the loop, the pointer of a tile that has no register.
const RCX: u8 = 1;
/// The number of the elements at hand.
const INDEX: u8 = 6;
/// The table.
const TABLE: u8 = 7;
/// Those of tiles' pointers: what callers do not expect to find unchanged, then the others.
const POINTERS: [u8; 10] = [2, 9, 10, 11, 3, 5, 12, 13, 14, 15];
const VOLATILE: usize = 4;

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

    /// The function; none where the registers do not suffice.
    pub fn code(&self) -> Option<Vec<u8>> {
        let places = Places::of(self)?;
        let mut code = Code::default();
        let kept = &places.pointers[VOLATILE.min(places.pointers.len())..];
        kept.iter().for_each(|(_, register)| code.push(*register));
        places.pointers.iter().for_each(|(pointer, register)| code.read_table(*register, *pointer));
        self.before(&places, &mut code);
        code.bytes(&[0x31, 0xf6]); // xor esi, esi
        code.bytes(&[0x4c, 0x89, 0xc0]); // mov rax, r8
        code.bytes(&[0x48, 0x83, 0xe0, (LANES as i8).wrapping_neg() as u8]); // and rax, -LANES
        let none = code.jump(&[0x0f, 0x84]); // jz
        let again = code.0.len();
        (0..2).for_each(|half| self.body(&places, half, Mask::All, &mut code));
        code.bytes(&[0x48, 0x83, 0xc6, LANES as u8]); // add rsi, LANES
        code.bytes(&[0x48, 0x39, 0xc6]); // cmp rsi, rax
        let back = code.jump(&[0x0f, 0x82]); // jb
        code.land(back, again);
        code.land(none, code.0.len());
        code.bytes(&[0x44, 0x89, 0xc1]); // mov ecx, r8d
        code.bytes(&[0x83, 0xe1, LANES as u8 - 1]); // and ecx, LANES - 1
        let done = code.jump(&[0x0f, 0x84]); // jz
        code.masks();
        (0..2).for_each(|half| self.body(&places, half, Mask::First(half + 1), &mut code));
        code.land(done, code.0.len());
        self.behind(&places, &mut code);
        kept.iter().rev().for_each(|(_, register)| code.pop(*register));
        code.bytes(&[0xc5, 0xf8, 0x77, 0xc3]); // vzeroupper, ret
        Some(code.0)
    }

    /// What is the same for all elements.
    fn before(&self, places: &Places, code: &mut Code) {
        for (step, register) in self.steps.iter().zip(&places.values) {
            match step {
                Step::Splat(pointer) => {
                    code.read_table(RAX, *pointer);
                    code.evex(BROADCAST, Vector(*register), Vector(0), Place::At(RAX), Mask::All);
                }
                Step::Sum(..) => {
                    let [low, high] = [*register, register + 1].map(Vector);
                    code.evex(XOR, low, low, Place::Vector(low), Mask::All);
                    code.evex(XOR, high, high, Place::Vector(high), Mask::All);
                }
                _ => {}
            }
        }
        for (constant, instruction, vector) in [(1 << 31, BROADCAST_WORD, places.signs), (1, BROADCAST_BYTE, places.ones)] {
            let Some(vector) = vector else { continue };
            code.bytes(&[0xb8]); // mov eax, the sign of an f32, or true
            code.bytes(&u32::to_le_bytes(constant));
            code.evex(instruction, vector, Vector(0), Place::Vector(Vector(RAX)), Mask::All);
        }
    }

    /// One vector of each `LANES` elements.
    fn body(&self, places: &Places, half: u8, mask: Mask, code: &mut Code) {
        let value = |lane: &Lane| Vector(places.values[lane.0]);
        let chosen = |lane: &Lane| Mask::First(places.values[lane.0]);
        let bytes = || places.bytes.expect("a line with a tile of bool has it");
        for (n, step) in self.steps.iter().enumerate() {
            let to = value(&Lane(n));
            let tile = step.tile().map(|pointer| places.register(pointer, code));
            let [words, bools] = [2, 0].map(|scale| Place::Along(tile.unwrap_or(RCX), half, scale));
            match step {
                Step::Load(_) => code.evex(LOAD, to, Vector(0), words, mask.zeroing()),
                Step::Store(_, x) => code.evex(STORE, value(x), Vector(0), words, mask),
                Step::LoadMask(_) => {
                    code.evex(LOAD_BYTES, bytes(), Vector(0), bools, mask.zeroing());
                    code.evex(TEST_BYTES, to, bytes(), Place::Vector(bytes()), Mask::All);
                }
                Step::StoreMask(_, x) => {
                    let ones = Place::Vector(places.ones.expect("a line that stores bool has them"));
                    code.evex(LOAD_BYTES, bytes(), Vector(0), ones, chosen(x).zeroing());
                    code.evex(STORE_BYTES, bytes(), Vector(0), bools, mask);
                }
                Step::Splat(_) => {}
                Step::Compute(op, x, y) => code.evex(op.instruction(), to, value(x), Place::Vector(value(y)), Mask::All),
                Step::Negate(x) => {
                    let signs = Place::Vector(places.signs.expect("a line that negates has them"));
                    code.evex(XOR, to, value(x), signs, Mask::All);
                }
                Step::Root(x) => code.evex(ROOT, to, Vector(0), Place::Vector(value(x)), Mask::All),
                Step::Compare(op, x, y) => {
                    code.evex(COMPARE, to, value(x), Place::Vector(value(y)), Mask::All);
                    code.bytes(&[predicate(*op)]);
                }
                Step::Select(c, x, y) => code.evex(BLEND, to, value(y), Place::Vector(value(x)), chosen(c)),
                Step::Sum(_, x) => {
                    let sum = Vector(to.0 + half);
                    code.evex(ADD, sum, sum, Place::Vector(value(x)), mask);
                }
            }
        }
    }

    /// Sums over the lanes, by halves, join their totals.
    fn behind(&self, places: &Places, code: &mut Code) {
        for (step, register) in self.steps.iter().zip(&places.values) {
            let Step::Sum(pointer, _) = step else { continue };
            let [sum, other] = [*register, register + 1].map(Vector);
            let add = |code: &mut Code, length| code.evex(ADD.of(length), sum, sum, Place::Vector(other), Mask::All);
            add(code, Length::Whole);
            code.evex(UPPER_HALF, sum, Vector(0), Place::Vector(other), Mask::All);
            code.bytes(&[1]);
            add(code, Length::Half);
            code.evex(UPPER_QUARTER, sum, Vector(0), Place::Vector(other), Mask::All);
            code.bytes(&[1]);
            add(code, Length::Quarter);
            for order in [0b1110, 0b01] {
                code.evex(PERMUTE, other, Vector(0), Place::Vector(sum), Mask::All);
                code.bytes(&[order]);
                add(code, Length::Quarter);
            }
            code.read_table(RAX, *pointer);
            code.evex(ADD_ONE, sum, sum, Place::At(RAX), Mask::All);
            code.evex(STORE_ONE, sum, Vector(0), Place::At(RAX), Mask::All);
        }
    }
}

/// Where all values of a line are.
struct Places {
    /// The register of each step's value; of a sum the first of two, of a store any, of a comparison that of a mask.
    values: Vec<u8>,
    /// The signs of all lanes, if something is negated.
    signs: Option<Vector>,
    /// Bytes that are true, if bool is stored, and what bool goes through.
    ones: Option<Vector>,
    bytes: Option<Vector>,
    /// Registers of tiles' pointers, as far as they go.
    pointers: Vec<(Pointer, u8)>,
}

impl Places {
    fn of(line: &Line) -> Option<Places> {
        let steps = &line.steps;
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
                Step::Sum(..) => *value = pin(2),
                Step::Splat(_) => *value = pin(1),
                _ => {}
            }
        }
        let mut pin_for = |needs: &dyn Fn(&Step) -> bool| steps.iter().any(needs).then(|| Vector(pin(1)));
        let signs = pin_for(&|step| matches!(step, Step::Negate(_)));
        let ones = pin_for(&|step| matches!(step, Step::StoreMask(..)));
        let bytes = pin_for(&|step| matches!(step, Step::LoadMask(_) | Step::StoreMask(..)));
        let mut free: Vec<u8> = (pinned..VECTORS).rev().map(|n| n as u8).collect();
        let mut masks: Vec<u8> = MASKS.rev().collect();
        for (n, step) in steps.iter().enumerate() {
            // What was read for the last time leaves its register to the result.
            for lane in step.reads().iter().filter(|lane| last[lane.0] == n) {
                match &steps[lane.0] {
                    made if made.makes_vector() => free.push(values[lane.0]),
                    made if made.makes_mask() => masks.push(values[lane.0]),
                    _ => {}
                }
            }
            match step {
                made if made.makes_vector() => values[n] = free.pop()?,
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
        (pinned <= VECTORS).then_some(Places { values, signs, ones, bytes, pointers })
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

/// Which lanes an instruction changes.
#[derive(Clone, Copy)]
enum Mask {
    All,
    /// Those of a mask register.
    First(u8),
    /// The same; others become zero.
    OrZero(u8),
}

impl Mask {
    fn zeroing(self) -> Mask {
        match self {
            Mask::First(register) => Mask::OrZero(register),
            other => other,
        }
    }

    fn bits(self) -> u8 {
        match self {
            Mask::All => 0,
            Mask::First(register) => register,
            Mask::OrZero(register) => 0x80 | register,
        }
    }
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

const LOAD: Instruction = Instruction::new(1, 0, 0, Length::Whole, 0x10); // vmovups
const STORE: Instruction = Instruction::new(1, 0, 0, Length::Whole, 0x11);
const ADD: Instruction = Instruction::new(1, 0, 0, Length::Whole, 0x58); // vaddps
const ROOT: Instruction = Instruction::new(1, 0, 0, Length::Whole, 0x51); // vsqrtps
const XOR: Instruction = Instruction::new(1, 1, 0, Length::Whole, 0xef); // vpxord
const BROADCAST: Instruction = Instruction::new(2, 1, 0, Length::Whole, 0x18); // vbroadcastss
const BROADCAST_WORD: Instruction = Instruction::new(2, 1, 0, Length::Whole, 0x7c); // vpbroadcastd of a general register
const BROADCAST_BYTE: Instruction = Instruction::new(2, 1, 0, Length::Quarter, 0x7a); // vpbroadcastb of a general register
const LOAD_BYTES: Instruction = Instruction::new(1, 3, 0, Length::Quarter, 0x6f); // vmovdqu8
const STORE_BYTES: Instruction = Instruction::new(1, 3, 0, Length::Quarter, 0x7f);
const TEST_BYTES: Instruction = Instruction::new(2, 1, 0, Length::Quarter, 0x26); // vptestmb
const COMPARE: Instruction = Instruction::new(1, 0, 0, Length::Whole, 0xc2); // vcmpps
const BLEND: Instruction = Instruction::new(2, 1, 0, Length::Whole, 0x65); // vblendmps
const UPPER_HALF: Instruction = Instruction::new(3, 1, 1, Length::Whole, 0x1b); // vextractf64x4
const UPPER_QUARTER: Instruction = Instruction::new(3, 1, 0, Length::Half, 0x19); // vextractf32x4
const PERMUTE: Instruction = Instruction::new(3, 1, 0, Length::Quarter, 0x04); // vpermilps
const ADD_ONE: Instruction = Instruction::new(1, 2, 0, Length::Quarter, 0x58); // vaddss
const STORE_ONE: Instruction = Instruction::new(1, 2, 0, Length::Quarter, 0x11); // vmovss

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

    fn instruction(self) -> Instruction {
        let code = match self {
            Arithmetic::Add => 0x58,
            Arithmetic::Mul => 0x59,
            Arithmetic::Sub => 0x5c,
            Arithmetic::Div => 0x5e,
        };
        Instruction { code, ..ADD }
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

/// A displacement of a jump that is not known yet: where it stands.
struct Jump(usize);

#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn push(&mut self, register: u8) {
        self.short(0x50, register);
    }

    fn pop(&mut self, register: u8) {
        self.short(0x58, register);
    }

    fn short(&mut self, code: u8, register: u8) {
        if register >= 8 {
            self.bytes(&[0x41]);
        }
        self.bytes(&[code | register & 7]);
    }

    /// register = table[pointer]
    fn read_table(&mut self, register: u8, pointer: Pointer) {
        self.bytes(&[0x48 | register >> 3 << 2, 0x8b, 0x80 | (register & 7) << 3 | TABLE]);
        self.bytes(&(8 * pointer.0 as u32).to_le_bytes());
    }

    /// Mask registers 1 and 2: of the lanes that the low bits of ecx count, the first vector's and the second's.
    fn masks(&mut self) {
        self.bytes(&[0xb8, 1, 0, 0, 0]); // mov eax, 1
        self.bytes(&[0xd3, 0xe0]); // shl eax, cl
        self.bytes(&[0xff, 0xc8]); // dec eax
        self.bytes(&[0xc5, 0xf8, 0x92, 0xc8]); // kmovw k1, eax
        self.bytes(&[0xc1, 0xe8, WIDTH as u8]); // shr eax, WIDTH
        self.bytes(&[0xc5, 0xf8, 0x92, 0xd0]); // kmovw k2, eax
    }

    fn jump(&mut self, code: &[u8]) -> Jump {
        self.bytes(code);
        self.bytes(&[0; 4]);
        Jump(self.0.len() - 4)
    }

    fn land(&mut self, jump: Jump, at: usize) {
        let distance = (at as i64 - (jump.0 as i64 + 4)) as i32;
        self.0[jump.0..jump.0 + 4].copy_from_slice(&distance.to_le_bytes());
    }

    /// An instruction of vectors: its first operand, the second (register 0 where it has none) and the last.
    fn evex(&mut self, instruction: Instruction, to: Vector, from: Vector, last: Place, mask: Mask) {
        let bit = |register: u8, n: u8| !(register >> n) & 1;
        let (extended, base) = match last {
            Place::Vector(Vector(n)) => (bit(n, 4), bit(n, 3)),
            Place::At(register) | Place::Along(register, ..) => (1, bit(register, 3)),
        };
        let Instruction { map, prefix, wide, length, code } = instruction;
        self.bytes(&[
            0x62,
            bit(to.0, 3) << 7 | extended << 6 | base << 5 | bit(to.0, 4) << 4 | map,
            wide << 7 | (!from.0 & 15) << 3 | 1 << 2 | prefix,
            mask.bits() | (length as u8) << 5 | bit(from.0, 4) << 3,
            code,
        ]);
        let first = (to.0 & 7) << 3;
        match last {
            Place::Vector(Vector(n)) => self.bytes(&[0xc0 | first | n & 7]),
            // A displacement of one byte, which counts operands, and an index or none.
            Place::At(register) => self.bytes(&[0x44 | first, 4 << 3 | register & 7, 0]),
            Place::Along(register, vectors, scale) => {
                self.bytes(&[0x44 | first, scale << 6 | INDEX << 3 | register & 7, vectors]);
            }
        }
    }
}
