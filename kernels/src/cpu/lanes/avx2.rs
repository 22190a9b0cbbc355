//! Vectors of 256 bits. What is compared is a vector too, and so is which lanes of a tail's vector there are.

use super::code::{Code, INDEX, RAX, RCX};
use super::{Instruction, Lane, Length, Line, Place, Places, Registers, Step, Vector, Vectors, predicate};
use crate::library::vector::LANES;

pub struct Avx2;

/// Elements of a vector.
const WIDTH: usize = 8;
const PARTS: u8 = 4;
const _: () = assert!(LANES == PARTS as usize * WIDTH);
/// Where an instruction has no second operand.
const NONE: Vector = Vector(0);

impl Vectors for Avx2 {
    const REGISTERS: Registers = Registers { vectors: 16, parts: PARTS as usize, masks: 0..0 };

    fn before(line: &Line, places: &Places, code: &mut Code) {
        for (step, register) in line.steps.iter().zip(&places.values) {
            match step {
                Step::Splat(pointer) => {
                    code.read_table(RAX, *pointer);
                    code.vex(BROADCAST, Vector(*register), NONE, Place::At(RAX));
                }
                Step::Sum(..) => (0..PARTS).for_each(|part| {
                    let sum = Vector(register + part);
                    code.vex(XOR, sum, sum, Place::Vector(sum));
                }),
                _ => {}
            }
        }
        if let Some(signs) = places.signs {
            code.bytes(&[0xb8, 0, 0, 0, 0x80]); // mov eax, the sign of an f32
            code.vex(FROM_WORD, signs, NONE, Place::Vector(Vector(RAX)));
            code.vex(REPEAT, signs, NONE, Place::Vector(signs));
        }
    }

    fn all(line: &Line, places: &Places, code: &mut Code) {
        (0..PARTS).for_each(|part| steps(line, places, part, false, code));
    }

    fn tail(line: &Line, places: &Places, code: &mut Code) {
        let mut ends = vec![];
        for part in 0..PARTS {
            if part > 0 {
                ends.push(code.unless_left(part));
            }
            code.choose_left(part, tail(places));
            steps(line, places, part, true, code);
        }
        let end = code.len();
        ends.into_iter().for_each(|jump| code.land(jump, end));
    }

    fn behind(line: &Line, places: &Places, code: &mut Code) {
        for (step, register) in line.steps.iter().zip(&places.values) {
            let Step::Sum(pointer, _) = step else { continue };
            let [sum, other, third, fourth] = [0, 1, 2, 3].map(|part| Vector(register + part));
            code.vex(ADD, sum, sum, Place::Vector(third));
            code.vex(ADD, other, other, Place::Vector(fourth));
            code.vex(ADD, sum, sum, Place::Vector(other));
            let add = |code: &mut Code| code.vex(ADD.of(Length::Quarter), sum, sum, Place::Vector(other));
            code.vex(UPPER, sum, NONE, Place::Vector(other));
            code.bytes(&[1]);
            add(code);
            for order in [0b1110, 0b01] {
                code.vex(PERMUTE, other, NONE, Place::Vector(sum));
                code.bytes(&[order]);
                add(code);
            }
            code.read_table(RAX, *pointer);
            code.vex(ADD_ONE, sum, sum, Place::At(RAX));
            code.vex(STORE_ONE, sum, NONE, Place::At(RAX));
        }
    }
}

fn tail(places: &Places) -> Vector {
    places.tail.expect("vectors are masks")
}

/// One vector of each `LANES` elements: all of it, or those that there are of a tail.
fn steps(line: &Line, places: &Places, part: u8, is_tail: bool, code: &mut Code) {
    let value = |lane: &Lane| Vector(places.values[lane.0]);
    for (n, step) in line.steps.iter().enumerate() {
        let to = value(&Lane(n));
        let tile = step.tile().map(|pointer| places.register(pointer, code));
        let words = Place::Along(tile.unwrap_or(RCX), part, 2);
        match step {
            Step::Load(_) if is_tail => code.vex(LOAD_SOME, to, tail(places), words),
            Step::Load(_) => code.vex(LOAD, to, NONE, words),
            Step::Store(_, x) if is_tail => code.vex(STORE_SOME, value(x), tail(places), words),
            Step::Store(_, x) => code.vex(STORE, value(x), NONE, words),
            Step::LoadMask(_) | Step::StoreMask(..) => unreachable!("such lines have no places"),
            Step::Splat(_) => {}
            Step::Compute(op, x, y) => {
                code.vex(Instruction { code: op.code(), ..ADD }, to, value(x), Place::Vector(value(y)));
            }
            Step::Negate(x) => {
                let signs = Place::Vector(places.signs.expect("a line that negates has them"));
                code.vex(XOR, to, value(x), signs);
            }
            Step::Root(x) => code.vex(ROOT, to, NONE, Place::Vector(value(x))),
            Step::Compare(op, x, y) => {
                code.vex(COMPARE, to, value(x), Place::Vector(value(y)));
                code.bytes(&[predicate(*op)]);
            }
            Step::Select(c, x, y) => {
                code.vex(BLEND, to, value(y), Place::Vector(value(x)));
                code.bytes(&[value(c).0 << 4]);
            }
            Step::Sum(_, x) => {
                let sum = Vector(to.0 + part);
                if is_tail {
                    // The other lanes add zero. What says which they are is the only register to spare, and is made again.
                    let own = tail(places);
                    code.vex(AND, own, own, Place::Vector(value(x)));
                    code.vex(ADD, sum, sum, Place::Vector(own));
                    code.choose_left(part, own);
                } else {
                    code.vex(ADD, sum, sum, Place::Vector(value(x)));
                }
            }
        }
    }
}

