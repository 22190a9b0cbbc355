//! Control flow with what is known while compiling: branches are chosen, loops unrolled.
//!
//! A branch that depends on data becomes a select of both, where their results have equal types: the graph is pure.

use dcc_program::DType;

use super::Importer;
use super::known::Known;
use super::node::{Body, Node};
use super::value::{Value, axis};
use crate::error::{Error, Result};

/// The operators with graphs inside.
pub(super) const OPERATORS: [&str; 3] = ["If", "Loop", "Scan"];
/// Repetitions of one loop.
const MOST_TRIPS: usize = 1 << 16;
/// Nodes of all repetitions, as the file has them and as the graph gets them: these take up to a KiB each, whatever the size of the
/// file.
const MOST_NODES: usize = 1 << 16;
const MOST_GRAPH_NODES: usize = 3 << 14;

/// Everything that bodies define is wanted: flattening left out what is not.
pub(super) fn mark_inner(node: &Node, live: &mut [bool]) {
    for (_, body) in &node.bodies {
        for id in body.inputs.iter().chain(body.initializers.iter().map(|(id, _)| id)) {
            live[id.0 as usize] = true;
        }
        for node in &body.nodes {
            node.outputs.iter().flatten().for_each(|id| live[id.0 as usize] = true);
            mark_inner(node, live);
        }
    }
}

/// How a Scan reads and stacks slices: dims, and whether from the end (not 0).
struct Slices {
    axes: Vec<i64>,
    backward: Vec<i64>,
    out_axes: Vec<i64>,
    out_backward: Vec<i64>,
}

impl Slices {
    /// Along dim 0, from the front.
    fn first(count: usize, stacks: usize) -> Slices {
        let (read, stacked) = (vec![0; count], vec![0; stacks]);
        Slices { axes: read.clone(), backward: read, out_axes: stacked.clone(), out_backward: stacked }
    }
}

impl Importer<'_, '_> {
    /// Imports If, Loop and Scan.
    pub(super) fn control(&mut self, node: &Node, inputs: &[Option<Value>], live: &[bool]) -> Result<Vec<Value>> {
        let outermost = self.unrolled_from.is_none();
        self.unrolled_from.get_or_insert(self.build.graph.nodes.len() - self.unrolled);
        let results = match node.op {
            "If" => self.branch(node, inputs, live),
            "Loop" => self.repeat(node, inputs, live),
            "Scan" => self.scan(node, inputs, live),
            op => Err(Error::unsupported_op(format!("the operator {op} of opset {} is not supported", node.opset))
                .help("README.md lists the operators that dcc imports")),
        }?;
        if outermost {
            self.unrolled = self.unrolled_nodes();
            self.unrolled_from = None;
        }
        match node.unread().next() {
            Some(name) => Err(Error::attribute(format!("attribute `{name}` of {} is not supported", node.op))),
            None => Ok(results),
        }
    }

    /// Nodes of the graph that come of inner graphs.
    fn unrolled_nodes(&self) -> usize {
        self.unrolled_from.map_or(self.unrolled, |from| self.build.graph.nodes.len() - from)
    }

    /// The outputs of a body for these inputs.
    fn run_body(&mut self, body: &Body, inputs: Vec<Value>, live: &[bool]) -> Result<Vec<Value>> {
        if inputs.len() != body.inputs.len() {
            let what = format!("an inner graph of {} inputs is given {}", body.inputs.len(), inputs.len());
            return Err(Error::graph(what));
        }
        self.inner_nodes += body.nodes.len();
        for (nodes, most) in [(self.inner_nodes, MOST_NODES), (self.unrolled_nodes(), MOST_GRAPH_NODES)] {
            if nodes > most {
                return Err(Error::limit(format!("loops that unroll to more than {most} nodes")));
            }
        }
        for (id, value) in body.inputs.iter().zip(inputs) {
            self.values[id.0 as usize] = Some(value);
        }
        for (id, tensor) in &body.initializers {
            if self.values[id.0 as usize].is_none() {
                let origin = super::Origin::Initializer;
                let value = self.classifier.value(&mut self.build, self.model, tensor.clone(), origin)?;
                self.values[id.0 as usize] = Some(value);
            }
        }
        for node in &body.nodes {
            // A weight in a Constant node is one weight, however often it is met.
            let met = |id: &super::node::ValueId| self.values[id.0 as usize].is_some();
            if node.op != "Constant" || !node.outputs.iter().flatten().all(met) {
                self.node(node, live)?;
            }
        }
        let value = |id: &super::node::ValueId| self.values[id.0 as usize].clone();
        let undefined = || Error::graph("an inner graph gives what nothing computes");
        body.outputs.iter().map(|id| value(id).ok_or_else(undefined)).collect()
    }

