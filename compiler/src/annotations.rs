//! ONNX's own multi-device annotations: what a model's nodes say about stages and shards, read as pins and written from a plan.
//!
//! A model declares configurations of so many devices; a node may name one with a pipeline stage and, for its inputs and outputs,
//! into how many shards each dim is cut and which devices hold each (onnx.proto: `DeviceConfigurationProto`,
//! `NodeDeviceConfigurationProto`, `ShardingSpecProto`). Devices are ranks. Shards over devices, stages: nothing here knows
//! meshes; `plan::annotated` finds the axes.

mod read;
mod write;

pub use read::read;
pub use write::annotate;

use std::collections::BTreeMap;

/// The annotations under one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Annotations {
    /// By the node's position in the file.
    pub nodes: BTreeMap<usize, Annotated>,
    /// Position of the node that gives each value.
    pub makers: BTreeMap<String, usize>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Annotated {
    /// For messages.
    pub place: String,
    pub stage: Option<u32>,
    pub tensors: Vec<Spec>,
}

/// How one operand or result of a node is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub tensor: String,
    /// The dims that are cut, from the back if negative.
    pub dims: Vec<(i64, Cut)>,
    /// Devices of each shard, the last cut dim fastest; empty where the model does not say.
    pub holders: Vec<Vec<u32>>,
}

/// The factors of a dim, major first: the size of each, if it is known, and its shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut(pub Vec<(Option<u64>, u64)>);

impl Cut {
    /// Shards of the whole dim.
    pub fn shards(&self) -> u64 {
        self.0.iter().map(|(_, shards)| shards).product()
    }

    /// Blocks of equal meaning that the dim consists of, each cut alike: those before the factor that is cut. `None` where
    /// several factors are, or the sizes before it are unknown.
    pub fn pieces(&self) -> Option<u64> {
        let cut: Vec<usize> = (0..self.0.len()).filter(|&i| self.0[i].1 > 1).collect();
        match cut[..] {
            [] => Some(1),
            [at] => self.0[..at].iter().map(|(size, _)| *size).product(),
            _ => None,
        }
    }
}
