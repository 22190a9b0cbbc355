//! Reads the annotations of a model. Errors name the node; sizes come from a file that may be hostile.

use super::{Annotated, Annotations, Cut, Spec};
use crate::error::{Error, Result};
use crate::import::Model;
use crate::import::proto::simple_sharded_dim_proto::Dim;
use crate::import::proto::{
    DeviceConfigurationProto, NodeDeviceConfigurationProto, NodeProto, ShardedDimProto, ShardingSpecProto,
};

/// The annotations of `model` for `devices` devices, and what to tell of those that say nothing here. Of several configurations
/// of that many the first counts.
/// Errors: a node that names a configuration the model lacks; a spec without a tensor of its node; a dim without shards.
pub fn read(model: &Model, devices: u32) -> Result<(Annotations, Vec<String>)> {
    let mut found = Annotations::default();
    let declared = &model.proto.configuration;
    let annotated = model.graph().node.iter().any(|node| !node.device_configurations.is_empty());
    if declared.is_empty() && !annotated {
        return Ok((found, Vec::new()));
    }
    let fits = |c: &&DeviceConfigurationProto| u32::try_from(c.num_devices()) == Ok(devices);
    let chosen = declared.iter().find(fits).map(|c| c.name());
    let mut warnings = Vec::new();
    if chosen.is_none() && annotated {
        let counts: Vec<String> = declared.iter().map(|c| format!("`{}` of {}", c.name(), c.num_devices())).collect();
        warnings.push(format!(
            "the model's device annotations are not used: it declares {}, the mesh has {devices} devices",
            if counts.is_empty() { "no configuration".to_owned() } else { counts.join(", ") }
        ));
    }
    let mut inside = model.proto.functions.iter().flat_map(|function| &function.node);
    if inside.any(|node| !node.device_configurations.is_empty()) {
        warnings.push("device annotations inside functions are not used".to_owned());
    }
    for (index, node) in model.graph().node.iter().enumerate() {
        found.makers.extend(node.output.iter().filter(|name| !name.is_empty()).map(|name| (name.clone(), index)));
        let place = || format!("node {index} `{}` ({})", node.name(), node.op_type());
        for configuration in &node.device_configurations {
            let id = configuration.configuration_id();
            if !declared.iter().any(|c| c.name() == id) {
                let what = format!("device configuration `{id}` is not one of the model's");
                return Err(Error::attribute(what).at(place()));
            }
            if chosen == Some(id) {
                let annotated = of_node(node, configuration, devices).map_err(|error| error.at(place()))?;
                found.nodes.insert(index, Annotated { place: place(), ..annotated });
            }
        }
    }
    Ok((found, warnings))
}

fn of_node(node: &NodeProto, configuration: &NodeDeviceConfigurationProto, devices: u32) -> Result<Annotated> {
    let stage = match configuration.pipeline_stage {
        Some(stage) => Some(u32::try_from(stage).map_err(|_| Error::attribute(format!("pipeline stage {stage}")))?),
        None => None,
    };
    let tensors = configuration.sharding_spec.iter().map(|spec| of_tensor(node, spec, devices)).collect::<Result<_>>()?;
    Ok(Annotated { place: String::new(), stage, tensors })
}

fn of_tensor(node: &NodeProto, spec: &ShardingSpecProto, devices: u32) -> Result<Spec> {
    let tensor = spec.tensor_name();
    if tensor.is_empty() || !node.input.iter().chain(&node.output).any(|name| name == tensor) {
        return Err(Error::attribute(format!("a sharding of `{tensor}`, which the node neither reads nor makes")));
    }
    let dims: Vec<(i64, Cut)> = spec.sharded_dim.iter().map(|dim| of_dim(tensor, dim, devices)).collect::<Result<_>>()?;
    let shards = dims.iter().try_fold(1u64, |all, (_, cut)| all.checked_mul(cut.shards()));
    let what = |why: String| Error::attribute(format!("the sharding of `{tensor}` {why}"));
    let shards = shards.filter(|&n| n <= u64::from(devices));
    let shards = shards.ok_or_else(|| what(format!("has more shards than the {devices} devices of its configuration")))?;
    let holders = spec.device.iter().map(|&device| group(spec, device, devices)).collect::<Option<Vec<_>>>();
    let holders = holders.ok_or_else(|| what(format!("names devices other than 0 to {}", devices - 1)))?;
    // One entry that stands for all replicas of one shard, or an entry for each replica of it.
    let holders = if shards == 1 && holders.len() > 1 { vec![holders.concat()] } else { holders };
    if !holders.is_empty() && holders.len() as u64 != shards {
        return Err(what(format!("names {} devices or groups for {shards} shards", holders.len())));
    }
    Ok(Spec { tensor: tensor.to_owned(), dims, holders })
}

/// The devices that an entry of `device` stands for.
fn group(spec: &ShardingSpecProto, device: i64, devices: u32) -> Option<Vec<u32>> {
    let rank = |&device: &i64| u32::try_from(device).ok().filter(|&rank| rank < devices);
    match spec.index_to_device_group_map.iter().find(|entry| entry.key() == device) {
        Some(entry) => entry.value.iter().map(rank).collect(),
        None => Some(vec![rank(&device)?]),
    }
}

fn of_dim(tensor: &str, dim: &ShardedDimProto, devices: u32) -> Result<(i64, Cut)> {
    let what = |why: &str| Error::attribute(format!("dim {} of the sharding of `{tensor}` {why}", dim.axis()));
    let Some(axis) = dim.axis else { return Err(what("is not named")) };
    let mut factors = Vec::with_capacity(dim.simple_sharding.len());
    for factor in &dim.simple_sharding {
        let shards = u64::try_from(factor.num_shards()).ok().filter(|n| (1..=u64::from(devices)).contains(n));
        let shards = shards.ok_or_else(|| what("has a number of shards that is none"))?;
        let size = match factor.dim {
            Some(Dim::DimValue(size)) => Some(u64::try_from(size).map_err(|_| what("has a negative size"))?),
            _ => None,
        };
        factors.push((size, shards));
    }
    let total = factors.iter().try_fold(1u64, |all, (_, shards)| all.checked_mul(*shards));
    if total.is_none_or(|total| total > u64::from(devices)) {
        return Err(what("has more shards than there are devices"));
    }
    Ok((axis, Cut(factors)))
}
