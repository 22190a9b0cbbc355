//! Matrix products by cuBLASLt, where it is installed and faster than dcc's own kernels.
//!
//! For each product the library's algorithms and the own kernel are timed once (`choices`). Without a folder to keep that in, the library's first
//! choice is taken. Products of f32 stay in f32: never TF32.

use super::choices::{self, Choice, timed};
use super::driver::{Buffer, Gpu};
use super::queue::Stream;
use crate::error::{Error, Result};
use cudarc::cublaslt::sys;
use dcc_kernels::cuda::library::gemm::{Gemm, Matrix};
use dcc_program::types::DType;
use std::ffi::c_void;

/// What the library may use beside operands and result.
const WORKSPACE: usize = 32 << 20;
/// What operands begin at multiples of.
const ALIGN: u32 = 16;
/// Algorithms that are timed.
const CANDIDATES: usize = 8;

/// The library on one GPU.
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: Buffer,
    /// The GPU and the library's version: what a choice is for.
    place: String,
}

/// A product by the library.
pub struct Product {
    gemm: Gemm,
    description: sys::cublasLtMatmulDesc_t,
    /// A, B, D.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn check(status: sys::cublasStatus_t, what: &str) -> Result<()> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(Error::device(format!("cuBLASLt, {what}: {status:?}"))),
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F64 => sys::cudaDataType::CUDA_R_64F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

impl Products {
    /// `None` where the library is not installed, or does not fit the driver.
    pub fn open(gpu: &Gpu) -> Result<Option<Products>> {
        // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place lives through the call.
        if let Err(error) = check(unsafe { sys::cublasLtCreate(&mut handle) }, "no handle") {
            tracing::warn!(%error, "products are computed by dcc's kernels alone");
            return Ok(None);
        }
        // SAFETY: the library is there.
        let version = unsafe { sys::cublasLtGetVersion() };
        let place = format!("{} {} {version}", gpu.name(), gpu.arch().name());
        Ok(Some(Products { handle, workspace: gpu.allocate(WORKSPACE)?, place }))
    }

    /// The fastest way to compute `gemm`; `None`: the own kernel. `operands`: where lhs, rhs and a result may lie meanwhile, whose contents are
    /// lost; `own` starts the own kernel on them.
    pub fn choose(
        &self,
        stream: &Stream,
        gemm: &Gemm,
        operands: [u64; 3],
        own: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Product>> {
        let key = format!("{} {gemm:?}", self.place);
        match choices::chosen(key, || self.fastest(stream, gemm, operands, own))? {
            Choice::Library(data) => {
                let product = Product::new(gemm, sys::cublasLtMatmulAlgo_t { data })?;
                // The library loads an algorithm's code when it is first used: not where steps are recorded.
                self.start(stream, &product, operands)?;
                stream.wait()?;
                Ok(Some(product))
            }
            Choice::Own | Choice::Apart => Ok(None),
        }
    }

    /// Whether `apart`, which starts a product and the kernel behind it, takes less time than `as_one`. `name`: of the two.
    pub fn apart_is_faster(
        &self,
        stream: &Stream,
        name: &str,
        as_one: &mut dyn FnMut() -> Result<()>,
        apart: &mut dyn FnMut() -> Result<()>,
    ) -> Result<bool> {
        if !choices::are_kept() {
            return Ok(true);
        }
        let key = format!("{} with tail {name}", self.place);
        let faster = || Ok(if timed(stream, apart)? < timed(stream, as_one)? { Choice::Apart } else { Choice::Own });
        Ok(choices::chosen(key, faster)? == Choice::Apart)
    }

    fn fastest(&self, stream: &Stream, gemm: &Gemm, operands: [u64; 3], own: &mut dyn FnMut() -> Result<()>) -> Result<Choice> {
        let candidates = self.candidates(gemm)?;
        if !choices::are_kept() {
            return Ok(candidates.first().map_or(Choice::Own, |algorithm| Choice::Library(algorithm.data)));
        }
        let mut best = (timed(stream, own)?, Choice::Own);
        for algorithm in candidates {
            let product = Product::new(gemm, algorithm)?;
            // One that the library then refuses is none.
            if self.start(stream, &product, operands).is_err() {
                continue;
            }
            let took = timed(stream, &mut || self.start(stream, &product, operands))?;
            if took < best.0 {
                best = (took, Choice::Library(algorithm.data));
            }
        }
        Ok(best.1)
    }

    /// What the library thinks is fast, best first.
    fn candidates(&self, gemm: &Gemm) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let product = Product::new(gemm, sys::cublasLtMatmulAlgo_t { data: [0; 8] })?;
        let mut preference = std::ptr::null_mut();
        // SAFETY: every pointer is to a place of its type that lives through the call; the sizes are those of the attributes' types.
        unsafe {
            check(sys::cublasLtMatmulPreferenceCreate(&mut preference), "no preference")?;
            let set = |attribute, value: *const c_void, bytes| {
                check(sys::cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes), "a preference")
            };
            let (workspace, alignment) = (WORKSPACE as u64, ALIGN);
            set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), 8)?;
            // Sums of parts in the type of the sums, by a kernel behind: in one order.
            let schemes: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const schemes).cast(), 4)?;
            for attribute in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(attribute, (&raw const alignment).cast(), 4)?;
            }
            let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = std::mem::zeroed();
            let mut count = 0;
            let [a, b, d] = product.layouts;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product.description,
                a,
                b,
                d,
                d,
                preference,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            let _ = sys::cublasLtMatmulPreferenceDestroy(preference);
            // Whatever it has against the product, dcc's own kernel computes it.
            if status != sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                tracing::debug!(?status, ?gemm, "cuBLASLt has no algorithm");
                return Ok(Vec::new());
            }
            let good = |result: &&sys::cublasLtMatmulHeuristicResult_t| {
                result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE
            };
            Ok(found[..count as usize].iter().filter(good).map(|result| result.algo).collect())
        }
    }

    /// Starts a product on lhs, rhs and result, behind all work of the stream so far.
    pub fn start(&self, stream: &Stream, product: &Product, operands: [u64; 3]) -> Result<()> {
        let Gemm { a, b, d, operands: dtype, accumulate, .. } = product.gemm;
        let at = |matrix: Matrix| operands[matrix.operand];
        let beta = if accumulate { 1.0 } else { 0.0 };
        let (narrow, wide) = ([1.0f32, beta as f32], [1.0f64, beta]);
        // Scales have the type of the sums.
        let scales: [*const c_void; 2] = match dtype {
            DType::F64 => [(&raw const wide[0]).cast(), (&raw const wide[1]).cast()],
            _ => [(&raw const narrow[0]).cast(), (&raw const narrow[1]).cast()],
        };
        let [of_a, of_b, of_d] = product.layouts;
        // SAFETY: who prepared the product saw that the operands are as large as the layouts say; all is alive until the work is done; the
        // library copies the scales before it returns.
        let started = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                product.description,
                scales[0],
                at(a) as *const c_void,
                of_a,
                at(b) as *const c_void,
                of_b,
                scales[1],
                at(d) as *const c_void,
                of_d,
                at(d) as *mut c_void,
                of_d,
                &product.algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                stream.raw().cast(),
            )
        };
        check(started, "a product")
    }
}

