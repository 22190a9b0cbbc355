//! `dcc verify MODEL.onnx`: a model has the same values by both, and a fault that is planted in a kernel is found, at its
//! node. Without the feature `tract`, it says how to get it.

#[cfg(feature = "tract")]
mod opinion;

use crate::command::{Folder, dcc};
use crate::onnx_model::{external, model, node, size, tensor, value, with_tensor};
use prost::Message;

#[test]
fn a_model_has_a_second_opinion() {
    let output = dcc(["verify", "tests/models/mlp.onnx", "--init", "1", "--json"]);
    match cfg!(feature = "tract") {
        true => {
            let found = output.ok().json();
            assert!(found["agrees"] == true && found["outputs"] == 1 && found["unchecked"].as_array().unwrap().is_empty());
            let text = dcc(["verify", "tests/models/mlp.onnx", "--init", "1"]).ok().stdout;
            assert!(text.contains("dcc and tract agree: 1 outputs") && text.contains("image f32[2, "), "{text}");
            let bare = dcc(["verify", "tests/models/mlp.onnx"]);
            assert!(bare.code == Some(2) && bare.stderr.contains("--init SEED"), "{}", bare.stderr);
        }
        false => {
            assert!(output.code == Some(8) && output.stdout.is_empty(), "{}", output.stderr);
            assert!(output.stderr.contains("DCC0811") && output.stderr.contains("--features tract"), "{}", output.stderr);
        }
    }
}

/// A product whose sum the ranks share, then a map that doubles every difference, over and over (May 1976, doi 10.1038/261459a0).
fn chaotic(folder: &Folder, times: usize) -> String {
    let mut nodes = vec![
        node("MatMul", &["x", "w"], &["wide"]),
        node("MatMul", &["wide", "v"], &["narrow"]),
        node("Sigmoid", &["narrow"], &["z0"]),
    ];
    for time in 0..times {
        let [z, rest, part] = ["z", "rest", "part"].map(|name| format!("{name}{time}"));
        let next = if time + 1 == times { "y".to_owned() } else { format!("z{}", time + 1) };
        nodes.push(node("Sub", &["one", &z], &[&rest]));
        nodes.push(node("Mul", &[&z, &rest], &[&part]));
        nodes.push(node("Mul", &[&part, "rate"], &[&next]));
    }
    let weights = [external("w", &[32, 64], "weights"), external("v", &[64, 16], "weights")];
    let numbers = [("one", 1.0_f32), ("rate", 3.9)].map(|(name, number)| tensor(name, &[], &number.to_le_bytes()));
    let mut proto = weights.into_iter().chain(numbers).fold(model(&nodes), with_tensor);
    proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(8), size(32)])];
    let path = folder.at(&format!("chaotic{times}.onnx"));
    std::fs::write(&path, proto.encode_to_vec()).expect("a file");
    path
}

#[test]
fn rounding_that_a_model_magnifies_is_no_fault() {
    let folder = Folder::new();
    let verified = |times: usize| {
        let (path, artifact) = (chaotic(&folder, times), folder.at("chaotic.dcc"));
        dcc(["compile", &path, "--tp", "2", "--loss", "mse", "-o", &artifact]).ok();
        dcc(["verify", &artifact, "--model", &path]).ok().stdout
    };
    let text = verified(20);
    assert!(text.contains("2 ranks") && text.contains("in f64: rounding alone"), "{text}");
    let text = verified(1);
    assert!(text.contains("2 ranks") && !text.contains("f64"), "the control: {text}");
}

/// A loss that is no number on one device either tells nothing of the ranks.
#[test]
fn made_up_data_may_give_no_number() {
    let folder = Folder::new();
    let verified = |last: &str| {
        let nodes = [
            node("MatMul", &["x", "w"], &["h"]),
            node("Mul", &["h", "h"], &["square"]),
            node("Neg", &["square"], &["less"]),
            node(last, &["less"], &["y"]),
        ];
        let mut proto = with_tensor(model(&nodes), external("w", &[32, 64], "weights"));
        proto.graph.as_mut().expect("a graph").input = vec![value("x", &[size(8), size(32)])];
        let (path, artifact) = (folder.at("roots.onnx"), folder.at("roots.dcc"));
        std::fs::write(&path, proto.encode_to_vec()).expect("a file");
        dcc(["compile", &path, "--dp", "2", "--loss", "mse", "-o", &artifact]).ok();
        dcc(["verify", &artifact, "--model", &path])
    };
    let output = verified("Sqrt");
    assert!(output.code == Some(9) && output.stderr.contains("no finite result, on one device too"), "{}", output.stderr);
    verified("Tanh").ok();
}
