//! cuDNN's graphs of operations, as far as attention needs them: tensors of four dims, what is computed of them, and plans by which the library
//! computes that.
//!
//! The library is opened at run time. Its descriptors are made, given attributes and finished; whoever refers to one keeps it.

use super::driver::{Gpu, is_abandoned};
use crate::error::{Error, Result};
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type, cudnnBackendDescriptorType_t as Kind,
};
use dcc_program::types::DType;
use std::ffi::{CStr, c_void};
use std::rc::Rc;

/// The oldest version whose graphs have all of these operations.
const OLDEST: usize = 92100;
/// What tensors begin at multiples of.
const ALIGN: i64 = 16;
/// The same of memory beside them.
const WORKSPACE_ALIGN: usize = 256;
/// Notes on an engine, at most.
const NOTES: usize = 64;

fn check(status: sys::cudnnStatus_t, what: &str) -> Result<()> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut said = [0; 512];
    // SAFETY: the place is as long as said and lives through the call; the library ends the text with a NUL.
    let said = unsafe {
        sys::cudnnGetLastErrorString(said.as_mut_ptr(), said.len());
        CStr::from_ptr(said.as_ptr())
    };
    Err(Error::device(format!("cuDNN, {what}: {status:?} {}", said.to_string_lossy())))
}

/// The library on one GPU, or for GPUs of a kind.
pub struct Library {
    /// Null where there is no GPU.
    handle: sys::cudnnHandle_t,
    /// Where there is none, the kind's.
    properties: Option<Descriptor>,
    version: usize,
}

/// The version that is installed, unless it is too old.
fn installed() -> Option<usize> {
    // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's. Then it is there.
    let version = unsafe { if sys::is_culib_present() { sys::cudnnGetVersion() } else { return None } };
    if version < OLDEST {
        tracing::debug!(version, "this cuDNN is too old for attention");
    }
    Some(version).filter(|version| *version >= OLDEST)
}

impl Library {
    /// `None` where the library is not installed, is too old, or does not fit the driver. Work goes to the GPU's stream.
    pub fn open(gpu: &Gpu) -> Result<Option<Library>> {
        let Some(version) = installed() else { return Ok(None) };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives through the call.
        if let Err(error) = check(unsafe { sys::cudnnCreate(&mut handle) }, "no handle") {
            tracing::warn!(%error, "attention is computed by dcc's kernels alone");
            return Ok(None);
        }
        let library = Library { handle, properties: None, version };
        // SAFETY: handle and stream are alive, and of one GPU.
        check(unsafe { sys::cudnnSetStream(library.handle, gpu.stream().raw().cast()) }, "no stream")?;
        Ok(Some(library))
    }

    /// For GPUs as `properties` (JSON) says, none of which is here: it has plans, which do not run. `None` as for `open`.
    pub fn without_gpu(properties: &str) -> Result<Option<Library>> {
        let Some(version) = installed() else { return Ok(None) };
        let kind = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
        kind.set(Name::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, Type::CUDNN_TYPE_CHAR, properties.as_bytes())?;
        kind.finish()?;
        Ok(Some(Library { handle: std::ptr::null_mut(), properties: Some(kind), version }))
    }

    /// Says what GPU a description is for: it is given the handle by one name, or properties by the other.
    fn place(&self, description: &Descriptor, handle: Option<Name>, properties: Option<Name>) -> Result<()> {
        match (&self.properties, handle, properties) {
            (None, Some(name), _) => description.set(name, Type::CUDNN_TYPE_HANDLE, &[self.handle]),
            (Some(own), _, Some(name)) => description.refer(name, &[own]),
            _ => Ok(()),
        }
    }

    pub fn version(&self) -> usize {
        self.version
    }