const LOAD: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x10); // vmovups
const STORE: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x11);
const LOAD_SOME: Instruction = Instruction::new(2, 1, 0, Length::Half, 0x2c); // vmaskmovps
const STORE_SOME: Instruction = Instruction::new(2, 1, 0, Length::Half, 0x2e);
const ADD: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x58); // vaddps
const ROOT: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x51); // vsqrtps
const AND: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x54); // vandps
const XOR: Instruction = Instruction::new(1, 0, 0, Length::Half, 0x57); // vxorps
const BROADCAST: Instruction = Instruction::new(2, 1, 0, Length::Half, 0x18); // vbroadcastss
const FROM_WORD: Instruction = Instruction::new(1, 1, 0, Length::Quarter, 0x6e); // vmovd
const REPEAT: Instruction = Instruction::new(2, 1, 0, Length::Half, 0x58); // vpbroadcastd
const COMPARE: Instruction = Instruction::new(1, 0, 0, Length::Half, 0xc2); // vcmpps
const BLEND: Instruction = Instruction::new(3, 1, 0, Length::Half, 0x4a); // vblendvps
const UPPER: Instruction = Instruction::new(3, 1, 0, Length::Half, 0x19); // vextractf128
const PERMUTE: Instruction = Instruction::new(3, 1, 0, Length::Quarter, 0x04); // vpermilps
const ADD_ONE: Instruction = Instruction::new(1, 2, 0, Length::Quarter, 0x58); // vaddss
const STORE_ONE: Instruction = Instruction::new(1, 2, 0, Length::Quarter, 0x11); // vmovss
const FROM_BYTES: Instruction = Instruction::new(1, 1, 1, Length::Quarter, 0x6e); // vmovq
const WIDEN: Instruction = Instruction::new(2, 1, 0, Length::Half, 0x21); // vpmovsxbd
const SHIFT: Instruction = Instruction::new(1, 1, 0, Length::Half, 0x72); // vpsrad by a constant, whose first operand is part of its code
const SHIFT_CODE: Vector = Vector(4);

impl Code {
    /// eax becomes how many elements are left behind whole `LANES`; what goes on where a part has none of them.
    fn unless_left(&mut self, part: u8) -> super::code::Jump {
        self.left();
        self.bytes(&[0x83, 0xf8, part * WIDTH as u8]); // cmp eax, the part's first
        self.jump(&[0x0f, 0x86]) // jbe
    }

    fn left(&mut self) {
        self.bytes(&[0x44, 0x89, 0xc0]); // mov eax, r8d
        self.bytes(&[0x83, 0xe0, LANES as u8 - 1]); // and eax, LANES - 1
    }

    /// All bits of the lanes of a part that are left, none of the others: a byte for each, whose highest bit says that it is not below
    /// their number, is turned over and widened.
    fn choose_left(&mut self, part: u8, to: Vector) {
        self.left();
        let first = u64::from(0x80 + part * WIDTH as u8) * 0x0101_0101_0101_0101 + 0x0706_0504_0302_0100;
        for (constant, code) in [(0x0101_0101_0101_0101, &[0x48, 0x0f, 0xaf, 0xc1][..]), (first, &[0x48, 0x29, 0xc1])] {
            self.bytes(&[0x48, 0xb9]); // mov rcx, the constant
            self.bytes(&u64::to_le_bytes(constant));
            self.bytes(code); // imul rax, rcx, then sub rcx, rax
        }
        self.bytes(&[0x48, 0xf7, 0xd1]); // not rcx
        self.vex(FROM_BYTES, to, NONE, Place::Vector(Vector(RCX)));
        self.vex(WIDEN, to, NONE, Place::Vector(to));
        self.vex(SHIFT, SHIFT_CODE, to, Place::Vector(to));
        self.bytes(&[31]);
    }

    /// An instruction of vectors: its first operand, the second and the last.
    fn vex(&mut self, instruction: Instruction, to: Vector, from: Vector, last: Place) {
        let bit = |register: u8| !(register >> 3) & 1;
        let (Place::Vector(Vector(base)) | Place::At(base) | Place::Along(base, ..)) = last;
        let Instruction { map, prefix, wide, length, code } = instruction;
        self.bytes(&[
            0xc4,
            bit(to.0) << 7 | 1 << 6 | bit(base) << 5 | map,
            wide << 7 | (!from.0 & 15) << 3 | (length as u8) << 2 | prefix,
            code,
        ]);
        let first = (to.0 & 7) << 3;
        match last {
            Place::Vector(Vector(n)) => self.bytes(&[0xc0 | first | n & 7]),
            // A displacement of one byte, and an index or none.
            Place::At(register) => self.bytes(&[0x44 | first, 4 << 3 | register & 7, 0]),
            Place::Along(register, vectors, scale) => {
                self.bytes(&[0x44 | first, scale << 6 | INDEX << 3 | register & 7, vectors * WIDTH as u8 * 4]);
            }
        }
    }
}
