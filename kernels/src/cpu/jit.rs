//! Compilation of kernels to machine code by Cranelift, and running them on the pool.

use super::emit::{Source, all_in_registers, emit};
use super::isa::Isa;
use super::pool::{Pool, WORKER_BYTES};
use crate::tile::{Nest, Plan, SINGLE, Typing};
use cranelift_codegen::ir::{AbiParam, Signature, UserFuncName, types};
use cranelift_codegen::settings::{self, Configurable};
use cranelift_jit::{JITBuilder, JITModule};
use cranelift_module::{Linkage, Module, default_libcall_names};
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// (operand pointers and parameters, scratch, first outer point, end).
type Entry = unsafe extern "C" fn(*const u64, *mut u8, i64, i64);

/// Compiles kernels; equal ones once.
pub struct Jit {
    module: Option<JITModule>,
    isa: Isa,
    /// How many threads run the code.
    threads: usize,
    compiled: BTreeMap<u64, Vec<(Nest, Arc<Compiled>)>>,
    /// Keeps the code of finished kernels mapped.
    count: usize,
}

/// A kernel as machine code. The code lives as long as its `Jit`'s memory, which is never unmapped.
#[derive(Debug)]
pub struct Compiled {
    entry: Entry,
    points: usize,
    grain: usize,
    nanoseconds: usize,
    /// Input and output pointers plus parameters.
    words: usize,
    /// Bytes that each operand must have.
    pub operand_bytes: Vec<usize>,
    /// Primitive calls in the code, for reports.
    pub calls: usize,
}

impl Jit {
    /// A compiler for this machine, by Cranelift's verifier of intermediate code.
    pub fn new() -> Result<Jit, String> {
        Jit::of(Isa::detect(), true)
    }

    /// The same, where all kernels are of forms that tests have: without the verifier.
    pub fn trusting() -> Result<Jit, String> {
        Jit::of(Isa::detect(), false)
    }

    /// A compiler whose code has no better instructions than `isa`, and calls its primitives.
    pub fn with_isa(isa: Isa) -> Result<Jit, String> {
        Jit::of(isa, true)
    }

    fn of(isa: Isa, verify: bool) -> Result<Jit, String> {
        let mut flags = settings::builder();
        flags.set("opt_level", "speed").map_err(|e| e.to_string())?;
        flags.set("enable_verifier", if verify { "true" } else { "false" }).map_err(|e| e.to_string())?;
        let mut machine = cranelift_native::builder().map_err(str::to_owned)?;
        for better in beyond(isa) {
            machine.set(better, "false").map_err(|e| e.to_string())?;
        }
        let machine = machine.finish(settings::Flags::new(flags)).map_err(|e| e.to_string())?;
        let module = JITModule::new(JITBuilder::with_isa(machine, default_libcall_names()));
        Ok(Jit { module: Some(module), isa, threads: usize::MAX, compiled: BTreeMap::new(), count: 0 })
    }

    /// Code for pools of so many threads: what it computes is the same for all, and it runs on all.
    pub fn for_threads(mut self, threads: usize) -> Jit {
        self.threads = threads;
        self
    }

    /// Number of distinct kernels compiled so far.
    pub fn kernels(&self) -> usize {
        self.count
    }

    /// Machine code for `nest`, from the cache if an equal one was compiled.
    pub fn compile(&mut self, nest: Nest) -> Result<Arc<Compiled>, String> {
        let mut hasher = DefaultHasher::new();
        nest.hash(&mut hasher);
        let key = hasher.finish();
        if let Some((_, found)) = self.compiled.get(&key).and_then(|all| all.iter().find(|one| one.0 == nest)) {
            return Ok(Arc::clone(found));
        }
        let compiled = Arc::new(self.build(&nest)?);
        self.compiled.entry(key).or_default().push((nest, Arc::clone(&compiled)));
        self.count += 1;
        Ok(compiled)
    }

