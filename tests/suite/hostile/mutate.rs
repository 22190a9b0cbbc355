//! What is done to a model: to its bytes, to its protobuf fields, to its graph, those of its control flow and its functions.

use super::parts;
use super::wire::{self, NUMBERS};
use bytes::Bytes;
use dcc::import::proto::tensor_shape_proto::dimension::Value as Dim;
use dcc::import::proto::type_proto::Value as Type;
use dcc::import::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, type_proto};
use prost::Message;

/// Numbers that look random, the same for each case.
pub struct Random(u64);

impl Random {
    pub fn new(case: u64) -> Random {
        Random((case + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    pub fn below(&mut self, bound: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) >> 1) as usize % bound
    }

    pub fn number(&mut self) -> i64 {
        match self.below(3) {
            0 => self.below(40) as i64 - 8,
            _ => NUMBERS[self.below(NUMBERS.len())],
        }
    }
}

/// One to three changes of one kind; `other` is a model that parts are taken from.
pub fn mutated(whole: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let kind = random.below(10);
    let count = 1 + random.below(3);
    match kind {
        0..2 => (0..count).fold(whole.to_vec(), |bytes, _| in_bytes(bytes, other, random)),
        2..5 => (0..count).fold(whole.to_vec(), |bytes, _| wire::changed(&bytes, other, random)),
        _ => {
            let (Ok(mut model), Ok(other)) = (ModelProto::decode(whole), ModelProto::decode(other)) else { return Vec::new() };
            (0..count).for_each(|_| in_model(&mut model, &other, random));
            model.encode_to_vec()
        }
    }
}

/// One change of the graph: most such models are still whole enough to be compiled.
pub fn once_mutated(whole: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let (Ok(mut model), Ok(other)) = (ModelProto::decode(whole), ModelProto::decode(other)) else { return Vec::new() };
    in_model(&mut model, &other, random);
    model.encode_to_vec()
}

fn in_bytes(mut bytes: Vec<u8>, other: &[u8], random: &mut Random) -> Vec<u8> {
    if bytes.is_empty() {
        return bytes;
    }
    let at = random.below(bytes.len());
    let length = 1 + random.below(64.min(bytes.len() - at));
    match random.below(7) {
        0 => bytes.truncate(at),
        1 => bytes[at] = random.below(256) as u8,
        2 => bytes[at] ^= 1 << random.below(8),
        3 => drop(bytes.drain(at..at + length)),
        4 => {
            let part = bytes[at..at + length].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, part);
        }
        5 => {
            let from = random.below(other.len());
            let part = &other[from..other.len().min(from + length)];
            bytes.splice(at..at + length, part.iter().copied());
        }
        _ => bytes[at..at + length].fill(255),
    }
    bytes
}

fn in_model(model: &mut ModelProto, other: &ModelProto, random: &mut Random) {
    if random.below(12) == 0
        && let Some(import) = model.opset_import.first_mut()
    {
        import.version = Some(if random.below(2) == 0 { random.number() } else { 7 + random.below(22) as i64 });
        return;
    }
    match random.below(16) {
        0 => return parts::outline(model, random),
        1 => return parts::in_function(model, random),
        2 => return parts::on_devices(model, random),
        _ => {}
    }
    let (Some(graph), Some(other)) = (&mut model.graph, &other.graph) else { return };
    let outer = names(graph);
    let graph = somewhere(graph, random);
    match random.below(8) {
        0 => in_inputs(graph, random),
        1 => in_graph(graph, other, random),
        2 | 3 => in_tensors(graph, random),
        _ if graph.node.is_empty() => {}
        4 | 5 => {
            let at = random.below(graph.node.len());
            let names = [outer, names(graph)].concat();
            in_node(&mut graph.node[at], other, &names, random);
        }
        _ => {
            let with: Vec<usize> = (0..graph.node.len()).filter(|&at| !graph.node[at].attribute.is_empty()).collect();
            if !with.is_empty() {
                let node = &mut graph.node[with[random.below(with.len())]];
                let at = random.below(node.attribute.len());
                if random.below(12) == 0 {
                    node.attribute.remove(at);
                } else {
                    in_attribute(&mut node.attribute[at], random);
                }
            }
        }
    }
}