    fn branch(&mut self, node: &Node, inputs: &[Option<Value>], live: &[bool]) -> Result<Vec<Value>> {
        let (yes, no) = (node.body("then_branch")?, node.body("else_branch")?);
        let condition = inputs.first().cloned().flatten().ok_or_else(|| Error::graph("If without a condition"))?;
        if let Some(holds) = condition.uniform() {
            return self.run_body(if holds != 0.0 { yes } else { no }, Vec::new(), live);
        }
        let (yes, no) = (self.run_body(yes, Vec::new(), live)?, self.run_body(no, Vec::new(), live)?);
        if yes.len() != no.len() {
            return Err(Error::graph("the branches of an If give different numbers of results"));
        }
        let condition = self.build.reshape(&condition, &[])?;
        let mut results = Vec::with_capacity(yes.len());
        for (yes, no) in yes.iter().zip(&no) {
            let types = [yes, no].map(|value| Ok::<_, Error>((value.dtype(&self.build)?, value.shape(&self.build)?)));
            let [Ok(one), Ok(other)] = types else { return Err(of_data("the branch of an If that gives a sequence")) };
            if one != other {
                return Err(of_data("the shape of what an If gives"));
            }
            results.push(self.build.select(&condition, yes, no)?);
        }
        Ok(results)
    }

    /// Inputs: the most trips, a condition, what goes from trip to trip. Results: that after the last one, and what each trip
    /// adds, stacked.
    fn repeat(&mut self, node: &Node, inputs: &[Option<Value>], live: &[bool]) -> Result<Vec<Value>> {
        let body = node.body("body")?;
        let input = |position: usize| inputs.get(position).cloned().flatten();
        let most = match input(0) {
            None => i64::MAX,
            Some(most) => number(&most).ok_or_else(|| of_data("the number of trips of a Loop"))? as i64,
        };
        let mut condition = input(1);
        let mut carried =
            inputs.iter().skip(2).map(|value| value.clone().ok_or_else(|| Error::graph("a Loop without a state")));
        let mut carried = carried.by_ref().collect::<Result<Vec<Value>>>()?;
        let kept = carried.len();
        let mut stacks: Vec<Vec<Value>> = vec![Vec::new(); body.outputs.len().saturating_sub(kept + 1)];
        let mut trip = 0;
        while trip < most {
            let goes_on = match &condition {
                None => true,
                Some(condition) => number(condition).ok_or_else(|| of_data("the condition of a Loop"))? != 0.0,
            };
            if !goes_on {
                break;
            }
            if trip as usize >= MOST_TRIPS {
                return Err(Error::limit(format!("a Loop of more than {MOST_TRIPS} trips")));
            }
            let known = [Known::int(DType::I64, trip).into(), Known::int(DType::Bool, 1).into()];
            let mut results = self.run_body(body, known.into_iter().chain(carried).collect(), live)?.into_iter();
            condition = results.next();
            carried = results.by_ref().take(kept).collect();
            for (stack, value) in stacks.iter_mut().zip(results) {
                stack.push(value);
            }
            trip += 1;
        }
        for stack in &stacks {
            carried.push(self.stacked(stack, 0)?);
        }
        Ok(carried)
    }

    /// Inputs: states, then what is read slice by slice.
    fn scan(&mut self, node: &Node, inputs: &[Option<Value>], live: &[bool]) -> Result<Vec<Value>> {
        let inputs = match node.opset {
            ..9 if inputs.first().is_some_and(Option::is_some) => {
                return Err(Error::unsupported_op("Scan of opset 8 with lengths of sequences is not supported"));
            }
            ..9 => &inputs[1.min(inputs.len())..],
            _ => inputs,
        };
        let body = node.body("body")?;
        let given = inputs.iter().map(|value| value.clone().ok_or_else(|| Error::graph("a Scan with an omitted input")));
        let given = given.collect::<Result<Vec<Value>>>()?;
        let count = usize::try_from(node.int_or("num_scan_inputs", 0)?).unwrap_or(0);
        if count == 0 || count > given.len() {
            return Err(Error::attribute(format!("num_scan_inputs = {count} of {} inputs", given.len())));
        }
        let kept = given.len() - count;
        let stacks = body.outputs.len().checked_sub(kept);
        let stacks = stacks.ok_or_else(|| Error::graph("a Scan whose graph gives fewer results than it has states"))?;
        let list = |name: &str, count: usize| -> Result<Vec<i64>> {
            match node.ints(name)? {
                None => Ok(vec![0; count]),
                Some(list) if list.len() == count => Ok(list.to_vec()),
                Some(list) => Err(Error::attribute(format!("{name} = {list:?} has not {count} entries"))),
            }
        };
        if node.opset < 9 {
            let slices = Slices { backward: list("directions", count)?, ..Slices::first(count, stacks) };
            return self.scan_samples(body, &given, &slices, live);
        }
        let slices = Slices {
            axes: list("scan_input_axes", count)?,
            backward: list("scan_input_directions", count)?,
            out_axes: list("scan_output_axes", stacks)?,
            out_backward: list("scan_output_directions", stacks)?,
        };
        self.scan_slices(body, &given, &slices, live)
    }

