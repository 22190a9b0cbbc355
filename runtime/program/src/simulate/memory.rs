//! One rank's planned memory, one cell per byte: an element stands in the cell of its first byte, the others mark that they
//! belong to it. What was never written, or written over in part, reads as poison: NaN for floats, a fault for integers.

use super::scalar::Value;
use super::{Fault, SimulateError};
use crate::mesh::Mesh;
use crate::program::{Buffer, Place, Program};
use crate::types::DType;

/// A quiet NaN that no arithmetic gives.
pub(super) const POISON: u64 = 0x7ffc_dead_dead_dead;
/// A byte of the element before it.
const TAIL: u64 = 0x7ffc_0000_7a11_7a11;

pub(super) struct Memory {
    persistent: Vec<u64>,
    scratch: Vec<u64>,
    /// By area, then slot.
    areas: Vec<Vec<Vec<u64>>>,
}

/// Where a buffer's block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub place: Place,
    pub slot: u32,
    pub offset: usize,
    pub elements: usize,
    pub dtype: DType,
}

impl Region {
    pub fn of(buffer: &Buffer, mesh: &Mesh, slots: &[u32]) -> Fault<Region> {
        let slot = match buffer.place {
            Place::Area(a) => *slots.get(a as usize).ok_or_else(|| SimulateError::fault(format!("no slot for area m{a}")))?,
            _ => 0,
        };
        let elements = buffer.ty.local_shape(mesh).iter().product::<u64>() as usize;
        Ok(Region { place: buffer.place, slot, offset: buffer.offset as usize, elements, dtype: buffer.ty.dtype })
    }

    pub fn bytes(&self) -> usize {
        self.elements * self.dtype.bytes() as usize
    }

    pub fn overlaps(&self, other: &Region) -> bool {
        let end = |r: &Region| r.offset + r.bytes();
        self.place == other.place && self.slot == other.slot && self.offset < end(other) && other.offset < end(self)
    }
}

impl Memory {
    pub fn new(p: &Program) -> Memory {
        let slots = |a: &crate::program::Area| vec![vec![POISON; a.bytes as usize]; a.slots as usize];
        Memory {
            persistent: vec![POISON; p.persistent_bytes as usize],
            scratch: vec![POISON; p.scratch_bytes as usize],
            areas: p.areas.iter().map(slots).collect(),
        }
    }

    pub fn poison_scratch(&mut self) {
        self.scratch.fill(POISON);
    }

    pub fn poison_areas(&mut self) {
        self.areas.iter_mut().flatten().for_each(|slot| slot.fill(POISON));
    }

    /// Poisons the persistent block but for `keep`.
    pub fn poison_persistent(&mut self, keep: &[Region]) -> Fault<()> {
        let kept: Vec<Vec<u64>> = keep.iter().map(|r| self.read(r)).collect::<Fault<_>>()?;
        self.persistent.fill(POISON);
        keep.iter().zip(kept).try_for_each(|(region, bits)| self.write(region, &bits))
    }

    fn cells(&mut self, region: &Region) -> Fault<&mut [u64]> {
        let block = match region.place {
            Place::Persistent => Some(&mut self.persistent),
            Place::Scratch => Some(&mut self.scratch),
            Place::Area(a) => self.areas.get_mut(a as usize).and_then(|slots| slots.get_mut(region.slot as usize)),
        };
        block
            .and_then(|b| b.get_mut(region.offset..region.offset + region.bytes()))
            .ok_or_else(|| SimulateError::fault(format!("{region:?} lies outside of its block")))
    }

    /// The bits of a block: of floats as f64, of integers as i64.
    pub fn read(&mut self, region: &Region) -> Fault<Vec<u64>> {
        let width = region.dtype.bytes() as usize;
        let whole = |cell: &[u64]| if cell[0] != TAIL && cell[1..].iter().all(|&c| c == TAIL) { cell[0] } else { POISON };
        Ok(self.cells(region)?.chunks(width).map(whole).collect())
    }

    pub fn write(&mut self, region: &Region, bits: &[u64]) -> Fault<()> {
        let width = region.dtype.bytes() as usize;
        for (cell, &value) in self.cells(region)?.chunks_mut(width).zip(bits) {
            cell.fill(if value == POISON { POISON } else { TAIL });
            cell[0] = value;
        }
        Ok(())
    }

    pub fn poison(&mut self, region: &Region) -> Fault<()> {
        self.cells(region)?.fill(POISON);
        Ok(())
    }
}

pub(super) fn to_value(dtype: DType, bits: u64) -> Fault<Value> {
    match dtype.is_float() {
        true => Ok(Value::Float(f64::from_bits(bits))),
        false if bits == POISON => Err(SimulateError::fault("reads an integer that was never written")),
        false => Ok(Value::Int(bits as i64)),
    }
}

pub(super) fn to_bits(value: Value) -> u64 {
    match value {
        Value::Float(x) => x.to_bits(),
        Value::Int(x) => x as u64,
    }
}