    /// How the library would compute a graph, what it thinks fastest first: what gives the same bits each time.
    pub fn candidates(&self, graph: &Graph) -> Result<Vec<Candidate>> {
        let whole = Rc::new(graph.finished(Some(self))?);
        let heuristics = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristics.refer(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&whole])?;
        let mode = sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A as i32;
        heuristics.say(Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE, mode)?;
        self.place(&heuristics, None, Some(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP))?;
        heuristics.finish()?;
        let results = Name::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let count = heuristics.count(results, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR)?;
        let configs = heuristics.descriptors(results, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, count)?;
        let mut candidates = Vec::new();
        for config in configs {
            let engine = config.descriptors(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1)?;
            let Some(engine) = engine.first() else { continue };
            let notes = engine.said(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Type::CUDNN_TYPE_NUMERICAL_NOTE, NOTES)?;
            let varies = sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as i32;
            if !notes.contains(&varies) {
                candidates.push(Candidate { config, _whole: whole.clone() });
            }
        }
        Ok(candidates)
    }

    /// A candidate made ready to run. Errors: the library does not take it after all.
    pub fn plan(&self, graph: &Graph, candidate: Candidate) -> Result<Plan> {
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        descriptor.refer(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[&candidate.config])?;
        let names = [Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP];
        self.place(&descriptor, Some(names[0]), Some(names[1]))?;
        descriptor.finish()?;
        let own = descriptor.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)? as usize;
        let (mut scratch, mut bytes) = (Vec::new(), own.next_multiple_of(WORKSPACE_ALIGN));
        for &(uid, size) in &graph.scratch {
            scratch.push((uid, bytes));
            bytes += size.next_multiple_of(WORKSPACE_ALIGN);
        }
        Ok(Plan { descriptor, _of: candidate, values: graph.values.clone(), scratch, bytes })
    }

    /// Starts a plan behind all work of the stream so far.
    ///
    /// # Safety
    /// `tensors`, by number, are as large as the graph says and alive until it is done; `workspace` has the plan's bytes.
    pub unsafe fn start(&self, plan: &Plan, tensors: &[(i64, u64)], workspace: u64) -> Result<()> {
        let scratch = plan.scratch.iter().map(|(uid, at)| (*uid, (workspace + *at as u64) as *const c_void));
        let values = plan.values.iter().map(|(uid, value)| (*uid, std::ptr::from_ref(value).cast()));
        let all = tensors.iter().map(|(uid, at)| (*uid, *at as *const c_void)).chain(scratch).chain(values);
        let (uids, pointers): (Vec<i64>, Vec<*const c_void>) = all.unzip();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Type::CUDNN_TYPE_INT64, &uids)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Type::CUDNN_TYPE_VOID_PTR, &pointers)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Type::CUDNN_TYPE_VOID_PTR, &[workspace as *const c_void])?;
        pack.finish()?;
        // SAFETY: the caller's; the library reads what is passed by value before it returns.
        check(unsafe { sys::cudnnBackendExecute(self.handle, plan.descriptor.0, pack.0) }, "a graph")
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        super::driver::release(|| {
            // SAFETY: the handle is this value's own, and all that it started is done.
            let _ = unsafe { sys::cudnnDestroy(self.handle) };
            cudarc::driver::sys::CUresult::CUDA_SUCCESS
        });
    }
}

/// One way to compute a graph.
pub struct Candidate {
    config: Descriptor,
    _whole: Rc<Descriptor>,
}

/// A way that is ready.
pub struct Plan {
    descriptor: Descriptor,
    _of: Candidate,
    values: Vec<(i64, f32)>,
    /// Tensors beside the library's own part of the workspace, and where.
    scratch: Vec<(i64, usize)>,
    bytes: usize,
}

impl Plan {
    /// Of its workspace.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory that is given when it runs, by this number, from 1 on.
    Given(i64),
    /// In memory beside that.
    Scratch,
    /// Nowhere: between operations.
    Passing,
}

/// A tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor(usize);

/// Operations on tensors, computed in f32.
pub struct Graph {
    /// Finished ones, which others refer to.
    parts: Vec<Descriptor>,
    operations: Vec<usize>,
    /// Numbers of tensors, by part; other parts have 0.
    uids: Vec<i64>,
    next: i64,
    values: Vec<(i64, f32)>,
    scratch: Vec<(i64, usize)>,
}