impl Product {
    fn new(gemm: &Gemm, algorithm: sys::cublasLtMatmulAlgo_t) -> Result<Product> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Gemm { rows, columns, sums, batch, a, b, d, operands, result, .. } = *gemm;
        let compute = match operands {
            DType::F64 => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let scale = if operands == DType::F64 { DType::F64 } else { DType::F32 };
        let mut product =
            Product { gemm: *gemm, description: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3], algorithm };
        let created =
            // SAFETY: the place lives through the call.
            unsafe { sys::cublasLtMatmulDescCreate(&mut product.description, compute, data_type(scale)) };
        check(created, "a product's description")?;
        for (attribute, matrix) in [(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, a), (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, b)] {
            let operation: i32 = i32::from(matrix.transposed);
            // SAFETY: the attribute is a number of 4 bytes: 0 as it is stored, 1 transposed.
            let set = unsafe {
                sys::cublasLtMatmulDescSetAttribute(product.description, attribute, (&raw const operation).cast(), 4)
            };
            check(set, "a product's description")?;
        }
        let shapes = [(a, [rows, sums], operands), (b, [sums, columns], operands), (d, [rows, columns], result)];
        for (layout, (matrix, [rows, columns], dtype)) in product.layouts.iter_mut().zip(shapes) {
            *layout = made_layout(matrix, matrix.stored(rows, columns), dtype, batch)?;
        }
        Ok(product)
    }
}

fn made_layout(matrix: Matrix, stored: [usize; 2], dtype: DType, batch: usize) -> Result<sys::cublasLtMatrixLayout_t> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let mut layout = std::ptr::null_mut();
    let [rows, columns] = stored.map(|size| size as u64);
    let (count, stride) = (batch as i32, matrix.batch as i64);
    // SAFETY: the places live through the calls; the attributes have 4 and 8 bytes.
    unsafe {
        check(
            sys::cublasLtMatrixLayoutCreate(&mut layout, data_type(dtype), rows, columns, matrix.leading as i64),
            "a layout",
        )?;
        let set = |attribute, value: *const c_void, bytes| {
            check(sys::cublasLtMatrixLayoutSetAttribute(layout, attribute, value, bytes), "a layout")
        };
        set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), 4)?;
        set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const stride).cast(), 8)?;
    }
    Ok(layout)
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: all are this value's own, or null, which the library takes; started work does not need them.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = sys::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.description.is_null() {
                let _ = sys::cublasLtMatmulDescDestroy(self.description);
            }
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        super::driver::release(|| {
            // SAFETY: the handle is this value's own, and all its products are done.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
            cudarc::driver::sys::CUresult::CUDA_SUCCESS
        });
    }
}
