//! Factor specs: which dims of an op's operands and result correspond.
//!
//! Text: `m k, k n -> m n`; a compound dim is written `(h e)`, major factor first.

use crate::mesh::{AxisId, Mesh};
use crate::types::{AxisList, TensorType};
use smallvec::SmallVec;

/// Index of a factor in `FactorSpec::names`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FactorId(pub u8);

/// The factors of one dim, major first; one for a plain dim, none for a dim of size 1 that no factor indexes.
pub type DimFactors = SmallVec<[FactorId; 1]>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct FactorSpec {
    /// Unique names, in order of first appearance.
    pub names: Vec<String>,
    pub operands: Vec<Vec<DimFactors>>,
    pub result: Vec<DimFactors>,
}

impl From<FactorSpec> for String {
    fn from(spec: FactorSpec) -> String {
        spec.text()
    }
}

impl TryFrom<String> for FactorSpec {
    type Error = String;

    fn try_from(text: String) -> Result<FactorSpec, String> {
        FactorSpec::parse(&text)
    }
}

impl FactorSpec {
    /// Every operand and the result have the same `rank` dims, named `d0 d1 …`.
    pub fn pointwise(operands: usize, rank: usize) -> FactorSpec {
        let dims: Vec<DimFactors> = (0..rank).map(|d| smallvec::smallvec![FactorId(d as u8)]).collect();
        FactorSpec { names: (0..rank).map(|d| format!("d{d}")).collect(), operands: vec![dims.clone(); operands], result: dims }
    }

    /// Parses `m k, k n -> m n`.
    pub fn parse(text: &str) -> Result<FactorSpec, String> {
        let (left, right) = text.split_once("->").ok_or_else(|| format!("`{text}` has no `->`"))?;
        let mut spec = FactorSpec { names: Vec::new(), operands: Vec::new(), result: Vec::new() };
        if !left.trim().is_empty() {
            for operand in left.split(',') {
                let dims = spec.parse_dims(operand)?;
                spec.operands.push(dims);
            }
        }
        spec.result = spec.parse_dims(right)?;
        Ok(spec)
    }

