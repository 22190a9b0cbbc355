//! Runs a kernel point by point.

use super::memory::{POISON, Region, to_bits, to_value};
use super::scalar::{self, Value};
use super::{Fault, Rank, SimulateError, each_index, flat};
use crate::kernel::*;
use crate::mesh::Extent;
use crate::program::{BufferId, Instr, Program, Step};
use crate::types::DType;
use smallvec::SmallVec;
use std::collections::HashMap;

struct Array {
    dtype: DType,
    extents: Vec<Extent>,
    block: Vec<u64>,
    bits: Vec<u64>,
}

struct Machine<'a> {
    kernel: &'a Kernel,
    dtypes: Dtypes,
    /// By statement, the expressions that its value is made of, operands first.
    needed: Vec<Vec<ExprId>>,
    /// Extents of the loop dims on this rank.
    extents: Vec<Extent>,
    /// Inputs that share their place with an output, by output: they see each store at once.
    shared: Vec<Vec<usize>>,
    inputs: Vec<Array>,
    outputs: Vec<Array>,
    /// Global index of each loop dim at the current point.
    at: Vec<u64>,
    vars: HashMap<VarId, Value>,
    values: Vec<Value>,
}

pub(super) fn run(p: &Program, kernel: &Kernel, instr: &Instr, step: &Step, rank: &mut Rank) -> Fault<()> {
    if kernel.inputs.len() != instr.operands.len() || kernel.outputs.len() != instr.results.len() {
        return Err(SimulateError::fault("the kernel has other operands"));
    }
    let accumulates = |n: usize| {
        let adds = |s: &Stmt| matches!(s, Stmt::Store { output, mode: StoreMode::Accumulate, .. } if *output as usize == n);
        kernel.body.iter().any(adds)
    };
    let mut shared = Vec::new();
    for (n, &id) in instr.results.iter().enumerate() {
        let operands = regions(p, &instr.operands, step)?;
        let region = Region::of(p.buffer(id), &p.mesh, &step.slots)?;
        let same = |r: &Region| r.overlaps(&region) && r.offset == region.offset && r.bytes() == region.bytes();
        shared.push((0..operands.len()).filter(|&i| same(&operands[i])).collect::<Vec<_>>());
        if shared[n].is_empty() && !accumulates(n) {
            rank.memory.poison(&region)?;
        }
    }
    let mut array = |id, clear: bool| -> Fault<Array> {
        let region = Region::of(p.buffer(id), &p.mesh, &step.slots)?;
        let extents = p.ty(id).extents(&p.mesh, &rank.at).to_vec();
        let block = extents.iter().map(|e| e.block).collect();
        let bits = if clear { vec![POISON; region.elements] } else { rank.memory.read(&region)? };
        Ok(Array { dtype: region.dtype, extents, block, bits })
    };
    let inputs = instr.operands.iter().map(|&id| array(id, false)).collect::<Fault<Vec<_>>>()?;
    let outputs = instr.results.iter().enumerate().map(|(n, &id)| array(id, !accumulates(n))).collect::<Fault<Vec<_>>>()?;
    let dtypes = kernel.dtypes().map_err(SimulateError::fault)?;
    let extents = bind(kernel, &dtypes, &inputs, &outputs)?;
    let values = vec![Value::Int(0); kernel.exprs.len()];
    let at = vec![0; kernel.dims.len()];
    let needed = kernel.body.iter().map(|stmt| kernel.post_order(stmt.value(), |_| false)).collect();
    let mut machine = Machine { kernel, dtypes, needed, extents, shared, inputs, outputs, at, vars: HashMap::new(), values };
    machine.run()?;
    for (&id, array) in instr.results.iter().zip(&machine.outputs) {
        rank.memory.write(&Region::of(p.buffer(id), &p.mesh, &step.slots)?, &array.bits)?;
    }
    Ok(())
}

fn regions(p: &Program, ids: &[BufferId], step: &Step) -> Fault<Vec<Region>> {
    ids.iter().map(|&id| Region::of(p.buffer(id), &p.mesh, &step.slots)).collect()
}

/// Extents of the loop dims, from the operand dims that they index.
fn bind(kernel: &Kernel, dtypes: &Dtypes, inputs: &[Array], outputs: &[Array]) -> Fault<Vec<Extent>> {
    let mut extents: Vec<Option<Extent>> = vec![None; kernel.dims.len()];
    let mut bind = |index: &[Index], array: &Array| {
        for (i, &extent) in index.iter().zip(&array.extents) {
            if let Index::Dim(d) = i {
                let slot = &mut extents[d.0 as usize];
                if slot.is_some_and(|e| e != extent) {
                    return Err(SimulateError::fault(format!("dim {} is bound to two extents", kernel.dims[d.0 as usize])));
                }
                *slot = Some(extent);
            }
        }
        Ok(())
    };
    for (expr, _) in kernel.exprs.iter().zip(&dtypes.exprs).filter(|(_, dtype)| dtype.is_some()) {
        if let Expr::Load { input, index, .. } = expr {
            bind(index, inputs.get(*input as usize).ok_or_else(|| SimulateError::fault("no such input"))?)?;
        }
    }
    for stmt in &kernel.body {
        if let Stmt::Store { output, index, .. } = stmt {
            bind(index, outputs.get(*output as usize).ok_or_else(|| SimulateError::fault("no such output"))?)?;
        }
    }
    let unbound = |d: usize| SimulateError::fault(format!("dim {} has no size", kernel.dims[d]));
    extents.into_iter().enumerate().map(|(d, e)| e.ok_or_else(|| unbound(d))).collect()
}

