//! The vocabulary that compiler, kernels and runtime share: types on a mesh, kernels, programs.
//!
//! Nothing here knows how a program was made or how it is executed.

pub mod artifact;
pub mod check;
pub mod external;
pub mod factors;
pub mod glob;
pub mod kernel;
pub mod manifest;
#[allow(unsafe_code)]
pub mod map;
pub mod mesh;
pub mod philox;
pub mod program;
pub mod rounding;
pub mod simulate;
pub mod text;
pub mod types;
pub mod window;

pub use factors::{FactorId, FactorSpec};
pub use glob::Glob;
pub use mesh::{AxisId, Coordinates, Extent, Mesh, MeshAxis};
pub use types::{AxisList, DType, Reduce, Shape, Sharding, TensorType};
pub use window::{Pool, PoolDim, Window};