/// The graph itself, or one of those inside of it, most often the innermost.
fn somewhere<'a>(graph: &'a mut GraphProto, random: &mut Random) -> &'a mut GraphProto {
    let holds = |node: &NodeProto| node.attribute.iter().any(|attribute| attribute.g.is_some());
    let with: Vec<usize> = (0..graph.node.len()).filter(|&at| holds(&graph.node[at])).collect();
    if with.is_empty() || random.below(3) == 0 {
        return graph;
    }
    let at = with[random.below(with.len())];
    let mut inner: Vec<&mut GraphProto> =
        graph.node[at].attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()).collect();
    let chosen = random.below(inner.len());
    somewhere(inner.swap_remove(chosen), random)
}

/// Names of all values.
pub fn names(graph: &GraphProto) -> Vec<String> {
    let tensors = graph.initializer.iter().map(|tensor| tensor.name().to_owned());
    let inputs = graph.input.iter().map(|input| input.name().to_owned());
    let nodes = graph.node.iter().flat_map(|node| node.output.clone());
    tensors.chain(inputs).chain(nodes).chain([String::new(), "nowhere".to_owned()]).collect()
}

fn in_inputs(graph: &mut GraphProto, random: &mut Random) {
    if graph.input.is_empty() {
        return;
    }
    let at = random.below(graph.input.len());
    if random.below(8) == 0 {
        let element = graph.input[at].r#type.take().map(Box::new);
        let value = if random.below(2) == 0 {
            Type::SequenceType(Box::new(type_proto::Sequence { elem_type: element }))
        } else {
            Type::OptionalType(Box::new(type_proto::Optional { elem_type: element }))
        };
        graph.input[at].r#type = Some(TypeProto { value: Some(value), ..TypeProto::default() });
        return;
    }
    let Some(Type::TensorType(tensor)) = graph.input[at].r#type.as_mut().and_then(|ty| ty.value.as_mut()) else { return };
    let Some(shape) = tensor.shape.as_mut().filter(|shape| !shape.dim.is_empty()) else { return };
    let dim = random.below(shape.dim.len());
    match random.below(8) {
        0 => tensor.elem_type = Some(random.below(26) as i32),
        1 => drop(shape.dim.remove(dim)),
        2 => shape.dim.insert(dim, shape.dim[dim].clone()),
        3 => tensor.shape = None,
        4 => shape.dim[dim].value = None,
        5 => shape.dim[dim].value = Some(Dim::DimParam(["batch", "n", "", "2*n + 1"][random.below(4)].to_owned())),
        _ => shape.dim[dim].value = Some(Dim::DimValue(random.number())),
    }
}

fn in_graph(graph: &mut GraphProto, other: &GraphProto, random: &mut Random) {
    let nodes = graph.node.len();
    match random.below(7) {
        0 if nodes > 0 => drop(graph.node.remove(random.below(nodes))),
        1 if nodes > 0 => {
            let (a, b) = (random.below(nodes), random.below(nodes));
            graph.node.swap(a, b);
        }
        // A chain of copies, each reading the one before.
        2 if nodes > 0 => {
            let node = graph.node[random.below(nodes)].clone();
            let (Some(first), Some(out)) = (node.input.first().cloned(), node.output.first().cloned()) else { return };
            let copies = 1 + random.below(40);
            for copy in 0..copies {
                let mut next = node.clone();
                next.input[0] = if copy == 0 { first.clone() } else { format!("copy{}", copy - 1) };
                next.output[0] = format!("copy{copy}");
                graph.node.push(next);
            }
            let last = format!("copy{}", copies - 1);
            let readers = graph.node.iter_mut().take(nodes).flat_map(|node| &mut node.input).filter(|name| **name == out);
            readers.for_each(|name| name.clone_from(&last));
        }
        3 if !other.node.is_empty() => {
            let node = other.node[random.below(other.node.len())].clone();
            graph.node.insert(random.below(nodes + 1), node);
        }
        4 if !graph.output.is_empty() => {
            let names = names(graph);
            let name = names[random.below(names.len())].clone();
            graph.output[0].name = Some(name);
        }
        5 => graph.initializer.truncate(random.below(graph.initializer.len() + 1)),
        _ => graph.initializer.extend(graph.initializer.first().cloned()),
    }
}

