//! Vectors of 512 bits, with masks.

use super::code::{Code, INDEX, RAX, RCX};
use super::{Instruction, Lane, Length, Line, Place, Places, Registers, Step, Vector, Vectors, predicate};
use crate::library::vector::LANES;

pub struct Avx512;

/// Elements of a vector.
const WIDTH: usize = 16;
// A loop's body is two vectors, with a mask each at the end.
const _: () = assert!(LANES == 2 * WIDTH);

impl Vectors for Avx512 {
    /// The two masks before those are of the tail's vectors.
    const REGISTERS: Registers = Registers { vectors: 32, parts: 2, masks: 3..8 };

    fn before(line: &Line, places: &Places, code: &mut Code) {
        for (step, register) in line.steps.iter().zip(&places.values) {
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

    fn all(line: &Line, places: &Places, code: &mut Code) {
        (0..2).for_each(|half| part(line, places, half, Mask::All, code));
    }

    fn tail(line: &Line, places: &Places, code: &mut Code) {
        code.masks();
        (0..2).for_each(|half| part(line, places, half, Mask::First(half + 1), code));
    }

    fn behind(line: &Line, places: &Places, code: &mut Code) {
        for (step, register) in line.steps.iter().zip(&places.values) {
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

/// One vector of each `LANES` elements.
fn part(line: &Line, places: &Places, half: u8, mask: Mask, code: &mut Code) {
    let value = |lane: &Lane| Vector(places.values[lane.0]);
    let chosen = |lane: &Lane| Mask::First(places.values[lane.0]);
    let bytes = || places.bytes.expect("a line with a tile of bool has it");
    for (n, step) in line.steps.iter().enumerate() {
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
            Step::Compute(op, x, y) => {
                code.evex(Instruction { code: op.code(), ..ADD }, to, value(x), Place::Vector(value(y)), Mask::All)
            }
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

impl Code {
    /// Mask registers 1 and 2: of the lanes that the low bits of ecx count, the first vector's and the second's.
    fn masks(&mut self) {
        self.bytes(&[0xb8, 1, 0, 0, 0]); // mov eax, 1
        self.bytes(&[0xd3, 0xe0]); // shl eax, cl
        self.bytes(&[0xff, 0xc8]); // dec eax
        self.bytes(&[0xc5, 0xf8, 0x92, 0xc8]); // kmovw k1, eax
        self.bytes(&[0xc1, 0xe8, WIDTH as u8]); // shr eax, WIDTH
        self.bytes(&[0xc5, 0xf8, 0x92, 0xd0]); // kmovw k2, eax
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
