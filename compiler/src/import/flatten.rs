//! The model's graph with its functions inlined: nodes in topological order over numbered values.
//!
//! After: every value is defined once and before it is read, every operator exists in its opset with a fitting number of
//! inputs and outputs, every tensor's dims, dtype and data length agree. Errors name the node; hostile files get errors too.

use std::collections::{HashMap, HashSet};

use super::control;
use super::fx::FxCall;
use super::model::{Model, default_opset};
use super::node::{Attribute, Body, Node, ValueId};
use super::ops::{OPTIMIZERS, contrib};
use super::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto, ValueInfoProto};
use super::schema::{self, Known};
use super::sort::sort;
use super::tensor::Tensor;
use crate::error::{Error, Result};

/// Functions may call functions this deep.
const DEPTH_LIMIT: usize = 32;
/// Nodes and calls after inlining; GPT-3's 96 layers are about 40,000.
const NODE_LIMIT: usize = 1_000_000;

/// A model's graph without functions.
#[derive(Clone, Debug, Default)]
pub struct Flat<'m> {
    pub nodes: Vec<Node<'m>>,
    /// The name of each value.
    pub values: Vec<String>,
    pub initializers: Vec<(ValueId, Tensor)>,
    /// The inputs that no initializer gives a value to.
    pub inputs: Vec<(ValueId, &'m ValueInfoProto)>,
    /// Those that are made of operators which can be imported.
    pub outputs: Vec<(&'m str, ValueId)>,
    /// The other outputs, each with what stands in its way.
    pub refused: Vec<(&'m str, Error)>,
}

/// Names in one graph or function body; an omitted function input is there, but `None`.
type Scope<'m> = HashMap<&'m str, Option<ValueId>>;

/// Where a body's nodes come from.
#[derive(Clone, Copy)]
struct Call<'c, 'm> {
    /// Position of the outermost call in the file.
    index: Option<usize>,
    prefix: &'c str,
    opset: i64,
    attributes: &'c [Attribute<'m>],
    defaults: &'m [AttributeProto],
    depth: usize,
}

struct Flattener<'m> {
    model: &'m Model,
    functions: HashMap<(&'m str, &'m str, &'m str), &'m FunctionProto>,
    flat: Flat<'m>,
    /// Nodes and calls so far.
    count: usize,
}

/// Inlines and checks the graph of `model`. Errors: what stands in the way of its outputs, where it does of all.
pub fn flatten(model: &Model) -> Result<Flat<'_>> {
    let graph = model.graph();
    let functions = model.proto.functions.iter();
    let functions = functions.map(|function| ((function.domain(), function.name(), function.overload()), function)).collect();
    let mut flattener = Flattener { model, functions, flat: Flat::default(), count: 0 };
    let mut scope = Scope::new();
    if let Some(sparse) = graph.sparse_initializer.first() {
        let name = sparse.values.as_ref().map_or("", |values| values.name());
        return Err(Error::tensor("sparse initializers are not supported").at(format!("tensor `{name}`")));
    }
    for proto in &graph.initializer {
        let tensor = Tensor::new(model, proto.name(), proto)?;
        let id = flattener.define(&mut scope, proto.name(), proto.name()).map_err(|e| e.at("the initializers"))?;
        flattener.flat.initializers.push((id, tensor));
    }
    for input in graph.input.iter().filter(|input| !graph.initializer.iter().any(|tensor| tensor.name() == input.name())) {
        let id = flattener.define(&mut scope, input.name(), input.name()).map_err(|e| e.at("the graph's inputs"))?;
        flattener.flat.inputs.push((id, input));
    }
    let call = Call { index: None, prefix: "", opset: model.opset(), attributes: &[], defaults: &[], depth: 0 };
    flattener.body(&graph.node, &mut scope, call)?;
    for output in &graph.output {
        if flattener.flat.outputs.iter().any(|(name, _)| *name == output.name()) {
            continue;
        }
        let id = scope.get(output.name()).copied().flatten();
        let undefined = || Error::graph(format!("no node computes the graph output `{}`", output.name()));
        flattener.flat.outputs.push((output.name(), id.ok_or_else(undefined)?));
    }
    flattener.flat.leave_out()
}