impl Machine<'_> {
    fn run(&mut self) -> Fault<()> {
        let kernel = self.kernel;
        self.points(&kernel.outer, |machine| {
            machine.vars.clear();
            kernel.body.iter().enumerate().try_for_each(|(number, stmt)| machine.stmt(number, stmt))
        })
    }

    /// Calls `f` at every point of `dims` that this rank's shards hold.
    fn points(&mut self, dims: &[DimId], mut f: impl FnMut(&mut Self) -> Fault<()>) -> Fault<()> {
        let sizes: Vec<u64> = dims.iter().map(|d| self.extents[d.0 as usize].valid).collect();
        each_index(&sizes, |index| {
            for (d, i) in dims.iter().zip(index) {
                self.at[d.0 as usize] = self.extents[d.0 as usize].offset + i;
            }
            f(self)
        })
    }

    fn stmt(&mut self, number: usize, stmt: &Stmt) -> Fault<()> {
        let root = stmt.value();
        match stmt {
            Stmt::Let { var, .. } => {
                let value = self.eval(root, number)?;
                self.vars.insert(*var, value);
            }
            Stmt::Reduce { var, op, over, .. } => {
                let dtype = self.dtypes.exprs[root.0 as usize].expect("a statement's value has a dtype");
                let mut sum = scalar::neutral(*op, dtype);
                self.points(over, |machine| {
                    sum = scalar::combine(*op, dtype, sum, machine.eval(root, number)?);
                    Ok(())
                })?;
                self.vars.insert(*var, sum);
            }
            Stmt::Store { output, over, index, mode, .. } => self.points(over, |machine| {
                let value = machine.eval(root, number)?;
                machine.store(*output as usize, index, value, *mode)
            })?,
        }
        Ok(())
    }

    /// The value of statement `number`, at `root`.
    fn eval(&mut self, root: ExprId, number: usize) -> Fault<Value> {
        for i in 0..self.needed[number].len() {
            let id = self.needed[number][i];
            self.values[id.0 as usize] = self.expr(id)?;
        }
        Ok(self.values[root.0 as usize])
    }

    fn expr(&self, id: ExprId) -> Fault<Value> {
        let get = |id: &ExprId| self.values[id.0 as usize];
        let dtype = |id: &ExprId| self.dtypes.exprs[id.0 as usize].expect("a needed expression has a dtype");
        Ok(match self.kernel.get(id) {
            Expr::Load { input, index, outside } => self.load(&self.inputs[*input as usize], index, *outside)?,
            Expr::Var(v) => *self.vars.get(v).ok_or_else(|| SimulateError::fault("a value is read before it is defined"))?,
            Expr::Const { dtype, bits } => to_value(*dtype, *bits)?,
            Expr::Position(d) => Value::Int(self.at[d.0 as usize] as i64),
            Expr::Unary(op, a) => scalar::unary(*op, dtype(a), get(a)),
            Expr::Binary(op, a, b) => scalar::binary(*op, dtype(a), get(a), get(b)),
            Expr::Compare(op, a, b) => scalar::compare(*op, dtype(a), get(a), get(b)),
            Expr::Select(c, a, b) => get(if get(c).int()? != 0 { a } else { b }),
            Expr::Cast(to, a) => scalar::cast(*to, dtype(a), get(a)),
            Expr::Uniform { id, seed, step, element } => {
                Value::Float(scalar::uniform(*id, get(seed).int()?, get(step).int()?, get(element).int()?))
            }
        })
    }

    fn index(&self, index: &Index) -> Fault<i128> {
        Ok(match index {
            Index::Dim(d) => self.at[d.0 as usize].into(),
            Index::Affine { terms, offset } => {
                let term = |&(d, c): &(DimId, i64)| i128::from(c) * i128::from(self.at[d.0 as usize]);
                terms.iter().map(term).sum::<i128>() + i128::from(*offset)
            }
            Index::Expr(e) => self.values[e.0 as usize].int()?.into(),
        })
    }

    fn load(&self, array: &Array, index: &[Index], outside: Outside) -> Fault<Value> {
        let mut local = SmallVec::<[u64; 6]>::new();
        for (i, extent) in index.iter().zip(&array.extents) {
            let at = self.index(i)? - i128::from(extent.offset);
            if (0..i128::from(extent.valid)).contains(&at) {
                local.push(at as u64);
            } else if outside == Outside::Zero {
                return Ok(Value::zero(array.dtype));
            } else {
                return Err(SimulateError::fault(format!("a load at {at} of {} elements", extent.valid)));
            }
        }
        to_value(array.dtype, array.bits[flat(local, &array.block)])
    }

    fn store(&mut self, output: usize, index: &[Index], value: Value, mode: StoreMode) -> Fault<()> {
        let mut local = SmallVec::<[u64; 6]>::new();
        for (i, extent) in index.iter().zip(&self.outputs[output].extents) {
            let at = self.index(i)? - i128::from(extent.offset);
            if !(0..i128::from(extent.valid)).contains(&at) {
                return Err(SimulateError::fault(format!("a store at {at} of {} elements", extent.valid)));
            }
            local.push(at as u64);
        }
        let array = &mut self.outputs[output];
        let at = flat(local, &array.block);
        let slot = &mut array.bits[at];
        *slot = match mode {
            StoreMode::Assign => to_bits(value),
            StoreMode::Accumulate => to_bits(scalar::binary(BinaryOp::Add, array.dtype, to_value(array.dtype, *slot)?, value)),
        };
        let bits = *slot;
        for &input in &self.shared[output] {
            self.inputs[input].bits[at] = bits;
        }
        Ok(())
    }
}