    fn build(&mut self, original: &Nest) -> Result<Compiled, String> {
        let mut nest = original.clone().simplified();
        if all_in_registers(&nest, self.isa) {
            nest = nest.inlined();
        }
        let typing = Typing::new(&nest.kernel);
        let module = self.module.as_mut().expect("the module lives as long as the compiler");
        let mut signature = Signature::new(module.isa().default_call_conv());
        signature.params.extend([AbiParam::new(types::I64); 4]);
        let mut context = module.make_context();
        let mut longest = SINGLE;
        let (plan, emitted) = loop {
            module.clear_context(&mut context);
            context.func.signature = signature.clone();
            context.func.name = UserFuncName::user(0, self.count as u32);
            let plan = Plan::new(&nest, &typing, longest, self.threads);
            let source = Source { nest: &nest, typing: &typing, plan: &plan, isa: self.isa };
            let emitted = emit(module, &mut context.func, &source);
            if emitted.scratch_bytes <= WORKER_BYTES {
                break (plan, emitted);
            }
            if longest < 64 {
                return Err(format!(
                    "a kernel needs {} bytes of scratch per thread, more than {WORKER_BYTES}",
                    emitted.scratch_bytes
                ));
            }
            longest /= 4;
        };
        tracing::debug!(
            points = plan.points,
            grain = plan.grain,
            calls = emitted.calls,
            scratch_bytes = emitted.scratch_bytes,
            "compiled a kernel"
        );
        let name = format!("kernel{}", self.count);
        let function = module.declare_function(&name, Linkage::Local, &signature).map_err(|e| e.to_string())?;
        module.define_function(function, &mut context).map_err(|e| format!("{e:?}"))?;
        module.clear_context(&mut context);
        module.finalize_definitions().map_err(|e| e.to_string())?;
        let code = module.get_finalized_function(function);
        // SAFETY: the function was just defined with this signature.
        let entry = unsafe { std::mem::transmute::<*const u8, Entry>(code) };
        let arrays = || original.inputs.iter().chain(&original.outputs);
        let parameters = original.extents.len() + arrays().map(|array| array.block.len()).sum::<usize>();
        let bytes = |array: &crate::tile::Array| array.block.iter().product::<usize>() * array.dtype.bytes() as usize;
        Ok(Compiled {
            entry,
            points: plan.points,
            grain: plan.grain,
            nanoseconds: plan.nanoseconds,
            words: arrays().count() + parameters,
            operand_bytes: arrays().map(bytes).collect(),
            calls: emitted.calls,
        })
    }
}

/// The generator's names of what a machine may have beyond `isa`.
fn beyond(isa: Isa) -> &'static [&'static str] {
    const FEATURES: [&str; 10] = [
        "has_avx512bitalg",
        "has_avx512dq",
        "has_avx512f",
        "has_avx512vbmi",
        "has_avx512vl",
        "has_avx512vnni",
        "has_avx",
        "has_avx2",
        "has_avx_vnni",
        "has_fma",
    ];
    match isa {
        _ if !cfg!(target_arch = "x86_64") => &[],
        Isa::Avx512 | Isa::Amx | Isa::Neon => &[],
        Isa::Avx2 => &FEATURES[..6],
        Isa::Baseline => &FEATURES,
    }
}

impl Drop for Jit {
    /// Compiled kernels may outlive their compiler, so their code stays mapped until the process ends.
    fn drop(&mut self) {
        std::mem::forget(self.module.take());
    }
}

impl Compiled {
    /// Runs the kernel on slices: safe, with the checks that this takes. `parameters` as `Nest::parameters` gives them.
    ///
    /// # Panics
    /// If an operand is too short or not aligned to 8 bytes, or the number of operands or parameters is wrong.
    pub fn run_slices(&self, pool: &Pool, parameters: &[i64], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let mut words = vec![];
        let outputs = outputs.iter_mut().map(|output| (output.as_mut_ptr() as u64, output.len()));
        for (address, length) in inputs.iter().map(|input| (input.as_ptr() as u64, input.len())).chain(outputs) {
            assert!(
                length >= self.operand_bytes[words.len()] && (length == 0 || address % 8 == 0),
                "operand {}: {length} bytes at {address:#x}",
                words.len()
            );
            words.push(address);
        }
        assert!(
            words.len() == self.operand_bytes.len(),
            "{} operands for a kernel of {}",
            words.len(),
            self.operand_bytes.len()
        );
        words.extend(parameters.iter().map(|parameter| *parameter as u64));
        // SAFETY: lengths and alignment were checked; exclusive slices do not overlap others.
        unsafe { self.run(pool, &words) };
    }