impl Flat<'_> {
    /// Without nodes that cannot be imported, and the outputs that depend on one.
    fn leave_out(mut self) -> Result<Self> {
        if self.nodes.iter().all(|node| node.refused.is_none()) {
            return Ok(self);
        }
        for (name, id) in std::mem::take(&mut self.outputs) {
            let live = self.live([id].into_iter());
            let is_live = |node: &&Node<'_>| node.outputs.iter().flatten().any(|id| live[id.0 as usize]);
            match self.nodes.iter().filter(is_live).find_map(|node| node.refused.clone()) {
                Some(error) => self.refused.push((name, error)),
                None => self.outputs.push((name, id)),
            }
        }
        let live = self.live(self.outputs.iter().map(|(_, id)| *id));
        self.nodes.retain(|node| node.outputs.iter().flatten().any(|id| live[id.0 as usize]));
        match self.refused.first() {
            Some((_, error)) if self.outputs.is_empty() => Err(error.clone()),
            _ => Ok(self),
        }
    }

    /// The values that `wanted` depend on.
    pub fn live(&self, wanted: impl Iterator<Item = ValueId>) -> Vec<bool> {
        let mut live = vec![false; self.values.len()];
        wanted.for_each(|id| live[id.0 as usize] = true);
        for node in self.nodes.iter().rev() {
            if node.outputs.iter().flatten().any(|id| live[id.0 as usize]) {
                node.reads().for_each(|id| live[id.0 as usize] = true);
                control::mark_inner(node, &mut live);
            }
        }
        live
    }

    /// The node that is the last to read each value; none for those that are `wanted` in the end.
    pub fn last_readers(&self, wanted: impl Iterator<Item = ValueId>) -> Vec<Option<usize>> {
        let mut last = vec![None; self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.reads().for_each(|id| last[id.0 as usize] = Some(at));
        }
        wanted.for_each(|id| last[id.0 as usize] = None);
        last
    }

    /// The name of each value, or the first with it and a number: names of inlined nodes may repeat.
    pub fn names(&self) -> Vec<String> {
        let mut taken: HashSet<&str> = HashSet::new();
        let is_first: Vec<bool> = self.values.iter().map(|name| taken.insert(name)).collect();
        let names = self.values.iter().zip(is_first).enumerate();
        names.map(|(number, (name, first))| if first { name.clone() } else { format!("{name}#{number}") }).collect()
    }
}

impl<'m> Flattener<'m> {
    fn define(&mut self, scope: &mut Scope<'m>, name: &'m str, full_name: &str) -> Result<ValueId> {
        let id = ValueId(self.flat.values.len() as u32);
        if scope.insert(name, Some(id)).is_some() {
            return Err(Error::graph(format!("`{name}` is defined twice")));
        }
        self.flat.values.push(full_name.to_owned());
        Ok(id)
    }

    /// Adds the nodes of a graph or a function body.
    fn body(&mut self, nodes: &'m [NodeProto], scope: &mut Scope<'m>, call: Call<'_, 'm>) -> Result<()> {
        for (position, proto) in sort(nodes, scope)? {
            let mut node = self.head(proto, position, call)?;
            let place = node.place();
            self.count += 1;
            if self.count > NODE_LIMIT {
                return Err(
                    Error::limit(format!("the model has more than {NODE_LIMIT} nodes with its functions inlined")).at(place)
                );
            }
            for name in &proto.input {
                node.inputs.push(match name.as_str() {
                    "" => None,
                    name => *scope.get(name).expect("sort checked that every input is defined"),
                });
            }
            let function = self.functions.get(&(proto.domain(), proto.op_type(), proto.overload())).copied();
            if let Some(function) = function {
                self.inline(function, proto, node, scope, call.depth + 1).map_err(|error| error.at(place))?;
                continue;
            }
            node.refused = check_schema(&node, proto).err().map(|error| error.at(&place));
            self.bodies(proto, &mut node, scope, call).map_err(|error| error.at(&place))?;
            for name in &proto.output {
                let id = match name.as_str() {
                    "" => None,
                    name => Some(self.define(scope, name, &format!("{}{name}", call.prefix)).map_err(|e| e.at(&place))?),
                };
                node.outputs.push(id);
            }
            self.flat.nodes.push(node);
        }
        Ok(())
    }

