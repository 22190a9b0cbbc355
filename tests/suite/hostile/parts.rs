//! What few exports have: functions, external data, device configurations. Put into any model, and changed.

use super::mutate::{Random, in_node, names};
use dcc::import::proto::simple_sharded_dim_proto::Dim;
use dcc::import::proto::tensor_proto::DataLocation;
use dcc::import::proto::{
    AttributeProto, DeviceConfigurationProto, FunctionProto, IntIntListEntryProto, ModelProto, NodeDeviceConfigurationProto,
    NodeProto, OperatorSetIdProto, ShardedDimProto, ShardingSpecProto, SimpleShardedDimProto, StringStringEntryProto,
    TensorProto,
};

const DOMAIN: &str = "pkg.hostile";

/// A node becomes a call of a function that has it; an attribute of it may become one of the call, or have a default.
pub fn outline(model: &mut ModelProto, random: &mut Random) {
    let number = model.functions.len();
    let versions = model.opset_import.clone();
    let Some(graph) = model.graph.as_mut().filter(|graph| !graph.node.is_empty()) else { return };
    let at = random.below(graph.node.len());
    let mut node = graph.node[at].clone();
    let attribute = (!node.attribute.is_empty()).then(|| random.below(node.attribute.len()));
    let mut given = Vec::new();
    let mut function = FunctionProto {
        name: Some(format!("F{number}")),
        domain: Some(DOMAIN.to_owned()),
        opset_import: versions,
        input: node.input.iter().filter(|name| !name.is_empty()).cloned().collect(),
        output: node.output.clone(),
        ..FunctionProto::default()
    };
    function.input.sort();
    function.input.dedup();
    if let Some(attribute) = attribute {
        let whole = node.attribute[attribute].clone();
        let refers = AttributeProto {
            name: whole.name.clone(),
            ref_attr_name: whole.name.clone(),
            r#type: whole.r#type,
            ..AttributeProto::default()
        };
        match random.below(4) {
            0 => function.attribute_proto.push(whole),
            1 => function.attribute.push(whole.name().to_owned()),
            _ => {
                function.attribute.push(whole.name().to_owned());
                given.push(whole);
            }
        }
        node.attribute[attribute] = refers;
    }
    graph.node[at] = NodeProto {
        name: node.name.clone(),
        op_type: function.name.clone(),
        domain: function.domain.clone(),
        input: function.input.clone(),
        output: node.output.clone(),
        attribute: given,
        ..NodeProto::default()
    };
    function.node.push(node);
    model.functions.push(function);
    if number == 0 {
        model.opset_import.push(OperatorSetIdProto { domain: Some(DOMAIN.to_owned()), version: Some(1) });
    }
}

/// A function with another node, name, argument or version; one that calls itself, or the next one.
pub fn in_function(model: &mut ModelProto, random: &mut Random) {
    if model.functions.is_empty() {
        (0..1 + random.below(3)).for_each(|_| outline(model, random));
    }
    let (Some(graph), count) = (&model.graph, model.functions.len()) else { return };
    if count == 0 {
        return;
    }
    let names = names(graph);
    let function = &mut model.functions[random.below(count)];
    match random.below(8) {
        0 if !function.node.is_empty() => {
            let at = random.below(function.node.len());
            in_node(&mut function.node[at], graph, &names, random);
        }
        1 => function.name = Some(format!("F{}", random.below(count + 1))),
        2 => drop(function.input.pop()),
        3 => function.input.extend(function.input.first().cloned()),
        4 => function.output.push(names[random.below(names.len())].clone()),
        5 => function.opset_import.truncate(random.below(2)),
        6 => function.attribute.push(["axis", "value", ""][random.below(3)].to_owned()),
        _ => {
            let (input, output) = (function.input.clone(), function.output.clone());
            let call = NodeProto {
                op_type: Some(format!("F{}", random.below(count))),
                domain: Some(DOMAIN.to_owned()),
                input,
                output,
                ..NodeProto::default()
            };
            function.node.insert(random.below(function.node.len() + 1), call);
        }
    }
}

/// Data in a file beside the model, at any place in it.
pub fn elsewhere(tensor: &mut TensorProto, random: &mut Random) {
    let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
    tensor.data_location = Some(DataLocation::External as i32);
    tensor.raw_data = None;
    let location = ["weights", "", "/etc/passwd", "../../weights", "a/b", "\0"][random.below(6)];
    tensor.external_data.push(entry("location", location.to_owned()));
    for key in ["offset", "length"] {
        if random.below(3) > 0 {
            let value = if random.below(8) == 0 { "one".to_owned() } else { random.number().to_string() };
            tensor.external_data.push(entry(key, value));
        }
    }
}

/// Nodes that say on which devices they run, how their values are split, and in which stage.
pub fn on_devices(model: &mut ModelProto, random: &mut Random) {
    if model.configuration.is_empty() || random.below(6) == 0 {
        let count = [0, 1, 2, 4, 8, -1, i32::MAX][random.below(7)];
        let device = (0..random.below(5)).map(|device| format!("device{device}")).collect();
        let name = Some(["mesh", "", "other"][random.below(3)].to_owned());
        model.configuration.push(DeviceConfigurationProto { name, num_devices: Some(count), device });
    }
    let id = model.configuration[random.below(model.configuration.len())].name.clone();
    let Some(graph) = &mut model.graph else { return };
    let stages = 1 + random.below(4);
    let every = 1 + random.below(3);
    let nodes = graph.node.len();
    for (at, node) in graph.node.iter_mut().enumerate().step_by(every) {
        let stage = if random.below(20) == 0 { random.number() as i32 } else { (at * stages / nodes.max(1)) as i32 };
        let mut values = [node.output.clone(), node.input.clone()].concat();
        values.truncate(1 + random.below(3));
        let sharding_spec = values.into_iter().map(|name| sharding(name, random)).collect();
        node.device_configurations.push(NodeDeviceConfigurationProto {
            configuration_id: if random.below(20) == 0 { None } else { id.clone() },
            sharding_spec,
            pipeline_stage: (stages > 1).then_some(stage),
        });
    }
}

fn sharding(name: String, random: &mut Random) -> ShardingSpecProto {
    let shards = [1, 2, 4][random.below(3)];
    let keys = if random.below(6) == 0 { random.below(3) as i64 } else { 0 };
    let group = |key| IntIntListEntryProto { key: Some(key - 1), value: vec![random.number(); random.below(4)] };
    let index_to_device_group_map = (0..keys).map(group).collect();
    let dims = 1 + usize::from(random.below(8) == 0);
    let sharded_dim = (0..dims).map(|_| {
        let simple = (0..1 + usize::from(random.below(10) == 0)).map(|_| SimpleShardedDimProto {
            num_shards: if random.below(12) == 0 { Some(random.number()) } else { Some(shards) },
            dim: match random.below(4) {
                0 => Some(Dim::DimValue(random.number())),
                1 => Some(Dim::DimParam("batch".to_owned())),
                _ => None,
            },
        });
        let simple_sharding = simple.collect();
        ShardedDimProto {
            axis: Some(if random.below(10) == 0 { random.number() } else { random.below(3) as i64 - 1 }),
            simple_sharding,
        }
    });
    let sharded_dim = sharded_dim.collect();
    let device = (0..shards).map(|device| if random.below(30) == 0 { random.number() } else { device }).collect();
    ShardingSpecProto { tensor_name: Some(name), device, index_to_device_group_map, sharded_dim }
}