/// What is computed element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointwise {
    Mul,
    Sub,
    Exp,
}

impl Graph {
    /// An empty one; numbers below `first` are those of tensors that are given.
    pub fn new(first: i64) -> Graph {
        Graph {
            parts: Vec::new(),
            operations: Vec::new(),
            uids: Vec::new(),
            next: first,
            values: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// A tensor; strides in elements.
    pub fn tensor(&mut self, place: Place, dtype: DType, dims: [usize; 4], strides: [usize; 4]) -> Result<Tensor> {
        let uid = if let Place::Given(uid) = place { uid } else { self.number() };
        if place == Place::Scratch {
            let reach: usize = dims.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
            self.scratch.push((uid, (reach + 1) * dtype.bytes() as usize));
        }
        self.described(uid, dtype, [dims, strides], (place == Place::Passing).then_some(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL))
    }

    /// One of rows, densely laid out, between operations.
    pub fn passing(&mut self, dtype: DType, dims: [usize; 4]) -> Result<Tensor> {
        self.tensor(Place::Passing, dtype, dims, dense(dims))
    }

    /// Several of one kind.
    pub fn several<const N: usize>(&mut self, dtype: DType, dims: [usize; 4]) -> Result<[Tensor; N]> {
        let mut all = [Tensor(0); N];
        all.iter_mut().try_for_each(|tensor| self.passing(dtype, dims).map(|made| *tensor = made))?;
        Ok(all)
    }

    /// A number.
    pub fn value(&mut self, value: f32) -> Result<Tensor> {
        let uid = self.number();
        self.values.push((uid, value));
        self.described(uid, DType::F32, [[1; 4]; 2], Some(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE))
    }

    fn number(&mut self) -> i64 {
        self.next += 1;
        self.next - 1
    }

    fn described(&mut self, uid: i64, dtype: DType, [dims, strides]: [[usize; 4]; 2], is: Option<Name>) -> Result<Tensor> {
        let dtype = match dtype {
            DType::BF16 => sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16,
            DType::F16 => sys::cudnnDataType_t::CUDNN_DATA_HALF,
            DType::F32 => sys::cudnnDataType_t::CUDNN_DATA_FLOAT,
            other => return Err(Error::device(format!("cuDNN's graphs of {}", other.name()))),
        };
        let part = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        part.say(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, Type::CUDNN_TYPE_DATA_TYPE, dtype as i32)?;
        part.numbers(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims.map(|size| size as i64))?;
        part.numbers(Name::CUDNN_ATTR_TENSOR_STRIDES, &strides.map(|stride| stride as i64))?;
        part.numbers(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[uid])?;
        part.numbers(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGN])?;
        is.map_or(Ok(()), |is| part.set(is, Type::CUDNN_TYPE_BOOLEAN, &[true]))?;
        let tensor = Tensor(self.kept(part)?);
        self.uids.resize(tensor.0, 0);
        self.uids.push(uid);
        Ok(tensor)
    }

    /// Finishes a part.
    fn kept(&mut self, part: Descriptor) -> Result<usize> {
        part.finish()?;
        self.parts.push(part);
        Ok(self.parts.len() - 1)
    }

    /// A descriptor of what an operation does, which computes in f32.
    fn described_by(&mut self, kind: Kind, precision: Name, mode: Option<(Name, Type, i32)>) -> Result<usize> {
        let part = Descriptor::new(kind)?;
        part.say(precision, Type::CUDNN_TYPE_DATA_TYPE, sys::cudnnDataType_t::CUDNN_DATA_FLOAT as i32)?;
        mode.map_or(Ok(()), |(name, ty, mode)| part.say(name, ty, mode))?;
        self.kept(part)
    }

    fn operation(&mut self, kind: Kind, refers: &[(Name, usize)]) -> Result<()> {
        let part = Descriptor::new(kind)?;
        refers.iter().try_for_each(|(name, to)| part.refer(*name, &[&self.parts[*to]]))?;
        let part = self.kept(part)?;
        self.operations.push(part);
        Ok(())
    }

    /// y = x ∘ with, or of x alone; dims of one element repeat.
    pub fn pointwise(&mut self, mode: Pointwise, x: Tensor, with: Option<Tensor>, y: Tensor) -> Result<()> {
        let mode = match mode {
            Pointwise::Mul => sys::cudnnPointwiseMode_t::CUDNN_POINTWISE_MUL,
            Pointwise::Sub => sys::cudnnPointwiseMode_t::CUDNN_POINTWISE_SUB,
            Pointwise::Exp => sys::cudnnPointwiseMode_t::CUDNN_POINTWISE_EXP,
        };
        let mode = (Name::CUDNN_ATTR_POINTWISE_MODE, Type::CUDNN_TYPE_POINTWISE_MODE, mode as i32);
        let by =
            self.described_by(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR, Name::CUDNN_ATTR_POINTWISE_MATH_PREC, Some(mode))?;
        let mut refers = vec![
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, by),
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.0),
            (Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.0),
        ];
        refers.extend(with.map(|with| (Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, with.0)));
        self.operation(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &refers)
    }

    /// c = a · b of the last two dims; fewer heads of `b` repeat.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let by = self.described_by(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR, Name::CUDNN_ATTR_MATMUL_COMP_TYPE, None)?;
        let refers = [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, by),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.0),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.0),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c.0),
        ];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, &refers)
    }

    /// y = Σ x over the dims of which y has fewer elements.
    pub fn sum(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let operator = sys::cudnnReduceTensorOp_t::CUDNN_REDUCE_TENSOR_ADD as i32;
        let mode = (Name::CUDNN_ATTR_REDUCTION_OPERATOR, Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operator);
        let by =
            self.described_by(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR, Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, Some(mode))?;
        let refers = [
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, by),
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.0),
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.0),
        ];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, &refers)
    }

    /// The same elements in other dims and strides.
    pub fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let refers = [(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.0), (Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.0)];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &refers)
    }

    /// y = x where the row's number is at least the column's, else -∞.
    pub fn causal(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        let hidden = self.value(f32::NEG_INFINITY)?;
        let part = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR)?;
        for (name, tensor) in [
            (Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC, x),
            (Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC, hidden),
            (Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC, y),
        ] {
            part.refer(name, &[&self.parts[tensor.0]])?;
        }
        let mode = sys::cudnnPointwiseMode_t::CUDNN_POINTWISE_CMP_GE as i32;
        let name = Name::CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE;
        part.say(name, Type::CUDNN_TYPE_POINTWISE_MODE, mode)?;
        let part = self.kept(part)?;
        self.operations.push(part);
        Ok(())
    }

    /// O = softmax(scale · Q Kᵀ) V and the logarithms of the sums, as one operation; `causal`: queries see no keys behind their own place.
    pub fn attention(
        &mut self,
        [q, k, v]: [Tensor; 3],
        scale: Tensor,
        [o, lse]: [Tensor; 2],
        causal: Option<[usize; 4]>,
    ) -> Result<()> {
        let part = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR)?;
        for (name, tensor) in [
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC, q),
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC, k),
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC, v),
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, scale),
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC, o),
            (Name::CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, lse),
        ] {
            part.refer(name, &[&self.parts[tensor.0]])?;
        }
        if let Some(scores) = causal {
            let [x, y] = [self.passing(DType::F32, scores)?, self.passing(DType::F32, scores)?];
            let outer = std::mem::take(&mut self.operations);
            self.causal(x, y)?;
            let inner = self.finished(None)?;
            self.operations = outer;
            part.refer(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, &[&inner])?;
            part.numbers(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, &[self.uids[x.0]])?;
            part.numbers(Name::CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, &[self.uids[y.0]])?;
            self.parts.push(inner);
        }
        let part = self.kept(part)?;
        self.operations.push(part);
        Ok(())
    }

    /// All operations; of the library, unless they are part of one.
    fn finished(&self, library: Option<&Library>) -> Result<Descriptor> {
        let whole = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operations: Vec<&Descriptor> = self.operations.iter().map(|&part| &self.parts[part]).collect();
        whole.refer(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        library.map_or(Ok(()), |library| library.place(&whole, Some(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), None))?;
        whole.finish()?;
        Ok(whole)
    }
}