    /// Opset 8: dim 0 of everything counts samples, which the graph inside knows nothing of.
    fn scan_samples(&mut self, body: &Body, given: &[Value], slices: &Slices, live: &[bool]) -> Result<Vec<Value>> {
        let shapes = given.iter().map(|value| value.shape(&self.build)).collect::<Result<Vec<_>>>()?;
        let samples = shapes[0].first().copied().unwrap_or(0);
        if samples == 0 || samples as usize > MOST_TRIPS || shapes.iter().any(|shape| shape.first() != Some(&samples)) {
            return Err(Error::shape(format!("a Scan of opset 8 over {samples} samples of one input and not of another")));
        }
        let mut columns: Vec<Vec<Value>> = vec![Vec::new(); body.outputs.len()];
        for sample in 0..samples {
            let mut own = Vec::with_capacity(given.len());
            for (value, shape) in given.iter().zip(&shapes) {
                let slice = self.build.narrow(value, 0, sample, 1)?;
                own.push(self.build.reshape(&slice, &shape[1..])?);
            }
            let results = self.scan_slices(body, &own, slices, live)?;
            columns.iter_mut().zip(results).for_each(|(column, value)| column.push(value));
        }
        columns.iter().map(|column| self.stacked(column, 0)).collect()
    }

    fn scan_slices(&mut self, body: &Body, given: &[Value], slices: &Slices, live: &[bool]) -> Result<Vec<Value>> {
        let count = slices.axes.len();
        let kept = given.len() - count;
        let (mut state, sequences) = (given[..kept].to_vec(), &given[kept..]);
        let mut sources = Vec::with_capacity(count);
        for (sequence, &along) in sequences.iter().zip(&slices.axes) {
            let shape = sequence.shape(&self.build)?;
            let dim = axis(along, shape.len())?;
            sources.push((sequence, dim, shape));
        }
        let trips = sources[0].2[sources[0].1];
        if sources.iter().any(|(_, dim, shape)| shape[*dim] != trips) || trips as usize > MOST_TRIPS {
            return Err(Error::shape(format!("a Scan over {trips} slices of one input and not of another")));
        }
        let mut outputs: Vec<Vec<Value>> = vec![Vec::new(); slices.out_axes.len()];
        for trip in 0..trips {
            let mut arguments = state;
            for ((sequence, dim, shape), &backward) in sources.iter().zip(&slices.backward) {
                let at = if backward != 0 { trips - 1 - trip } else { trip };
                let slice = self.build.narrow(sequence, *dim, at, 1)?;
                let mut left = shape.clone();
                left.remove(*dim);
                arguments.push(self.build.reshape(&slice, &left)?);
            }
            let results = self.run_body(body, arguments, live)?;
            state = results[..kept].to_vec();
            outputs.iter_mut().zip(&results[kept..]).for_each(|(stack, value)| stack.push(value.clone()));
        }
        for ((mut stack, &along), &backward) in outputs.into_iter().zip(&slices.out_axes).zip(&slices.out_backward) {
            if backward != 0 {
                stack.reverse();
            }
            state.push(self.stacked(&stack, along)?);
        }
        Ok(state)
    }

    /// The parts one after the other along a new dim.
    fn stacked(&mut self, parts: &[Value], along: i64) -> Result<Value> {
        let Some(first) = parts.first() else { return Err(of_data("the shape of what a loop without trips stacks")) };
        let dim = axis(along, first.rank(&self.build)? + 1)?;
        let mut wide = Vec::with_capacity(parts.len());
        for part in parts {
            let mut shape = part.shape(&self.build)?;
            shape.insert(dim, 1);
            wide.push(self.build.reshape(part, &shape)?);
        }
        self.build.concatenate(&wide, dim)
    }
}

/// The one number that a value is known to be.
fn number(value: &Value) -> Option<f64> {
    value.uniform()
}

fn of_data(what: &str) -> Error {
    Error::data_dependent(format!("{what} has to be known while compiling, but depends on parameters or data"))
        .help("export with a fixed number of steps, or give the input that it depends on as a constant")
}