    fn parse_dims(&mut self, text: &str) -> Result<Vec<DimFactors>, String> {
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut dims = Vec::new();
        let mut compound: Option<DimFactors> = None;
        for token in spaced.split_whitespace() {
            match (token, &mut compound) {
                ("(", None) => compound = Some(DimFactors::new()),
                (")", Some(_)) => dims.extend(compound.take()),
                ("(" | ")", _) => return Err(format!("unbalanced parentheses in `{text}`")),
                (name, open) => {
                    if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                        return Err(format!("`{name}` is not a factor name"));
                    }
                    let id = self.factor(name)?;
                    match open {
                        Some(list) => list.push(id),
                        None => dims.push(smallvec::smallvec![id]),
                    }
                }
            }
        }
        if compound.is_some() { Err(format!("unbalanced parentheses in `{text}`")) } else { Ok(dims) }
    }

    fn factor(&mut self, name: &str) -> Result<FactorId, String> {
        if let Some(i) = self.names.iter().position(|n| n == name) {
            return Ok(FactorId(i as u8));
        }
        if self.names.len() >= 64 {
            return Err("more than 64 factors".to_owned());
        }
        self.names.push(name.to_owned());
        Ok(FactorId(self.names.len() as u8 - 1))
    }

    pub fn text(&self) -> String {
        let operands: Vec<String> = self.operands.iter().map(|dims| self.dims_text(dims)).collect();
        format!("{} -> {}", operands.join(", "), self.dims_text(&self.result)).trim().to_owned()
    }

    pub fn dims_text(&self, dims: &[DimFactors]) -> String {
        let dims: Vec<String> = dims
            .iter()
            .map(|factors| {
                let names: Vec<&str> = factors.iter().map(|f| self.names[f.0 as usize].as_str()).collect();
                if names.len() == 1 { names[0].to_owned() } else { format!("({})", names.join(" ")) }
            })
            .collect();
        dims.join(" ")
    }

    pub fn ids(&self) -> impl Iterator<Item = FactorId> + use<> {
        (0..self.names.len() as u8).map(FactorId)
    }

    /// Whether the factor indexes the result.
    pub fn in_result(&self, factor: FactorId) -> bool {
        self.result.iter().any(|dim| dim.contains(&factor))
    }

    pub fn in_operand(&self, operand: usize, factor: FactorId) -> bool {
        self.operands[operand].iter().any(|dim| dim.contains(&factor))
    }

    /// Sizes of all factors from the operands' and result's global shapes. Plain dims fix their factor; of a compound dim, one
    /// factor that nothing else fixes is computed by division. `Err` on a contradiction or where a size stays unknown.
    pub fn sizes(&self, operands: &[&TensorType], result: &TensorType) -> Result<Vec<u64>, String> {
        if operands.len() != self.operands.len() {
            return Err(format!("{} operands for `{}`", operands.len(), self.text()));
        }
        let sides = || self.operands.iter().zip(operands.iter().copied()).chain(std::iter::once((&self.result, result)));
        let mut sizes: Vec<Option<u64>> = vec![None; self.names.len()];
        for (dims, ty) in sides() {
            if dims.len() != ty.rank() {
                return Err(format!("rank {} for `{}` of `{}`", ty.rank(), self.dims_text(dims), self.text()));
            }
            for (dim, &size) in dims.iter().zip(&ty.shape).filter(|(dim, _)| dim.len() == 1) {
                let slot = &mut sizes[dim[0].0 as usize];
                if slot.is_some_and(|s| s != size) {
                    return Err(format!("factor {} is {} and {size}", self.names[dim[0].0 as usize], slot.unwrap_or(0)));
                }
                *slot = Some(size);
            }
        }
        // A compound dim gives the size of its last unknown factor, which may be what another one waits for.
        let compound = |(dims, ty): (&'_ Vec<DimFactors>, &'_ TensorType)| -> Vec<(DimFactors, u64)> {
            dims.iter().cloned().zip(ty.shape.iter().copied()).filter(|(dim, _)| dim.len() != 1).collect()
        };
        let mut open: Vec<(DimFactors, u64)> = sides().flat_map(compound).collect();
        while !open.is_empty() {
            let before = open.len();
            for (dim, size) in std::mem::take(&mut open) {
                let known = dim.iter().filter_map(|f| sizes[f.0 as usize]).fold(1u64, u64::saturating_mul);
                let unknown: Vec<_> = dim.iter().filter(|f| sizes[f.0 as usize].is_none()).collect();
                match unknown[..] {
                    [] if known == size => {}
                    [one] if known > 0 && size % known == 0 => sizes[one.0 as usize] = Some(size / known),
                    [_, _, ..] => open.push((dim, size)),
                    _ => return Err(self.not_dim(size, &dim)),
                }
            }
            if let (true, Some((dim, size))) = (open.len() == before, open.first()) {
                return Err(self.not_dim(*size, dim));
            }
        }
        let missing = |i: usize| format!("size of factor {} is unknown", self.names[i]);
        sizes.iter().enumerate().map(|(i, s)| s.ok_or_else(|| missing(i))).collect()
    }

    fn not_dim(&self, size: u64, dim: &DimFactors) -> String {
        format!("dim {size} is not ({})", self.dims_text(std::slice::from_ref(dim)))
    }

    /// Axes of a compound dim distributed over its factors: each factor is filled exactly before the next gets any, the last
    /// divides evenly. `None` where that does not come out. A plain dim takes all axes, even or not.
    pub fn split_axes(dim: &[FactorId], sizes: &[u64], axes: &[AxisId], mesh: &Mesh) -> Option<Vec<(FactorId, AxisList)>> {
        if let [one] = dim {
            return Some(vec![(*one, axes.iter().copied().collect())]);
        }
        let mut rest = axes.iter().copied().peekable();
        let mut out = Vec::new();
        for &factor in dim {
            let mut left = sizes[factor.0 as usize];
            let mut taken = AxisList::new();
            while let Some(&axis) = rest.peek() {
                let n = u64::from(mesh.size(axis));
                if !left.is_multiple_of(n) || (left == 1 && n != 1) {
                    break;
                }
                left /= n;
                taken.push(axis);
                rest.next();
            }
            out.push((factor, taken));
            if left != 1 {
                break;
            }
        }
        rest.peek().is_none().then_some(out)
    }

    /// The same of as many of the axes, from the first, as can be distributed.
    pub fn split_most(dim: &[FactorId], sizes: &[u64], axes: &[AxisId], mesh: &Mesh) -> Vec<(FactorId, AxisList)> {
        let mut most = (0..=axes.len()).rev().filter_map(|count| FactorSpec::split_axes(dim, sizes, &axes[..count], mesh));
        most.next().expect("no axes can be distributed over any factors")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn specs_round_trip() {
        for text in ["m k, k n -> m n", "b t (h e) -> b t h e", "-> i j", "b t ->"] {
            assert_eq!(FactorSpec::parse(text).unwrap().text(), text.trim_end());
        }
        for bad in ["m k", "(m k -> m", "m) -> m", "m+ -> m"] {
            assert!(FactorSpec::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn compound_sizes_come_by_division() {
        let spec = FactorSpec::parse("b (h e) -> b h e").unwrap();
        let x = TensorType::new(DType::F32, [2, 12]);
        assert_eq!(spec.sizes(&[&x], &TensorType::new(DType::F32, [2, 3, 4])).unwrap(), [2, 3, 4]);
        assert!(spec.sizes(&[&x], &TensorType::new(DType::F32, [2, 5, 4])).is_err());
    }

    #[test]
    fn compound_axes_fill_the_major_factor() {
        let mesh = Mesh::new(&[("a", 2), ("b", 2)]);
        let (h, e) = (FactorId(0), FactorId(1));
        let both = [AxisId(0), AxisId(1)];
        let got = FactorSpec::split_axes(&[h, e], &[2, 4], &both, &mesh).unwrap();
        assert_eq!(got, [(h, AxisList::from_slice(&[AxisId(0)])), (e, AxisList::from_slice(&[AxisId(1)]))]);
        assert!(FactorSpec::split_axes(&[h, e], &[3, 4], &both, &mesh).is_none());
    }
}
