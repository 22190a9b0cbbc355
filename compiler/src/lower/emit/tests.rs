//! What is computed at a distance: by the program's kernels, where memory begins as NaN, as by the graph.

use crate::compile::{Evaluation, Subject};
use crate::interp::{self, Bindings, Precision, Tensor};
use dcc_program::DType;
use dcc_program::simulate::{self, Scalars, Simulator};
use std::collections::BTreeMap;

/// Runs a graph of one input `x` of that shape; returns how many kernels do it.
fn check(text: &str, shape: &[u64]) -> usize {
    let (differs, kernels) = run(text, text, shape);
    assert!(!differs, "{text}");
    kernels
}

fn compiled(text: &str) -> Evaluation {
    let subject = Subject::of_text("case", &format!("graph\nforward\n{text}"), Vec::new(), BTreeMap::new()).expect("a graph");
    subject.outputs().expect("it compiles")
}

/// Whether what the program of `made` gives is not what the graph `meant` is, and how many kernels it has.
fn run(made: &str, meant: &str, shape: &[u64]) -> (bool, usize) {
    let [made, meant] = [made, meant].map(compiled);
    let count = shape.iter().product::<u64>();
    // Without zeros, whose signs would be all that is told apart.
    let value = |i: u64| if i % 11 == 5 { f64::INFINITY } else { (i * 7 % 23) as f64 - 11.5 };
    let values: Vec<f64> = (0..count).map(value).collect();
    let x = simulate::Tensor { shape: shape.to_vec(), values: values.clone() };
    let mut simulator = Simulator::new(&made.programs).expect("programs");
    let scalars = Scalars { learning_rate: 0.0, step: 1, seed: 0 };
    let found = simulator.step(&BTreeMap::from([("x".to_owned(), x)]), scalars).expect("it runs");
    let bindings = Bindings::default().input("x", Tensor::floats(DType::F32, shape, values));
    let expected = interp::outputs(&meant.source, &bindings, Precision::Exact).expect("it is evaluated");
    let bits = |values: &[f64]| values.iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect::<Vec<u64>>();
    let differs = expected.iter().any(|(name, value)| bits(&found[name].values) != bits(value.f64s()));
    (differs, made.programs[0].kernels.len())
}

/// Half of each row turned round, by parts of what is read as it is, too.
const ROTARY: &str = "\
%0 f32[2, 3, 4, 8] = input{batch_dim:0, name:x}
%1 f32[2, 4, 3, 8] = transpose{perm:[0, 2, 1, 3]} %0
%2 f32[2, 4, 3, 4] = slice{limit:[2, 4, 3, 4], start:[0, 0, 0, 0], stride:[1, 1, 1, 1]} %1
%3 f32[2, 4, 3, 4] = slice{limit:[2, 4, 3, 8], start:[0, 0, 0, 4], stride:[1, 1, 1, 1]} %1
%4 f32[2, 4, 3, 4] = unary{op:neg} %3
%5 f32[2, 4, 3, 8] = concatenate{dim:3} %4, %2
%6 f32[2, 4, 3, 8] = binary{op:add} %5, %1
output y = %6
";

#[test]
fn a_concatenation_reads_parts_where_they_are() {
    assert_eq!(check(ROTARY, &[2, 3, 4, 8]), 1);
}

/// The control: a part that begins one place later is another function.
#[test]
fn control_of_parts() {
    let wrong = ROTARY.replace("limit:[2, 4, 3, 4], start:[0, 0, 0, 0]", "limit:[2, 4, 3, 5], start:[0, 0, 0, 1]");
    assert!(run(&wrong, ROTARY, &[2, 3, 4, 8]).0);
}

/// Of what is a part, below and above which its value goes on, all but the part is zero.
#[test]
fn a_pad_of_a_part_is_zero_around_it() {
    let cuts = [(0, 4), (4, 8), (2, 5)].into_iter().flat_map(|cut| [(cut, false), (cut, true)]);
    for ((start, limit), sign) in cuts {
        for (low, high) in [(0, 3), (3, 0), (2, 1), (0, 9), (9, 0)] {
            let (size, all) = (limit - start, limit - start + low + high);
            let part = format!("slice{{limit:[2, 3, {limit}], start:[0, 0, {start}], stride:[1, 1, 1]}} %0");
            let ends = format!("pad{{high:[0, 0, {high}], interior:[0, 0, 0], low:[0, 0, {low}]}}");
            let (size, all) = (format!("f32[2, 3, {size}]"), format!("f32[2, 3, {all}]"));
            let mut lines = vec![
                "f32[2, 3, 8] = input{batch_dim:0, name:x}".to_owned(),
                "f32[2, 3] = reduce{dims:[2], op:max} %0".to_owned(),
                format!("{all} = broadcast_in_dim{{dims:[0, 1]}} %1"),
                format!("{size} = {part}"),
            ];
            if sign {
                lines.push(format!("{size} = unary{{op:neg}} %3"));
            }
            lines.push(format!("{all} = {ends} %{}", lines.len() - 1));
            // Once by a kernel of its own, once within another, which tells the signs of zeros apart, too.
            let pad = lines.len() - 1;
            lines.push(format!("{all} = binary{{op:mul}} %{pad}, %2"));
            let numbered = lines.iter().enumerate().map(|(i, line)| format!("%{i} {line}\n")).collect::<String>();
            for output in [pad, pad + 1] {
                check(&format!("{numbered}output y = %{output}\n"), &[2, 3, 8]);
            }
        }
    }
}