/// The strides of rows, one after the other.
pub fn dense([_, heads, rows, columns]: [usize; 4]) -> [usize; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}

/// A descriptor of the library, of whatever kind.
struct Descriptor(sys::cudnnBackendDescriptor_t);

impl Descriptor {
    fn new(kind: Kind) -> Result<Descriptor> {
        let mut made = std::ptr::null_mut();
        // SAFETY: the place lives through the call.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut made) }, "no descriptor")?;
        Ok(Descriptor(made))
    }

    /// Gives an attribute, whose type is `ty`, values of `T`, which is how the library has that type.
    fn set<T>(&self, name: Name, ty: Type, values: &[T]) -> Result<()> {
        // SAFETY: as many values of the attribute's type live through the call, which copies them.
        let set = unsafe { sys::cudnnBackendSetAttribute(self.0, name, ty, values.len() as i64, values.as_ptr().cast()) };
        if set == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS { Ok(()) } else { check(set, &format!("{name:?}")) }
    }

    fn refer(&self, name: Name, to: &[&Descriptor]) -> Result<()> {
        let all: Vec<sys::cudnnBackendDescriptor_t> = to.iter().map(|descriptor| descriptor.0).collect();
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &all)
    }

    fn numbers(&self, name: Name, values: &[i64]) -> Result<()> {
        self.set(name, Type::CUDNN_TYPE_INT64, values)
    }

    /// One of an enumeration's.
    fn say(&self, name: Name, ty: Type, value: i32) -> Result<()> {
        self.set(name, ty, &[value])
    }

    fn finish(&self) -> Result<()> {
        // SAFETY: the descriptor is alive.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, "a description")
    }

    /// Reads at most `most` values of an attribute; how many there are.
    ///
    /// # Safety
    /// `into` has room for as many of the attribute's type.
    unsafe fn get(&self, name: Name, ty: Type, most: usize, into: *mut c_void) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the caller's; the count lives through the call.
        let got = unsafe { sys::cudnnBackendGetAttribute(self.0, name, ty, most as i64, &mut count, into) };
        check(got, &format!("{name:?}"))?;
        Ok(count.max(0) as usize)
    }

    fn count(&self, name: Name, ty: Type) -> Result<usize> {
        // SAFETY: no value is asked for.
        unsafe { self.get(name, ty, 0, std::ptr::null_mut()) }
    }

    fn number(&self, name: Name) -> Result<i64> {
        let mut number = 0i64;
        // SAFETY: there is room for one.
        unsafe { self.get(name, Type::CUDNN_TYPE_INT64, 1, (&raw mut number).cast()) }?;
        Ok(number)
    }

    /// Values of an enumeration.
    fn said(&self, name: Name, ty: Type, most: usize) -> Result<Vec<i32>> {
        let mut values = vec![0i32; most];
        // SAFETY: there is room for so many.
        let count = unsafe { self.get(name, ty, most, values.as_mut_ptr().cast()) }?;
        values.truncate(count);
        Ok(values)
    }

    fn descriptors(&self, name: Name, kind: Kind, count: usize) -> Result<Vec<Descriptor>> {
        let all: Vec<Descriptor> = (0..count).map(|_| Descriptor::new(kind)).collect::<Result<_>>()?;
        let mut raw: Vec<sys::cudnnBackendDescriptor_t> = all.iter().map(|descriptor| descriptor.0).collect();
        // SAFETY: there is room for so many; the library fills descriptors that are there.
        let count = unsafe { self.get(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, count, raw.as_mut_ptr().cast()) }?;
        Ok(all.into_iter().take(count).collect())
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // A plan's code may still run on a GPU that stands still, for which this would wait.
        if is_abandoned() {
            return;
        }
        // SAFETY: the descriptor is this value's own.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}
