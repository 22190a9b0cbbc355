//! `dcc verify MODEL.onnx`: a model has the same values by both, and a fault that is planted in a kernel is found, at its
//! node. Without the feature `tract`, it says how to get it.

#[cfg(feature = "tract")]
mod opinion;

use crate::command::dcc;

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