fn in_tensors(graph: &mut GraphProto, random: &mut Random) {
    let constants = graph.node.iter_mut().flat_map(|node| &mut node.attribute).filter_map(|attribute| attribute.t.as_mut());
    let mut tensors: Vec<&mut TensorProto> = graph.initializer.iter_mut().chain(constants).collect();
    if tensors.is_empty() {
        return in_inputs(graph, random);
    }
    let at = random.below(tensors.len());
    let tensor = &mut *tensors[at];
    match random.below(7) {
        6 => parts::elsewhere(tensor, random),
        0 if !tensor.dims.is_empty() => {
            let at = random.below(tensor.dims.len());
            tensor.dims[at] = random.number();
        }
        1 => tensor.dims.push(random.number()),
        2 => tensor.data_type = Some(random.below(26) as i32),
        // A number of the data, dims and length as they were.
        3 | 4 => {
            let number = random.number();
            let mut raw = tensor.raw_data.as_ref().map(|raw| raw.to_vec()).unwrap_or_default();
            if raw.len() >= 8 && raw.len() < 1 << 16 {
                let at = random.below(raw.len() / 8) * 8;
                raw[at..at + 8].copy_from_slice(&number.to_le_bytes());
                tensor.raw_data = Some(Bytes::from(raw));
            } else if !tensor.int64_data.is_empty() {
                let at = random.below(tensor.int64_data.len());
                tensor.int64_data[at] = number;
            }
        }
        // No data, and dims that any number of them fits.
        _ => {
            tensor.raw_data = None;
            tensor.dims = vec![0, random.number()];
        }
    }
}

pub fn in_node(node: &mut NodeProto, other: &GraphProto, names: &[String], random: &mut Random) {
    let name = names[random.below(names.len())].clone();
    match random.below(8) {
        0 | 1 => {
            let operators = dcc::import::supported();
            let operator = &operators[random.below(operators.len())];
            match operator.rsplit_once('.') {
                Some((domain, op)) => (node.domain, node.op_type) = (Some(domain.to_owned()), Some(op.to_owned())),
                None => node.op_type = Some(operator.clone()),
            }
            if random.below(6) == 0 {
                node.domain = Some(["", "ai.onnx", "com.microsoft", "of.no.one"][random.below(4)].to_owned());
            }
        }
        2 => node.input.push(name),
        3 | 4 if !node.input.is_empty() => {
            let at = random.below(node.input.len());
            node.input[at] = name;
        }
        5 if !node.input.is_empty() => drop(node.input.remove(random.below(node.input.len()))),
        6 => node.output.push(name),
        _ => {
            let attributes: Vec<&AttributeProto> = other.node.iter().flat_map(|node| &node.attribute).collect();
            if !attributes.is_empty() {
                node.attribute.push(attributes[random.below(attributes.len())].clone());
            }
        }
    }
}

fn in_attribute(attribute: &mut AttributeProto, random: &mut Random) {
    match random.below(8) {
        0 => attribute.r#type = Some(random.below(16) as i32),
        1 if !attribute.ints.is_empty() => {
            let at = random.below(attribute.ints.len());
            attribute.ints[at] = random.number();
        }
        2 => attribute.ints.push(random.number()),
        3 if !attribute.ints.is_empty() => drop(attribute.ints.pop()),
        4 => attribute.f = Some([f32::NAN, f32::INFINITY, -1.0, 0.0, 1e30][random.below(5)]),
        5 => {
            let texts =
                [&b"constant"[..], b"SAME_UPPER", b"", b"\xff", b"ijkl,->", b"bidirectional", b"linear", b"cubic", b"max"];
            attribute.s = Some(Bytes::from_static(texts[random.below(texts.len())]));
        }
        6 if !attribute.floats.is_empty() || !attribute.strings.is_empty() => {
            attribute.floats.resize(random.below(5), f32::NAN);
            attribute.strings.resize(random.below(5), Bytes::from_static(b"Tanh"));
        }
        _ => {
            attribute.i = Some(random.number());
            if !attribute.ints.is_empty() {
                let at = random.below(attribute.ints.len());
                attribute.ints[at] = random.number();
            }
        }
    }
}