    /// Adds the graphs among the node's attributes. Their names are gone from the scope afterwards.
    fn bodies(&mut self, proto: &'m NodeProto, node: &mut Node<'m>, scope: &mut Scope<'m>, call: Call<'_, 'm>) -> Result<()> {
        for attribute in &proto.attribute {
            let Some(graph) = &attribute.g else { continue };
            if call.depth > DEPTH_LIMIT {
                return Err(Error::limit(format!("graphs inside of graphs more than {DEPTH_LIMIT} deep")));
            }
            let prefix =
                format!("{}/", if node.name.is_empty() { format!("{}_{}", node.op, node.index) } else { node.name.clone() });
            let inner = Call { prefix: &prefix, index: Some(node.index), depth: call.depth + 1, ..call };
            let first = self.flat.values.len();
            let outer = std::mem::take(&mut self.flat.nodes);
            let built = self.graph_body(graph, scope, inner);
            let nodes = std::mem::replace(&mut self.flat.nodes, outer);
            let body = Body { nodes, ..built? };
            let own = |name: &str, scope: &mut Scope<'m>| {
                if scope.get(name).copied().flatten().is_some_and(|id| id.0 as usize >= first) {
                    scope.remove(name);
                }
            };
            graph.initializer.iter().for_each(|tensor| own(tensor.name(), scope));
            graph.input.iter().for_each(|input| own(input.name(), scope));
            graph.node.iter().flat_map(|node| &node.output).for_each(|name| own(name, scope));
            let reads = body.nodes.iter().flat_map(Node::reads).chain(body.outputs.iter().copied());
            node.refused = node.refused.take().or_else(|| body.nodes.iter().find_map(|inner| inner.refused.clone()));
            node.captures.extend(reads.filter(|id| (id.0 as usize) < first));
            node.bodies.push((attribute.name(), body));
        }
        Ok(())
    }

    /// Flattens a graph attribute; its nodes are left in `flat`.
    fn graph_body(&mut self, graph: &'m GraphProto, scope: &mut Scope<'m>, call: Call<'_, 'm>) -> Result<Body<'m>> {
        let mut body = Body { inputs: Vec::new(), initializers: Vec::new(), nodes: Vec::new(), outputs: Vec::new() };
        for proto in &graph.initializer {
            let name = format!("{}{}", call.prefix, proto.name());
            let tensor = Tensor::new(self.model, &name, proto)?;
            body.initializers.push((self.define(scope, proto.name(), &name)?, tensor));
        }
        for input in &graph.input {
            body.inputs.push(self.define(scope, input.name(), &format!("{}{}", call.prefix, input.name()))?);
        }
        self.body(&graph.node, scope, call)?;
        for output in &graph.output {
            let undefined = || Error::graph(format!("no node computes the output `{}` of an inner graph", output.name()));
            body.outputs.push(scope.get(output.name()).copied().flatten().ok_or_else(undefined)?);
        }
        let mut live: std::collections::BTreeSet<ValueId> = body.outputs.iter().copied().collect();
        let nodes = std::mem::take(&mut self.flat.nodes);
        for node in nodes.into_iter().rev() {
            if node.outputs.iter().flatten().any(|id| live.contains(id)) {
                live.extend(node.reads());
                self.flat.nodes.push(node);
            }
        }
        self.flat.nodes.reverse();
        Ok(body)
    }

    /// The node without inputs and outputs; references to attributes of the function are resolved.
    fn head(&self, proto: &'m NodeProto, position: usize, call: Call<'_, 'm>) -> Result<Node<'m>> {
        let mut attributes = Vec::new();
        for attribute in &proto.attribute {
            let reference = attribute.ref_attr_name();
            if reference.is_empty() {
                attributes.push(Attribute::new(attribute.name(), attribute));
                continue;
            }
            let given = call.attributes.iter().find(|given| given.name == reference).map(|given| given.proto);
            let default = || call.defaults.iter().find(|default| default.name() == reference);
            attributes.extend(given.or_else(default).map(|proto| Attribute::new(attribute.name(), proto)));
        }
        let domain = super::ops::domain_of(proto.domain(), proto.op_type());
        Ok(Node {
            index: call.index.unwrap_or(position),
            name: format!("{}{}", call.prefix, proto.name()),
            op: proto.op_type(),
            domain,
            opset: call.opset,
            inputs: Vec::new(),
            outputs: Vec::new(),
            attributes,
            bodies: Vec::new(),
            captures: Vec::new(),
            call: FxCall::of(proto),
            refused: None,
        })
    }

    /// Adds the body of `function` in place of the node `call`.
    fn inline(
        &mut self,
        function: &'m FunctionProto,
        proto: &'m NodeProto,
        node: Node<'m>,
        outer: &mut Scope<'m>,
        depth: usize,
    ) -> Result<()> {
        if depth > DEPTH_LIMIT {
            return Err(Error::limit(format!("functions call each other more than {DEPTH_LIMIT} deep")));
        }
        if node.inputs.len() > function.input.len() || proto.output.len() > function.output.len() {
            return Err(Error::graph(format!("the call does not fit function `{}`", function.name())));
        }
        let mut scope = Scope::new();
        for (position, name) in function.input.iter().enumerate() {
            if scope.insert(name, node.inputs.get(position).copied().flatten()).is_some() {
                return Err(Error::graph(format!("function `{}` has two inputs `{name}`", function.name())));
            }
        }
        let prefix = if node.name.is_empty() {
            format!("{}_{}/", function.name(), self.flat.nodes.len())
        } else {
            format!("{}/", node.name)
        };
        let opset = default_opset(&function.opset_import).unwrap_or(node.opset);
        let body = Call {
            index: Some(node.index),
            prefix: &prefix,
            opset,
            attributes: &node.attributes,
            defaults: &function.attribute_proto,
            depth,
        };
        self.body(&function.node, &mut scope, body)?;
        for (name, formal) in proto.output.iter().zip(&function.output).filter(|(name, _)| !name.is_empty()) {
            let result = scope.get(formal.as_str()).copied().flatten();
            let undefined = || Error::graph(format!("function `{}` does not compute its output `{formal}`", function.name()));
            let result = result.ok_or_else(undefined)?;
            if outer.insert(name, Some(result)).is_some() {
                return Err(Error::graph(format!("`{name}` is defined twice")));
            }
        }
        Ok(())
    }
}

