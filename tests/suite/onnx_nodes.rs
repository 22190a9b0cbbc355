//! ONNX's own node tests: what each operator that dcc imports computes.

use bytes::Bytes;
use dcc::import::{Imported, Model, Options, TensorData, onnx};
use dcc::interp::{Bindings, Precision, Tensor, outputs};
use dcc_program::{DType, Shape};
use expect_test::expect_file;
use serde_json::Value;

/// Largest error relative to one plus the value, f32 against ONNX's reference.
const TOLERANCE: f64 = 1e-5;

pub fn tensor(value: &Value) -> Tensor {
    let dtype = DType::parse(value["dtype"].as_str().expect("a dtype")).expect("a dtype of ours");
    let shape: Shape = serde_json::from_value::<Vec<u64>>(value["shape"].clone()).expect("a shape").into_iter().collect();
    let values = value["values"].as_array().expect("values");
    let float = |value: &Value| value.as_f64().or_else(|| value.as_str()?.parse().ok()).expect("a number");
    match dtype {
        DType::F32 => Tensor::floats(dtype, &shape, values.iter().map(|value| f64::from(float(value) as f32)).collect()),
        DType::F64 => Tensor::floats(dtype, &shape, values.iter().map(float).collect()),
        _ => Tensor::ints(dtype, &shape, values.iter().map(|value| value.as_i64().expect("an integer")).collect()),
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    match tensor.dtype {
        DType::F32 => tensor.f64s().iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        DType::F64 => tensor.f64s().iter().flat_map(|x| x.to_le_bytes()).collect(),
        dtype => tensor.i64s().iter().flat_map(|x| x.to_le_bytes().into_iter().take(dtype.bytes() as usize)).collect(),
    }
}

pub fn constant(name: &str, tensor: &Tensor) -> dcc::import::Tensor {
    dcc::import::Tensor {
        name: name.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        data: TensorData::Owned(Bytes::from(bytes(tensor))),
    }
}

pub fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks_exact(2).map(|pair| std::str::from_utf8(pair).expect("hex"));
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("hex")).collect()
}

pub fn near(a: f64, b: f64) -> bool {
    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= TOLERANCE * (1.0 + b.abs())
}

/// What differs, if anything does.
fn run(case: &Value) -> Result<(), String> {
    let model = Model::decode(Bytes::from(unhex(case["model"].as_str().expect("hex")))).map_err(|error| error.to_string())?;
    let names: Vec<String> = model.graph().input.iter().map(|input| input.name().to_owned()).collect();
    let tensors: Vec<Tensor> = case["inputs"].as_array().expect("inputs").iter().map(tensor).collect();
    let mut options = Options { batch_dims: names.iter().map(|name| (name.clone(), None)).collect(), ..Options::default() };
    let fixed: Vec<String> = serde_json::from_value(case["constants"].clone()).expect("names");
    let mut bindings = Bindings::default();
    for (name, tensor) in names.iter().zip(tensors) {
        if fixed.contains(name) {
            options.constants.insert(name.clone(), constant(name, &tensor));
        }
        bindings = bindings.input(name, tensor);
    }
    let Imported { graph, parameters, .. } = onnx(&model, &options).map_err(|error| error.to_string())?;
    for parameter in &parameters {
        bindings = bindings.weight(&parameter.tensor.name, parameter.tensor.read(&model).map_err(|error| error.to_string())?);
    }
    let graph = dcc::train::for_evaluation(&graph).map_err(|error| error.to_string())?;
    let results = outputs(&graph, &bindings, Precision::Declared).map_err(|error| error.to_string())?;
    let wanted: Vec<Tensor> = case["outputs"].as_array().expect("outputs").iter().map(tensor).collect();
    compare(&results, &wanted)
}

/// The first difference.
fn compare(results: &[(String, Tensor)], wanted: &[Tensor]) -> Result<(), String> {
    for ((name, got), wanted) in results.iter().zip(wanted) {
        if (got.dtype, &got.shape) != (wanted.dtype, &wanted.shape) {
            return Err(format!(
                "{name} is {}{:?}, not {}{:?}",
                got.dtype.name(),
                got.shape,
                wanted.dtype.name(),
                wanted.shape
            ));
        }
        let pairs = got.to_f64s().into_iter().zip(wanted.to_f64s());
        if let Some((a, b)) = pairs.into_iter().find(|&(a, b)| !near(a, b)) {
            return Err(format!("{name} has {a}, not {b}"));
        }
    }
    Ok(())
}

/// All cases pass but those in `nodes_refused.txt`, which lists the message of each.
#[test]
fn operators_compute_what_onnx_says() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/import/nodes.json")).expect("JSON");
    let mut refused = String::new();
    for case in &cases {
        if let Err(message) = run(case) {
            refused += &format!("{}: {}\n", case["name"].as_str().expect("a name"), message.lines().next().unwrap_or_default());
        }
    }
    expect_file!["../golden/import/nodes_refused.txt"].assert_eq(&refused);
}
