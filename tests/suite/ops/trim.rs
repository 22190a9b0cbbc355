//! Every op, of whose result a window is read: its values are those of the whole result there, computed or cut out.

use super::*;
use dcc::interp::{Precision, outputs};
use dcc::ops::Slice;
use dcc::trim::trim;
use dcc_program::Shape;
use std::collections::BTreeSet;

/// Elements `start..end` of one dim of what the example gives, and the other dims whole.
fn window(example: &Example, dim: usize, start: u64, end: u64) -> Graph {
    let (mut graph, _, result) = graph_of(example);
    let mut slice = Slice {
        start: Shape::from_elem(0, graph.ty(result).rank()),
        limit: graph.ty(result).shape.clone(),
        stride: Shape::from_elem(1, graph.ty(result).rank()),
    };
    (slice.start[dim], slice.limit[dim]) = (start, end);
    let part = graph.add(slice, &[result]).unwrap();
    graph.outputs.push(("part".to_owned(), part));
    graph
}

fn value(graph: &Graph, example: &Example) -> Tensor {
    outputs(graph, &bindings(example), Precision::Exact).unwrap().remove(0).1
}

/// The elements of all results of ops of that name.
fn computed_elements(graph: &Graph, name: &str) -> u64 {
    graph.nodes.iter().filter(|node| node.op.name() == name).map(|node| node.ty.elements()).sum()
}

#[test]
fn windows_of_every_op_have_the_values_of_the_whole() {
    let (mut shortened, mut moved) = (BTreeSet::new(), 0);
    for example in computed() {
        for (dim, &size) in example.result().shape.iter().enumerate().filter(|(_, size)| **size > 1) {
            let half = size / 2;
            for (start, end) in [(0, half), (size - half, size), (half / 2, half / 2 + half), (0, size - 1)] {
                let graph = window(&example, dim, start, end);
                let trimmed = trim(&graph).unwrap();
                dcc::graph::verify(&trimmed).unwrap();
                let (got, expected) = (value(&trimmed, &example), value(&graph, &example));
                close(&got, &expected, 0.0).unwrap_or_else(|e| panic!("{} {dim}: {start}..{end}: {e}", describe(&example)));
                let name = example.op.name();
                let is_shorter = computed_elements(&trimmed, name) < computed_elements(&graph, name);
                assert!(!is_shorter || 2 * (end - start) <= size, "{}: {start}..{end} of {size}", describe(&example));
                shortened.extend(is_shorter.then_some(name));
            }
            // The values of another window are others.
            let [first, last] = [(0, half), (size - half, size)].map(|(start, end)| window(&example, dim, start, end));
            moved += usize::from(close(&value(&trim(&first).unwrap(), &example), &value(&last, &example), 0.0).is_err());
        }
    }
    assert!(moved > 100, "{moved}");
    // Leaves are what they are; a random number knows where it stands.
    let stays: Vec<&str> = Op::NAMES.iter().copied().filter(|name| !shortened.contains(name)).collect();
    assert_eq!(stays.join(" "), "input param scalar const training iota uniform");
}
