//! Types of values: element type, global shape, and how the mesh holds it.
//!
//! Text: `f32[64/mb/dp, 1024/tp]+tp` is 64 × 1024, rows over `mb` then `dp`, columns over `tp`, a pending sum over `tp`.

use crate::mesh::{AxisId, Coordinates, Extent, Mesh};
use smallvec::SmallVec;

/// Global sizes, one per dim.
pub type Shape = SmallVec<[u64; 4]>;
/// The mesh axes that split one dim, major first.
pub type AxisList = SmallVec<[AxisId; 2]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

/// How the shards of a pending value combine to the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    Sum,
    Max,
    Min,
    Prod,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sharding {
    /// One list per dim; an axis occurs at most once in a type.
    pub dims: SmallVec<[AxisList; 4]>,
    /// Axes over which a reduction is still to be done, sorted.
    pub pending: SmallVec<[(AxisId, Reduce); 2]>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    pub dtype: DType,
    /// Global shape.
    pub shape: Shape,
    pub sharding: Sharding,
}

impl DType {
    pub const ALL: [DType; 13] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::U16,
        DType::I16,
        DType::U32,
        DType::I32,
        DType::U64,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    pub fn bytes(self) -> u64 {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::U16 => "u16",
            DType::I16 => "i16",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::U64 => "u64",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl Reduce {
    pub fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Max => "max",
            Reduce::Min => "min",
            Reduce::Prod => "prod",
        }
    }

    pub fn parse(name: &str) -> Option<Reduce> {
        [Reduce::Sum, Reduce::Max, Reduce::Min, Reduce::Prod].into_iter().find(|r| r.name() == name)
    }
}

impl Sharding {
    /// Whole on every rank.
    pub fn replicated(rank: usize) -> Sharding {
        Sharding { dims: SmallVec::from_elem(AxisList::new(), rank), pending: SmallVec::new() }
    }

    pub fn is_replicated(&self) -> bool {
        self.pending.is_empty() && self.dims.iter().all(|d| d.is_empty())
    }

    pub fn is_pending(&self, axis: AxisId) -> bool {
        self.pending.iter().any(|&(a, _)| a == axis)
    }

    /// Whether `axis` splits a dim or is pending.
    pub fn uses(&self, axis: AxisId) -> bool {
        self.is_pending(axis) || self.dims.iter().any(|d| d.contains(&axis))
    }

    /// The same with `pending` instead, sorted.
    pub fn with_pending(&self, pending: impl IntoIterator<Item = (AxisId, Reduce)>) -> Sharding {
        let mut pending: SmallVec<[(AxisId, Reduce); 2]> = pending.into_iter().collect();
        pending.sort();
        pending.dedup();
        Sharding { dims: self.dims.clone(), pending }
    }
}

impl TensorType {
    /// A type that every rank holds whole.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = u64>) -> TensorType {
        let shape: Shape = shape.into_iter().collect();
        let sharding = Sharding::replicated(shape.len());
        TensorType { dtype, shape, sharding }
    }

    pub fn with_sharding(&self, sharding: Sharding) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.shape.clone(), sharding }
    }

    pub fn with_dtype(&self, dtype: DType) -> TensorType {
        TensorType { dtype, ..self.clone() }
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Global number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Sizes of the block that each rank holds.
    pub fn local_shape(&self, mesh: &Mesh) -> Shape {
        self.shape.iter().zip(&self.sharding.dims).map(|(&d, axes)| mesh.block(d, axes)).collect()
    }

    pub fn local_bytes(&self, mesh: &Mesh) -> u64 {
        self.local_shape(mesh).iter().product::<u64>() * self.dtype.bytes()
    }

    /// What the rank at `at` holds, dim by dim.
    pub fn extents(&self, mesh: &Mesh, at: &Coordinates) -> SmallVec<[Extent; 4]> {
        self.shape.iter().zip(&self.sharding.dims).map(|(&d, axes)| mesh.extent(d, axes, at)).collect()
    }

    /// Whether the value differs from microbatch to microbatch: `mb` splits a dim or is pending.
    pub fn is_per_microbatch(&self, mesh: &Mesh) -> bool {
        mesh.microbatch_axis().is_some_and(|mb| self.sharding.uses(mb))
    }

    /// `f32[64/mb, 8]+tp` with the mesh's axis names.
    pub fn text(&self, mesh: &Mesh) -> String {
        let dims: Vec<String> = self
            .shape
            .iter()
            .zip(&self.sharding.dims)
            .map(|(d, axes)| axes.iter().fold(d.to_string(), |s, &a| s + "/" + mesh.name(a)))
            .collect();
        let pending: String = self
            .sharding
            .pending
            .iter()
            .map(|&(a, r)| match r {
                Reduce::Sum => format!("+{}", mesh.name(a)),
                other => format!("+{}:{}", other.name(), mesh.name(a)),
            })
            .collect();
        format!("{}[{}]{}", self.dtype.name(), dims.join(", "), pending)
    }

    /// Reads what `text` prints; `Err` says what is wrong.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<TensorType, String> {
        let open = text.find('[').ok_or_else(|| format!("`{text}` is not a type: no `[`"))?;
        let close = text.find(']').filter(|&c| c > open).ok_or_else(|| format!("`{text}` is not a type: no `]`"))?;
        let dtype = DType::parse(&text[..open]).ok_or_else(|| format!("unknown dtype `{}`", &text[..open]))?;
        let axis = |name: &str| mesh.axis(name).ok_or_else(|| format!("the mesh has no axis `{name}`"));
        let mut ty = TensorType::new(dtype, []);
        for dim in text[open + 1..close].split(',').map(str::trim).filter(|d| !d.is_empty()) {
            let mut parts = dim.split('/');
            let size = parts.next().unwrap_or_default();
            ty.shape.push(size.parse().map_err(|_| format!("`{size}` is not a dim size"))?);
            ty.sharding.dims.push(parts.map(axis).collect::<Result<_, _>>()?);
        }
        for pending in text[close + 1..].split('+').map(str::trim).filter(|p| !p.is_empty()) {
            let (reduce, name) = pending.split_once(':').unwrap_or(("sum", pending));
            let reduce = Reduce::parse(reduce).ok_or_else(|| format!("unknown reduction `{reduce}`"))?;
            ty.sharding.pending.push((axis(name)?, reduce));
        }
        ty.sharding.pending.sort();
        ty.check_axes(mesh)?;
        Ok(ty)
    }

    /// Each axis at most once, in a dim or pending.
    pub fn check_axes(&self, mesh: &Mesh) -> Result<(), String> {
        let mut seen = vec![false; mesh.axes.len()];
        let pending = self.sharding.pending.iter().map(|&(a, _)| a);
        for axis in self.sharding.dims.iter().flatten().copied().chain(pending) {
            if std::mem::replace(&mut seen[axis.0 as usize], true) {
                return Err(format!("axis `{}` occurs twice in {}", mesh.name(axis), self.text(mesh)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_round_trip() {
        let mesh = Mesh::new(&[("mb", 2), ("dp", 2), ("tp", 2)]);
        for text in ["f32[]", "f32[64/mb/dp, 1024/tp]", "f32[64/mb, 256]+tp", "i64[3]+mb+max:tp"] {
            assert_eq!(TensorType::parse(text, &mesh).unwrap().text(&mesh), text);
        }
        for bad in ["f32", "f33[]", "f32[4/xx]", "f32[4/tp]+tp", "f32[a]", "f32]["] {
            assert!(TensorType::parse(bad, &mesh).is_err(), "{bad}");
        }
    }
}
