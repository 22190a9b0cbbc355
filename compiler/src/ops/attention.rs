//! Scaled dot-product attention and its gradient as library ops. Dao 2023, arXiv 2307.08691.

use super::{OpDef, Rule};
use crate::error::{Error, Result};
use dcc_program::program::{Attention as Attributes, MaskKind};
use dcc_program::{FactorId, FactorSpec, TensorType};
use serde::{Deserialize, Serialize};

/// Operands Q, K, V and the mask if there is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attention {
    pub attributes: Attributes,
    /// 0: O; 1: the log-sum-exp of the scores, O's dims without the value dim, f32 or f64 as the dtype.
    pub out: u8,
}

/// Operands dO, Q, K, V, O, Lse and the mask if there is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttentionGrad {
    pub attributes: Attributes,
    /// 0: dQ, 1: dK, 2: dV.
    pub out: u8,
}

/// Factors by name, as `dcc_program::program::Attention` documents them: `b h t e`, keys `s`, value dim `f`, group `g`.
fn factor(spec: &FactorSpec, name: &str) -> Option<FactorId> {
    spec.names.iter().position(|n| n == name).map(|i| FactorId(i as u8))
}

impl Attention {
    /// Spec of this result: O's, or Lse's.
    fn spec(&self) -> FactorSpec {
        let mut spec = self.attributes.spec.clone();
        if self.out == 1 {
            let f = factor(&spec, "f");
            spec.result.retain(|d| d.first().copied() != f);
        }
        spec
    }
}

impl AttentionGrad {
    /// dO, Q, K, V, O, Lse (, mask) -> the operand whose gradient this is.
    fn spec(&self) -> FactorSpec {
        let forward = &self.attributes.spec;
        let lse = Attention { attributes: self.attributes.clone(), out: 1 }.spec().result;
        let mut spec = forward.clone();
        spec.operands = vec![forward.result.clone()];
        spec.operands.extend(forward.operands[..3].iter().cloned());
        spec.operands.extend([forward.result.clone(), lse]);
        spec.operands.extend(forward.operands.get(3).cloned());
        spec.result = forward.operands[usize::from(self.out)].clone();
        spec
    }
}

fn infer(name: &str, attributes: &Attributes, spec: &FactorSpec, operands: &[&TensorType]) -> Result<TensorType> {
    let masked = usize::from(attributes.mask != MaskKind::None);
    if attributes.spec.operands.len() != 3 + masked {
        return Err(Error::graph(format!("{name}({}) has not {} operands", attributes.spec.text(), 3 + masked)));
    }
    if ["e", "f", "t", "s"].iter().any(|n| factor(&attributes.spec, n).is_none()) {
        return Err(Error::graph(format!("{name}({}) lacks one of the factors t s e f", attributes.spec.text())));
    }
    super::dot::infer_by_spec(name, spec, operands)
}

/// Queries and keys stay whole (context parallelism expands the op), as do the dims that are summed inside.
fn rule(spec: FactorSpec) -> Rule {
    let whole = ["t", "s", "e", "f"].iter().filter_map(|n| factor(&spec, n)).collect();
    Rule { whole, ..Rule::new(spec) }
}

impl OpDef for Attention {
    const NAME: &'static str = "attention";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer(Self::NAME, &self.attributes, &self.spec(), operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        rule(self.spec())
    }
}

impl OpDef for AttentionGrad {
    const NAME: &'static str = "attention_grad";

    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType> {
        infer(Self::NAME, &self.attributes, &self.spec(), operands)
    }

    fn rule(&self, _: &[&TensorType], _: &TensorType) -> Rule {
        rule(self.spec())
    }
}
