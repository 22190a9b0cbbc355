//! Values inside the model as outputs of the graph: what `dcc verify` compares node by node.

use std::collections::{BTreeMap, BTreeSet};

use dcc_program::{DType, Shape};

use super::Importer;
use super::flatten::Flat;
use super::known::KEPT;
use super::node::ValueId;
use super::value::Value;
use crate::error::Result;
use crate::graph::NodeId;

/// Which values of the model are outputs of its graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Exposed {
    /// The model's outputs.
    #[default]
    Outputs,
    /// Those, then what each node computes.
    All,
    /// These instead.
    Only(BTreeSet<String>),
}

/// What a node of the model computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Computed {
    pub name: String,
    /// The node, as messages call it.
    pub place: String,
    /// The values that the node reads.
    pub reads: Vec<String>,
    pub dtype: DType,
    pub shape: Shape,
    /// The output of the graph that has it; values that are the same share one.
    pub output: Option<String>,
}

impl Exposed {
    pub(super) fn outputs(&self, flat: &Flat) -> Vec<(String, ValueId)> {
        match self {
            Exposed::Outputs | Exposed::All => flat.outputs.iter().map(|(name, id)| ((*name).to_owned(), *id)).collect(),
            Exposed::Only(wanted) => {
                let names = flat.names().into_iter().zip(0..).filter(|(name, _)| wanted.contains(name));
                names.map(|(name, number)| (name, ValueId(number))).collect()
            }
        }
    }
}

impl Importer<'_, '_> {
    /// Makes outputs of all values that are tensors with elements.
    pub(super) fn expose(&mut self, live: &[bool]) -> Result<Vec<Computed>> {
        let names = self.flat.names();
        let mut shown: BTreeMap<NodeId, String> = BTreeMap::new();
        let mut taken: BTreeSet<String> = self.outputs.iter().map(|(name, _)| name.clone()).collect();
        for (name, id) in &self.outputs {
            if let Some(Value::Node(node)) = &self.values[id.0 as usize] {
                shown.entry(*node).or_insert_with(|| name.clone());
            }
        }
        let mut computed = Vec::new();
        for node in &self.flat.nodes {
            let reads: Vec<String> = node.reads().map(|id| names[id.0 as usize].clone()).collect();
            for id in node.outputs.iter().flatten().filter(|id| live[id.0 as usize]) {
                let Some(value) = self.values[id.0 as usize].clone() else { continue };
                let (Ok(dtype), Ok(shape)) = (value.dtype(&self.build), value.shape(&self.build)) else { continue };
                let elements: u64 = shape.iter().product();
                let known = value.known().is_some();
                let mut output = None;
                if elements > 0 && (!known || elements <= KEPT as u64) {
                    let at = self.build.node(&value)?;
                    let name = &names[id.0 as usize];
                    output = shown.get(&at).cloned();
                    if output.is_none() && taken.insert(name.clone()) {
                        self.build.graph.outputs.push((name.clone(), at));
                        shown.insert(at, name.clone());
                        output = Some(name.clone());
                    }
                }
                let (name, place) = (names[id.0 as usize].clone(), node.place());
                computed.push(Computed { name, place, reads: reads.clone(), dtype, shape, output });
            }
        }
        Ok(computed)
    }
}
