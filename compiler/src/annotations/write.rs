//! Writes a plan into the model that it is of: every node's stage and shards, under one configuration.

use crate::compile::Compiled;
use crate::graph::NodeId;
use crate::import::Model;
use crate::import::proto::simple_sharded_dim_proto::Dim;
use crate::import::proto::*;
use crate::ops::Op;
use crate::plan::annotated::Origins;
use crate::plan::forward::Forward;
use dcc_program::mesh::Coordinates;
use dcc_program::program::Piece;
use dcc_program::{AxisList, Mesh, Shape};

/// The first version of ONNX's IR that has device configurations.
const IR_VERSION: i64 = 11;

/// `model` with the plan of `compiled`. Configurations of as many devices and what nodes say of them are replaced. Not written,
/// as the format cannot say it: what rewriting removed, parameters computed in unequal parts, pending sums.
pub fn annotate(model: &Model, compiled: &Compiled) -> ModelProto {
    let mesh = &compiled.plan.mesh;
    let devices = mesh.world();
    let mut proto = model.proto.clone();
    let stale = |c: &DeviceConfigurationProto| u32::try_from(c.num_devices()) == Ok(devices);
    let old: Vec<String> = proto.configuration.iter().filter(|c| stale(c)).map(|c| c.name().to_owned()).collect();
    proto.configuration.retain(|c| !stale(c));
    let sizes: Vec<String> = mesh.space().map(|axis| format!("{}{}", mesh.name(axis), mesh.size(axis))).collect();
    let mut name = format!("dcc_{}", sizes.join("_"));
    while proto.configuration.iter().any(|c| c.name() == name) {
        name.push('_');
    }
    let device = Vec::new();
    let configuration = DeviceConfigurationProto { name: Some(name.clone()), num_devices: Some(devices as i32), device };
    proto.configuration.push(configuration);
    proto.ir_version = Some(proto.ir_version().max(IR_VERSION));
    let forward = Forward::of(&compiled.training.graph);
    let writer = Writer { compiled, origins: Origins::of(&forward), forward: &forward, mesh, name };
    for (index, node) in proto.graph.iter_mut().flat_map(|graph| &mut graph.node).enumerate() {
        node.device_configurations.retain(|c| !old.iter().any(|name| name == c.configuration_id()));
        node.device_configurations.extend(writer.node(index, node));
    }
    proto
}

struct Writer<'a> {
    compiled: &'a Compiled,
    forward: &'a Forward<'a>,
    origins: Origins,
    mesh: &'a Mesh,
    name: String,
}

/// How a value lies: its dims' axes and sizes, and the dim that a parameter's equal parts lie on with their number.
struct Lies<'a> {
    dims: Vec<AxisList>,
    shape: &'a Shape,
    parts: (usize, u64),
    batched: bool,
}

