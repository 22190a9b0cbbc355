//! General registers of a line's function, its loop and its table of pointers.

use super::Pointer;
use crate::library::vector::LANES;

// r8 is the number of all elements.
/// The end of the loop; before and behind it, what nothing keeps.
pub const RAX: u8 = 0;
/// What nothing keeps; in the loop, the pointer of a tile that has no register.
pub const RCX: u8 = 1;
/// The number of the elements at hand.
pub const INDEX: u8 = 6;
/// The table.
const TABLE: u8 = 7;
/// Those of tiles' pointers: what callers do not expect to find unchanged, then the others.
pub const POINTERS: [u8; 10] = [2, 9, 10, 11, 3, 5, 12, 13, 14, 15];
pub const VOLATILE: usize = 4;

/// A displacement of a jump that is not known yet: where it stands.
pub struct Jump(usize);

#[derive(Default)]
pub struct Code(pub Vec<u8>);

impl Code {
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn push(&mut self, register: u8) {
        self.short(0x50, register);
    }

    pub fn pop(&mut self, register: u8) {
        self.short(0x58, register);
    }

    fn short(&mut self, code: u8, register: u8) {
        if register >= 8 {
            self.bytes(&[0x41]);
        }
        self.bytes(&[code | register & 7]);
    }

    /// register = table[pointer]
    pub fn read_table(&mut self, register: u8, pointer: Pointer) {
        self.bytes(&[0x48 | register >> 3 << 2, 0x8b, 0x80 | (register & 7) << 3 | TABLE]);
        self.bytes(&(8 * pointer.0 as u32).to_le_bytes());
    }

    /// The index of the first elements, and how many there are in whole `LANES`; what goes behind the loop where there are none.
    pub fn begin_loop(&mut self) -> Jump {
        self.bytes(&[0x31, 0xf6]); // xor esi, esi
        self.bytes(&[0x4c, 0x89, 0xc0]); // mov rax, r8
        self.bytes(&[0x48, 0x83, 0xe0, (LANES as i8).wrapping_neg() as u8]); // and rax, -LANES
        self.jump(&[0x0f, 0x84]) // jz
    }

    /// Goes back to `again` while there are more.
    pub fn end_loop(&mut self, again: usize) {
        self.bytes(&[0x48, 0x83, 0xc6, LANES as u8]); // add rsi, LANES
        self.bytes(&[0x48, 0x39, 0xc6]); // cmp rsi, rax
        let back = self.jump(&[0x0f, 0x82]); // jb
        self.land(back, again);
    }

    /// ecx becomes how many are left; what goes on where none are.
    pub fn count_tail(&mut self) -> Jump {
        self.bytes(&[0x44, 0x89, 0xc1]); // mov ecx, r8d
        self.bytes(&[0x83, 0xe1, LANES as u8 - 1]); // and ecx, LANES - 1
        self.jump(&[0x0f, 0x84]) // jz
    }

    pub fn jump(&mut self, code: &[u8]) -> Jump {
        self.bytes(code);
        self.bytes(&[0; 4]);
        Jump(self.0.len() - 4)
    }

    pub fn land(&mut self, jump: Jump, at: usize) {
        let distance = (at as i64 - (jump.0 as i64 + 4)) as i32;
        self.0[jump.0..jump.0 + 4].copy_from_slice(&distance.to_le_bytes());
    }
}