    /// Runs the kernel. `arguments` are the addresses of inputs, then outputs, then the values of `Nest::parameters`.
    ///
    /// # Safety
    /// The addresses point to `operand_bytes` bytes each, aligned to their elements; outputs are written by nobody else meanwhile, and
    /// share memory with inputs only as the kernel IR allows.
    pub unsafe fn run(&self, pool: &Pool, arguments: &[u64]) {
        assert!(arguments.len() == self.words, "{} words for a kernel that takes {}", arguments.len(), self.words);
        let chunks = self.points.div_ceil(self.grain);
        pool.run(chunks, self.nanoseconds, &|worker, chunk| {
            let begin = chunk * self.grain;
            let end = self.points.min(begin + self.grain);
            // SAFETY: the caller's; the scratch is as large as the code needs, checked when it was compiled.
            unsafe { (self.entry)(arguments.as_ptr(), worker.scratch(), begin as i64, end as i64) };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether code for `isa` may have the feature.
    fn may_use(isa: Isa, feature: &str) -> bool {
        let jit = Jit::with_isa(isa).expect("a generator");
        let flags = jit.module.as_ref().expect("a module").isa().isa_flags();
        flags.iter().any(|flag| flag.name == feature && flag.as_bool() == Some(true))
    }

    /// The rows of x, each divided by the sum of x² + x, less x: passes of arithmetic.
    fn rows() -> Nest {
        use dcc_program::kernel::*;
        use dcc_program::mesh::Extent;
        use dcc_program::types::{DType, Reduce};
        let mut kernel = Kernel::default();
        let (i, j) = (kernel.dim("i"), kernel.dim("j"));
        let matrix = Argument { dtype: DType::F32, rank: 2 };
        (kernel.outer, kernel.inputs, kernel.outputs) = (vec![i], vec![matrix.clone()], vec![matrix]);
        let index = vec![Index::Dim(i), Index::Dim(j)];
        let x = kernel.expr(Expr::Load { input: 0, index: index.clone(), outside: Outside::Never });
        let square = kernel.expr(Expr::Binary(BinaryOp::Mul, x, x));
        let both = kernel.expr(Expr::Binary(BinaryOp::Add, square, x));
        kernel.body.push(Stmt::Reduce { var: VarId(0), op: Reduce::Sum, over: vec![j], value: both });
        let sum = kernel.expr(Expr::Var(VarId(0)));
        let share = kernel.expr(Expr::Binary(BinaryOp::Div, x, sum));
        let value = kernel.expr(Expr::Binary(BinaryOp::Sub, share, x));
        kernel.body.push(Stmt::Store { output: 0, over: vec![j], index, value, mode: StoreMode::Assign });
        let dims = vec![[40, 1000].map(|size| Extent { offset: 0, valid: size, block: size }).to_vec()];
        Nest::bind(&kernel, &dims, &dims).expect("a kernel of these sizes")
    }

    /// Memory for code comes in pieces that may lie further apart than a near call reaches.
    #[test]
    fn no_call_needs_to_be_near() {
        for isa in Isa::available() {
            let mut jit = Jit::with_isa(isa).expect("a generator");
            let (nest, module) = (rows(), jit.module.as_mut().expect("a module"));
            let typing = Typing::new(&nest.kernel);
            let plan = Plan::new(&nest, &typing, SINGLE, 1);
            let mut context = module.make_context();
            context.func.signature.params.extend([AbiParam::new(types::I64); 4]);
            emit(module, &mut context.func, &Source { nest: &nest, typing: &typing, plan: &plan, isa });
            let called = &context.func.dfg.ext_funcs;
            assert!(called.values().all(|function| !function.colocated), "{isa:?}");
            assert!(!isa.has_avx512() || called.len() == 2, "two passes of their own, {} are", called.len());
        }
    }

    #[test]
    fn generated_code_keeps_to_its_instruction_set() {
        for isa in Isa::available() {
            assert!(beyond(isa).iter().all(|feature| !may_use(isa, feature)), "{isa:?}");
        }
        // The control: the best set has what lesser ones of its architecture do without.
        let best = Isa::detect();
        let alone = matches!(best, Isa::Baseline | Isa::Neon);
        assert!(alone || beyond(Isa::Baseline).iter().any(|feature| may_use(best, feature)), "{best:?}");
    }
}