/// Zero times what is infinite is no zero: a product is cut where its part ends.
#[test]
fn a_pad_of_a_product_is_zero_around_it() {
    let text = "\
%0 f32[2, 3, 8] = input{batch_dim:0, name:x}
%1 f32[2, 3] = reduce{dims:[2], op:max} %0
%2 f32[2, 3, 8] = broadcast_in_dim{dims:[0, 1]} %1
%3 f32[2, 3, 8] = binary{op:mul} %0, %2
%4 f32[2, 3, 4] = slice{limit:[2, 3, 4], start:[0, 0, 0], stride:[1, 1, 1]} %3
%5 f32[2, 3, 4] = slice{limit:[2, 3, 8], start:[0, 0, 4], stride:[1, 1, 1]} %3
%6 f32[2, 3, 4] = unary{op:neg} %5
%7 f32[2, 3, 8] = pad{high:[0, 0, 0], interior:[0, 0, 0], low:[0, 0, 4]} %4
%8 f32[2, 3, 8] = pad{high:[0, 0, 4], interior:[0, 0, 0], low:[0, 0, 0]} %6
%9 f32[2, 3, 8] = binary{op:add} %7, %8
output y = %9
";
    check(text, &[2, 3, 8]);
}

/// 300 steps through slices of `x`, each of which is an output.
fn steps(op: &str) -> String {
    let mut text = "%0 f32[4, 300] = input{batch_dim:0, name:x}\n".to_owned();
    let mut outputs = String::new();
    for i in 0..300 {
        let [before, slice, step] = [2 * i, 1 + 2 * i, 2 + 2 * i];
        text += &format!("%{slice} f32[4, 1] = slice{{limit:[4, {}], start:[0, {i}], stride:[1, 1]}} %0\n", i + 1);
        let before = if i == 0 { slice } else { before };
        text += &format!("%{step} f32[4, 1] = binary{{op:{op}}} %{before}, %{slice}\n");
        outputs += &format!("output y{i} = %{step}\n");
    }
    text + &outputs
}

#[test]
fn what_one_kernel_cannot_store_several_do() {
    assert!(check(&steps("min"), &[4, 300]) > 1);
    assert!(run(&steps("max"), &steps("min"), &[4, 300]).0, "the control: another function");
}

/// Eight parts of `x` of `size` each along dim 1, squared, and put together `by` places further on.
fn parts(size: usize, by: usize) -> String {
    let mut text = format!("%0 f32[4, {}, 3] = input{{batch_dim:0, name:x}}\n", 8 * size);
    let mut terms = Vec::new();
    for i in 0..8 {
        let [slice, square, pad] = [1, 2, 3].map(|k| 3 * i + k);
        let (start, low) = (i * size, (i + by) % 8 * size);
        let high = 7 * size - low;
        text += &format!(
            "%{slice} f32[4, {size}, 3] = slice{{limit:[4, {}, 3], start:[0, {start}, 0], stride:[1, 1, 1]}} %0\n\
             %{square} f32[4, {size}, 3] = binary{{op:mul}} %{slice}, %{slice}\n\
             %{pad} f32[4, {}, 3] = pad{{high:[0, {high}, 0], interior:[0, 0, 0], low:[0, {low}, 0]}} %{square}\n",
            start + size,
            8 * size,
        );
        terms.push(format!("%{pad}"));
    }
    format!("{text}%25 f32[4, {}, 3] = grad_sum{{of:0}} {}\noutput y = %25\n", 8 * size, terms.join(", "))
}

#[test]
fn parts_that_are_a_whole_are_written_to_their_places() {
    for size in [1, 2] {
        let shape = [4, 8 * size as u64, 3];
        // Eight of squares, and the whole.
        assert_eq!(check(&parts(size, 3), &shape), 9);
        assert!(run(&parts(size, 3), &parts(size, 2), &shape).0, "the control: other places");
        let stores = |text: &str| compiled(text).programs[0].kernels.iter().map(|kernel| kernel.body.len()).max();
        assert_eq!(stores(&parts(size, 3)), Some(8));
        // Seven parts are not all of it.
        assert!(stores(&parts(size, 3).replace(", %24\n", "\n")) < Some(8));
    }
}

/// Sixteen multiples of `x` one after the other along dim 1, from the `by`-th on.
fn joined(by: usize) -> String {
    let mut text = "%0 f32[4, 2, 3] = input{batch_dim:0, name:x}\n".to_owned();
    for i in 0..16 {
        text += &format!("%{} f32[4, 2, 3] = binary{{op:add}} %{i}, %0\n", i + 1);
    }
    let parts: Vec<String> = (0..16).map(|i| format!("%{}", (i + by) % 16 + 1)).collect();
    format!("{text}%17 f32[4, 32, 3] = concatenate{{dim:1}} {}\noutput y = %17\n", parts.join(", "))
}

#[test]
fn parts_of_a_concatenation_are_written_to_their_places() {
    let shape = [4, 2, 3];
    check(&joined(0), &shape);
    assert!(run(&joined(0), &joined(1), &shape).0, "the control: another order");
    let stores = |text: &str| compiled(text).programs[0].kernels.iter().map(|kernel| kernel.body.len()).collect::<Vec<_>>();
    assert!(stores(&joined(0)).contains(&16), "{:?}", stores(&joined(0)));
}
