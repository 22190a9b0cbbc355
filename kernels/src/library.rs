//! Kernels that are written by hand, and the vector primitives that generated kernels call.

pub mod attention;
pub mod convolution;
mod factors;
mod few;
mod gemm;
pub mod half;
mod lines;
pub mod math;
pub mod matmul;
mod microkernel;
mod pack;
pub mod peak;
pub mod pool;
pub mod random;
pub mod scatter;
mod simd;
mod sweep;
#[cfg(target_arch = "x86_64")]
mod tiles;
pub mod top_k;
mod transform;
pub mod vector;

/// A pointer that chunks of one parallel-for share; they write disjoint parts of what it points to.
pub(crate) struct SharedPtr<T>(*mut T);

impl<T> Clone for SharedPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedPtr<T> {}

// SAFETY: the pointer is only a number; whoever dereferences it keeps the chunks' parts disjoint.
unsafe impl<T> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    pub(crate) fn new(pointer: *mut T) -> Self {
        SharedPtr(pointer)
    }

    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}