/// The operator exists in its opset and takes as many inputs and outputs as the node has.
fn check_schema(node: &Node, proto: &NodeProto) -> Result<()> {
    if !node.domain.is_empty() {
        if super::ops::find(node.domain, node.op).is_some() {
            return Ok(());
        }
        let what = match node.domain {
            OPTIMIZERS | contrib::DOMAIN => format!("`{}` of domain `{}` is not supported", node.op, node.domain),
            other => format!("operators of domain `{other}` are not supported"),
        };
        return Err(Error::unsupported_op(what).help("export with standard ONNX operators only"));
    }
    // ONNX Runtime fuses nodes of all opsets into LayerNormalization, which came with opset 17.
    let opset = if node.op == "LayerNormalization" { node.opset.max(17) } else { node.opset };
    let arity = match schema::lookup(node.op, opset) {
        Known::Yes(arity) => arity,
        Known::Since(since) => {
            return Err(Error::opset(format!("opset {} has no operator {}: it came with opset {since}", node.opset, node.op))
                .help(format!("export with `opset_version={since}`")));
        }
        Known::No => return Err(Error::opset(format!("ONNX has no operator `{}`", node.op))),
    };
    let fits = |count: usize, (min, max): (u8, u8)| count >= min.into() && (max == u8::MAX || count <= max.into());
    if !fits(node.inputs.len(), arity.inputs) {
        return Err(Error::graph(format!("{} inputs, {} takes {}", node.inputs.len(), node.op, bounds(arity.inputs))));
    }
    if !fits(proto.output.len(), arity.outputs) {
        return Err(Error::graph(format!("{} outputs, {} has {}", proto.output.len(), node.op, bounds(arity.outputs))));
    }
    Ok(())
}

fn bounds((min, max): (u8, u8)) -> String {
    match max {
        u8::MAX => format!("at least {min}"),
        max if max == min => min.to_string(),
        max => format!("{min} to {max}"),
    }
}