impl Writer<'_> {
    fn node(&self, index: usize, node: &NodeProto) -> Option<NodeDeviceConfigurationProto> {
        let staged = self.origins.staged(self.forward, index);
        let stage = staged.and_then(|id| self.compiled.plan.stages.get(&id)).copied();
        // Of virtual stages, the rank's.
        let here = stage.map(|stage| self.compiled.plan.layout().place(stage).0);
        let mut specs = Vec::new();
        for name in &node.input {
            let value = self.parameter(name).or_else(|| self.lies(self.origins.input(name)?, name));
            specs.extend(value.map(|lies| self.spec(name, &lies, here)));
        }
        if let [name] = &node.output[..]
            && let Some(shape) = self.compiled.imported.shapes.get(name)
            && let Some(id) = self.origins.result(self.forward.graph, index, shape)
        {
            specs.extend(self.lies(id, name).map(|lies| self.spec(name, &lies, here)));
        }
        if stage.is_none() && specs.is_empty() {
            return None;
        }
        Some(NodeDeviceConfigurationProto {
            configuration_id: Some(self.name.clone()),
            sharding_spec: specs,
            pipeline_stage: stage.map(|stage| stage as i32),
        })
    }

    fn lies(&self, id: NodeId, name: &str) -> Option<Lies<'_>> {
        let shape = self.compiled.imported.shapes.get(name)?;
        Some(Lies { dims: self.dims(id)?, shape, parts: (0, 1), batched: self.forward.is_batched(id) })
    }

    fn dims(&self, id: NodeId) -> Option<Vec<AxisList>> {
        let strategy = self.compiled.plan.strategies.get(&id)?;
        let axes = |dim: &dcc_program::factors::DimFactors| {
            let all = dim.iter().flat_map(|factor| &strategy.factors[usize::from(factor.0)]);
            all.copied().filter(|&axis| !self.mesh.is_microbatch(axis) && self.mesh.size(axis) > 1).collect()
        };
        Some(self.forward.rule(id).spec.result.iter().map(axes).collect())
    }

    /// A parameter, all parts of which lie alike.
    fn parameter(&self, name: &str) -> Option<Lies<'_>> {
        let shape = self.compiled.imported.shapes.get(name)?;
        let (first, others) = self.origins.params(name).split_first()?;
        let dims = self.dims(*first)?;
        let alike = others.iter().all(|&other| self.dims(other).as_ref() == Some(&dims));
        let pieces = || self.origins.params(name).iter().map(|&id| piece(&self.forward.graph[id].op));
        let parts = match pieces().next().flatten() {
            None => (0, 1),
            Some(Piece { dim, start, end }) => {
                let equal = pieces().flatten().all(|other| other.dim == dim && other.end - other.start == end - start);
                (usize::from(dim), shape[usize::from(dim)] / if equal { end - start } else { return None })
            }
        };
        alike.then_some(Lies { dims, shape, parts, batched: false })
    }

    fn spec(&self, name: &str, lies: &Lies, stage: Option<u32>) -> ShardingSpecProto {
        let sharded = lies.dims.iter().enumerate().filter(|(_, axes)| !axes.is_empty());
        let sharded_dim = sharded.map(|(dim, axes)| self.dim(dim, axes, lies)).collect();
        let mut spec = ShardingSpecProto { tensor_name: Some(name.to_owned()), sharded_dim, ..Default::default() };
        let holders = self.holders(&lies.dims, stage);
        for (shard, ranks) in holders.iter().enumerate() {
            let entry = if let [one] = ranks[..] { one } else { -1 - shard as i64 };
            spec.device.push(entry);
            if ranks.len() > 1 {
                let entry = IntIntListEntryProto { key: Some(entry), value: ranks.clone() };
                spec.index_to_device_group_map.push(entry);
            }
        }
        spec
    }

    fn dim(&self, dim: usize, axes: &AxisList, lies: &Lies) -> ShardedDimProto {
        let shards = self.mesh.shards(axes);
        // The batch is the run's, not the model's.
        let of_batch = lies.batched && axes.iter().any(|axis| self.compiled.plan.batch.contains(axis));
        let factor = |size: u64, shards: u64| {
            let size = if of_batch { Dim::DimParam("batch".to_owned()) } else { Dim::DimValue(size as i64) };
            SimpleShardedDimProto { dim: Some(size), num_shards: Some(shards as i64) }
        };
        let size = lies.shape[dim];
        let simple_sharding = match lies.parts {
            (of, parts) if of == dim && parts > 1 => vec![factor(parts, 1), factor(size / parts, shards)],
            _ => vec![factor(size, shards)],
        };
        ShardedDimProto { axis: Some(dim as i64), simple_sharding }
    }

    /// Devices of each shard, of all stages where the value is on none.
    fn holders(&self, dims: &[AxisList], stage: Option<u32>) -> Vec<Vec<i64>> {
        let mesh = self.mesh;
        let mut holders = vec![Vec::new(); mesh.shards(dims.iter().flatten()) as usize];
        let on_stage = |at: &Coordinates| stage.is_none_or(|stage| mesh.axis("pp").is_none_or(|pp| at.get(pp) == stage));
        for rank in 0..mesh.world() {
            let at = mesh.coordinates(rank);
            if on_stage(&at) {
                holders[mesh.shard(dims.iter().flatten(), &at) as usize].push(i64::from(rank));
            }
        }
        holders
    }
}

fn piece(op: &Op) -> Option<Piece> {
    if let Op::Param(param) = op { param.piece } else { None }
}
