//! Models that are damaged, hostile or beyond what dcc reads: an error that says what, where and what to do; never a panic.

use crate::onnx_model::{external, model, node, opset, size, symbol, tensor, value, with_int, with_tensor};
use bytes::Bytes;
use dcc::import::proto::attribute_proto::AttributeType;
use dcc::import::proto::tensor_proto::DataType;
use dcc::import::proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto};
use dcc::import::{Model, Options, onnx};
use expect_test::{Expect, expect};
use prost::Message;
use std::path::Path;

fn import(bytes: Vec<u8>, options: &Options) -> dcc::Result<()> {
    onnx(&Model::decode(Bytes::from(bytes))?, options).map(|_| ())
}

/// The error of a model.
fn check(model: &ModelProto, expected: Expect) {
    check_with(model, &Options::default(), expected);
}

fn check_with(model: &ModelProto, options: &Options, expected: Expect) {
    match import(model.encode_to_vec(), options) {
        Ok(()) => expected.assert_eq("imported"),
        Err(error) => expected.assert_eq(&error.to_string()),
    }
}

#[test]
fn a_good_model_imports() {
    check(&model(&[node("Relu", &["x"], &["y"])]), expect!["imported"]);
}

#[test]
fn not_a_model() {
    let error = |bytes: &[u8]| import(bytes.to_vec(), &Options::default()).expect_err("no model").to_string();
    expect![[r#"
        error[DCC0101]: the 0 bytes hold no ONNX graph
          help pass an .onnx file"#]]
    .assert_eq(&error(b""));
    expect![[r#"
        error[DCC0101]: the file is a Git LFS pointer, not the model
          help fetch the model with `git lfs pull`"#]]
    .assert_eq(&error(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"));
    assert!(error(b"\x89PNG\r\n\x1a\n").starts_with("error[DCC0101]"));
}

#[test]
fn truncated() {
    let bytes = model(&[node("Relu", &["x"], &["y"])]).encode_to_vec();
    let results = (0..bytes.len()).map(|length| import(bytes[..length].to_vec(), &Options::default()));
    let failed = results.filter(|result| result.as_ref().is_err_and(|error| error.code.exit() == 3)).count();
    assert_eq!(failed, bytes.len(), "every prefix is refused as a damaged model");
}

/// Bytes changed at random: any result but a panic, and never a result that takes long.
#[test]
fn corrupted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut state = 1_u64;
    let mut random = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    for name in ["mlp_sce", "two_inputs", "attention/gpt2_sdpa_dynamo18", "attention/llama_sdpa_dynamo23"] {
        let whole = std::fs::read(root.join(format!("models/{name}.onnx"))).expect("a model");
        for _ in 0..300 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random(4) {
                let at = random(bytes.len());
                bytes[at] = random(256) as u8;
            }
            let _ = import(bytes, &Options { global_batch: Some(4), ..Options::default() });
        }
    }
}

#[test]
fn unknown_operators() {
    check(
        &model(&[node("Reluu", &["x"], &["y"])]),
        expect![[r#"
        error[DCC0103]: ONNX has no operator `Reluu`
          at   node 0 `/reluu` (Reluu, opset 20)"#]],
    );
    check(
        &model(&[node("Det", &["x"], &["y"])]),
        expect![[r#"
        error[DCC0102]: the operator Det of opset 20 is not supported
          at   node 0 `/det` (Det, opset 20): f32[2, 3]
          help README.md lists the operators that dcc imports"#]],
    );
    let mut foreign = node("Inverse", &["x"], &["y"]);
    foreign.domain = Some("com.microsoft".to_owned());
    check(
        &model(&[foreign]),
        expect![[r#"
        error[DCC0102]: `Inverse` of domain `com.microsoft` is not supported
          at   node 0 `/inverse` (com.microsoft.Inverse, opset 20)
          help export with standard ONNX operators only"#]],
    );
}

#[test]
fn wrong_opsets() {
    for (version, expected) in [
        (
            3,
            expect![[r#"
        error[DCC0103]: opset 3 is not supported, 7 to 28 are
          note the model has Gelu
          help export with `opset_version=20`, or convert with `onnx.version_converter`"#]],
        ),
        (
            99,
            expect![[r#"
        error[DCC0103]: opset 99 is not supported, 7 to 28 are
          note the model has Gelu
          help export with `opset_version=20`, or convert with `onnx.version_converter`"#]],
        ),
        (
            17,
            expect![[r#"
        error[DCC0103]: opset 17 has no operator Gelu: it came with opset 20
          at   node 0 `/gelu` (Gelu, opset 17)
          help export with `opset_version=20`"#]],
        ),
    ] {
        let mut model = model(&[node("Gelu", &["x"], &["y"])]);
        model.opset_import = vec![opset(version)];
        check(&model, expected);
    }
    let mut none = model(&[]);
    none.opset_import.clear();
    check(&none, expect!["error[DCC0103]: the model does not say which opset of the default domain it uses"]);
}

#[test]
fn malformed_graphs() {
    let cycle = [node("Add", &["x", "b"], &["a"]), node("Relu", &["a"], &["b"]), node("Neg", &["b"], &["y"])];
    check(
        &model(&cycle),
        expect![[r#"
        error[DCC0107]: 2 nodes form a cycle
          at   node 0 `/add` (Add)
          note the cycle: node 1 `/relu` (Relu) → node 0 `/add` (Add)"#]],
    );
    check(
        &model(&[node("Add", &["x", "nowhere"], &["y"])]),
        expect![[r#"
        error[DCC0107]: input `nowhere` is defined nowhere
          at   node 0 `/add` (Add)"#]],
    );
    check(
        &model(&[node("Relu", &["x"], &["y"]), node("Neg", &["x"], &["y"])]),
        expect![[r#"
        error[DCC0107]: `y` is defined twice
          at   node 1 `/neg` (Neg)"#]],
    );
    check(&model(&[node("Relu", &["x"], &["z"])]), expect!["error[DCC0107]: no node computes the graph output `y`"]);
    check(
        &model(&[node("Relu", &["x", "x"], &["y"])]),
        expect![[r#"
        error[DCC0107]: 2 inputs, Relu takes 1
          at   node 0 `/relu` (Relu, opset 20)"#]],
    );
    check(&model(&[node("Neg", &["a"], &["y"]), node("Relu", &["x"], &["a"])]), expect![["imported"]]);
}

#[test]
fn attributes_that_are_not_honoured() {
    check(
        &model(&[with_int(node("Relu", &["x"], &["y"]), "inplace", 1)]),
        expect![[r#"
        error[DCC0106]: attribute `inplace` of Relu is not supported
          at   node 0 `/relu` (Relu, opset 20): f32[2, 3]"#]],
    );
    check(
        &model(&[with_int(node("LeakyRelu", &["x"], &["y"]), "alpha", 1)]),
        expect![[r#"
        error[DCC0106]: attribute `alpha` has type INT, not FLOAT
          at   node 0 `/leakyrelu` (LeakyRelu, opset 20): f32[2, 3]"#]],
    );
}

#[test]
fn dims_and_data() {
    let add = || model(&[node("Add", &["x", "w"], &["y"])]);
    check(
        &with_tensor(add(), tensor("w", &[i64::MAX, 3], &[])),
        expect![[r#"
        error[DCC0108]: a tensor of dims [9223372036854775807, 3] has more elements than can be addressed
          at   tensor `w`"#]],
    );
    check(
        &with_tensor(add(), tensor("w", &[0, i64::MAX, i64::MAX], &[])),
        expect![[r#"
        error[DCC0108]: a tensor of dims [0, 9223372036854775807, 9223372036854775807] has more elements than can be addressed
          at   tensor `w`"#]],
    );
    check(
        &with_tensor(add(), tensor("w", &[-1, 3], &[])),
        expect![[r#"
        error[DCC0108]: dim -1 of [-1, 3] is negative
          at   tensor `w`"#]],
    );
    check(
        &with_tensor(add(), tensor("w", &[2, 3], &[0; 20])),
        expect![[r#"
        error[DCC0109]: 20 bytes of raw data for dims and dtype that need 24
          at   tensor `w`"#]],
    );
    check(
        &with_tensor(add(), tensor("w", &[2, 4], &[0; 32])),
        expect![[r#"
        error[DCC0104]: [2, 3] and [2, 4] do not broadcast
          at   node 0 `/add` (Add, opset 20): f32[2, 3], f32[2, 4]"#]],
    );
    let mut strings = tensor("w", &[1], &[]);
    strings.data_type = Some(DataType::String.into());
    check(
        &with_tensor(add(), strings),
        expect![[r#"
        error[DCC0105]: element type STRING is not supported
          at   tensor `w`"#]],
    );
}

/// Found by mutation: products that overflow, nothing taken of what is everywhere the same, a part for every element.
#[test]
fn shapes_that_mutations_found() {
    let ints = |name: &str, values: [i64; 2]| {
        let mut tensor = tensor(name, &[2], &values.map(i64::to_le_bytes).concat());
        tensor.data_type = Some(DataType::Int64.into());
        tensor
    };
    check(
        &with_tensor(model(&[node("Reshape", &["x", "w"], &["y"])]), ints("w", [1 << 33, 1 << 33])),
        expect![[r#"
        error[DCC0108]: a tensor of dims [8589934592, 8589934592] has more elements than can be addressed
          at   node 0 `/reshape` (Reshape, opset 20): f32[2, 3], i64[2] = [8589934592, 8589934592]"#]],
    );
    let nothing = [node("ConstantOfShape", &["s"], &["a"]), with_int(node("Compress", &["a", "none"], &["y"]), "axis", 0)];
    let mut none = tensor("none", &[2], &[0, 0]);
    none.data_type = Some(DataType::Bool.into());
    check(&with_tensor(with_tensor(model(&nothing), ints("s", [2, 3])), none), expect![["imported"]]);
    let mut outer = model(&[node("Transpose", &["x"], &["t"]), node("MatMul", &["x", "t"], &["y"])]);
    outer.graph.as_mut().expect("a graph").input = vec![value("x", &[size(1 << 40), size(1)])];
    check(
        &outer,
        expect![[r#"
        error[DCC0108]: a tensor of dims [1099511627776, 1099511627776] has more elements than can be addressed
          at   node 1 `/matmul` (MatMul, opset 20)"#]],
    );
    let mut parts = model(&[node("SplitToSequence", &["x"], &["s"]), node("ConcatFromSequence", &["s"], &["y"])]);
    parts.graph.as_mut().expect("a graph").input = vec![value("x", &[size(1 << 33)])];
    check(
        &parts,
        expect![[r#"
        error[DCC0108]: a sequence of 8589934592 parts, at most 16384 are supported
          at   node 0 `/splittosequence` (SplitToSequence, opset 20): f32[8589934592]"#]],
    );
}

/// Found by mutation too: sizes at the ends of the integers, one value where two are read.
#[test]
fn numbers_that_mutations_found() {
    let ints = |name: &str, values: &[i64]| {
        let mut tensor = tensor(name, &[values.len() as i64], &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        tensor.data_type = Some(DataType::Int64.into());
        tensor
    };
    let image = |node: NodeProto| {
        let mut model = model(&[node]);
        model.graph.as_mut().expect("a graph").input = vec![value("x", &[size(1), size(4), size(2), size(2)])];
        model
    };
    check(
        &image(with_int(node("DepthToSpace", &["x"], &["y"]), "blocksize", 1 << 33)),
        expect![[r#"
        error[DCC0104]: [1, 4, 2, 2] with blocks of 8589934592 × 8589934592
          at   node 0 `/depthtospace` (DepthToSpace, opset 20): f32[1, 4, 2, 2]"#]],
    );
    check(
        &image(with_int(node("SpaceToDepth", &["x"], &["y"]), "blocksize", i64::MAX)),
        expect![[r#"
        error[DCC0104]: [1, 4, 2, 2] with blocks of 9223372036854775807 × 9223372036854775807
          at   node 0 `/spacetodepth` (SpaceToDepth, opset 20): f32[1, 4, 2, 2]"#]],
    );
    let several = |name: &str, ints: Vec<i64>| AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Ints.into()),
        ints,
        ..AttributeProto::default()
    };
    let mut pool = node("MaxPool", &["x"], &["y"]);
    pool.attribute = vec![several("kernel_shape", vec![1, 1]), several("pads", vec![i64::MIN, 0, 0, 0])];
    check(
        &image(pool),
        expect![[r#"
        error[DCC0106]: pads = [-9223372036854775808, 0, 0, 0] of 2 dims
          at   node 0 `/maxpool` (MaxPool, opset 20): f32[1, 4, 2, 2]"#]],
    );
    // Only the parts that have names are built.
    check(&image(with_int(node("Split", &["x"], &["y", "z"]), "num_outputs", i64::from(i32::MAX))), expect!["imported"]);
    check(
        &image(with_int(node("Split", &["x"], &["y", "z"]), "num_outputs", 1)),
        expect![[r#"
        error[DCC0106]: fewer `num_outputs` than the 2 outputs
          at   node 0 `/split` (Split, opset 20): f32[1, 4, 2, 2]"#]],
    );
    let mut one = tensor("one", &[], &1_f32.to_le_bytes());
    one.dims.clear();
    let hot = model(&[node("OneHot", &["at", "depth", "one"], &["y"])]);
    check(
        &with_tensor(with_tensor(with_tensor(hot, ints("at", &[0])), ints("depth", &[3])), one),
        expect![[r#"
        error[DCC0104]: elements 0..1 of dim 0 of []
          at   node 0 `/onehot` (OneHot, opset 20): i64[1] = [0], i64[1] = [3], f32[]"#]],
    );
}

/// Found by mutation too: the cycle runs through what a branch reads of the graph around it.
#[test]
fn cycles_through_branches() {
    let branch = |reads: &str| {
        let inner =
            GraphProto { node: vec![node("Neg", &[reads], &["n"])], output: vec![value("n", &[])], ..GraphProto::default() };
        Some(inner)
    };
    let mut choice = node("If", &["c"], &["a"]);
    choice.attribute = ["then_branch", "else_branch"]
        .map(|name| AttributeProto {
            name: Some(name.to_owned()),
            r#type: Some(AttributeType::Graph.into()),
            g: branch("y"),
            ..AttributeProto::default()
        })
        .to_vec();
    let mut yes = tensor("c", &[], &[1]);
    yes.data_type = Some(DataType::Bool.into());
    check(
        &with_tensor(model(&[choice, node("Relu", &["a"], &["y"])]), yes),
        expect![[r#"
        error[DCC0107]: 2 nodes form a cycle
          at   node 0 `/if` (If)
          note the cycle: node 1 `/relu` (Relu) → node 0 `/if` (If)"#]],
    );
}

#[test]
fn external_data() {
    let add = || model(&[node("Add", &["x", "w"], &["y"])]);
    for location in ["../w.bin", "/etc/passwd", "a/../../w.bin", ""] {
        let error = import(with_tensor(add(), external("w", &[2, 3], location)).encode_to_vec(), &Options::default());
        assert_eq!(error.expect_err("escapes").code.0, 110, "{location}");
    }
    check(
        &with_tensor(add(), external("w", &[2, 3], "../w.bin")),
        expect![[r#"
        error[DCC0110]: the external data path `../w.bin` leaves the model's folder
          at   tensor `w`
          help external data must lie in the model's folder; move them there and export again"#]],
    );
    check(&with_tensor(add(), external("w", &[2, 3], "absent.bin")), expect![["imported"]]);
    let mut shape = external("w", &[2], "absent.bin");
    shape.data_type = Some(DataType::Int64.into());
    check(
        &with_tensor(model(&[node("Reshape", &["x", "w"], &["y"])]), shape),
        expect![[r#"
            error[DCC0110]: input 1 of Reshape, the constant `w`, lies in `absent.bin`, which is absent
              at   node 0 `/reshape` (Reshape, opset 20): f32[2, 3], i64[2]
              help put the file beside the model"#]],
    );
}

#[test]
fn shapes_left_open() {
    let mut open = model(&[node("Relu", &["x"], &["y"])]);
    open.graph.as_mut().expect("a graph").input = vec![value("x", &[symbol("batch"), symbol("seq"), size(4)])];
    check(
        &open,
        expect![[r#"
        error[DCC0002]: the model leaves open the size of `batch` (dim 0 of x), `seq` (dim 1 of x)
          help add --global-batch-size B --dim seq=N"#]],
    );
    let dims = [("seq".to_owned(), 16), ("batch".to_owned(), 8)].into();
    check_with(&open, &Options { dims, ..Options::default() }, expect![["imported"]]);
    let dims = [("seq".to_owned(), 16), ("batch".to_owned(), 8)].into();
    check_with(
        &open,
        &Options { dims, global_batch: Some(4), ..Options::default() },
        expect![[r#"
        error[DCC0001]: --dim batch=8 contradicts the global batch size 4
          help `batch` is the model's batch dim; give one of the two"#]],
    );
    let batch_dims = [("images".to_owned(), Some(0))].into();
    check_with(
        &open,
        &Options { batch_dims, ..Options::default() },
        expect![[r#"
        error[DCC0001]: the model has no input `images`
          note its inputs: x"#]],
    );
}

/// Two towers, each with a symbol of its own for its samples.
#[test]
fn two_symbols_of_the_batch() {
    let mut towers = model(&[node("Transpose", &["t"], &["u"]), node("MatMul", &["x", "u"], &["y"])]);
    let inputs = vec![value("x", &[symbol("images"), size(4)]), value("t", &[symbol("texts"), size(4)])];
    towers.graph.as_mut().expect("a graph").input = inputs;
    check(
        &towers,
        expect![[r#"
        error[DCC0002]: more than one symbol could be the batch: `images` of x, `texts` of t
          note a symbol that does not count samples needs a size instead: --dim SYMBOL=N
          help add --batch-dim x=0 --batch-dim t=0"#]],
    );
    // What nobody has named counts samples where a size would; one name is enough to ask.
    let named = |first: &str, second: &str| {
        let mut towers = towers.clone();
        let dims = [("x", first), ("t", second)].map(|(input, name)| value(input, &[symbol(name), size(4)]));
        towers.graph.as_mut().expect("a graph").input = dims.to_vec();
        towers
    };
    for (first, second) in [("unk__7", "unk__8"), ("", "?"), ("DynamicDimension.0", "unk__1")] {
        check_with(&named(first, second), &Options { global_batch: Some(2), ..Options::default() }, expect![["imported"]]);
    }
    check(
        &named("images", "unk__8"),
        expect![[r#"
        error[DCC0002]: more than one symbol could be the batch: `images` of x, `unk__8` of t
          note a symbol that does not count samples needs a size instead: --dim SYMBOL=N
          help add --batch-dim x=0 --batch-dim t=0"#]],
    );
    let texts = || [("texts".to_owned(), 3)].into();
    let both = || [("x".to_owned(), Some(0)), ("t".to_owned(), Some(0))].into();
    let global = Options { global_batch: Some(2), ..Options::default() };
    check_with(&towers, &Options { batch_dims: both(), ..global.clone() }, expect![["imported"]]);
    check_with(&towers, &Options { dims: texts(), ..global.clone() }, expect![["imported"]]);
    check_with(
        &towers,
        &Options { batch_dims: both(), dims: texts(), ..global.clone() },
        expect![[r#"
        error[DCC0001]: --dim texts=3 contradicts the global batch size 2
          help `texts` is the model's batch dim; give one of the two"#]],
    );
    let one = [("x".to_owned(), Some(0))].into();
    check_with(
        &towers,
        &Options { batch_dims: one, ..global },
        expect![[r#"
        error[DCC0002]: the model leaves open the size of `texts` (dim 0 of t)
          help add --dim texts=N"#]],
    );
}

/// Functions that call themselves, and functions that double at each of many levels without ever adding a node.
#[test]
fn hostile_functions() {
    let function = |name: &str, calls: &[&str]| FunctionProto {
        name: Some(name.to_owned()),
        domain: Some("f".to_owned()),
        input: vec!["a".to_owned()],
        output: vec!["a".to_owned()],
        node: calls.iter().map(|callee| call(callee, "a", "")).collect(),
        opset_import: vec![opset(20)],
        ..Default::default()
    };
    fn call(name: &str, input: &str, output: &str) -> NodeProto {
        NodeProto { domain: Some("f".to_owned()), ..node(name, &[input], &[output]) }
    }
    let mut endless = model(&[call("again", "x", "y")]);
    endless.functions = vec![function("again", &["again"])];
    check(
        &endless,
        expect![[r#"
        error[DCC0108]: functions call each other more than 32 deep
          at   node 0 `/again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again//again` (f.again, opset 20)"#]],
    );
    let mut bomb = model(&[call("f0", "x", "y")]);
    let names: Vec<String> = (0..32).map(|level| format!("f{level}")).collect();
    bomb.functions = names.windows(2).map(|pair| function(&pair[0], &[pair[1].as_str(); 8])).collect();
    bomb.functions.push(function("f31", &[]));
    check(
        &bomb,
        expect![[r#"
        error[DCC0108]: the model has more than 1000000 nodes with its functions inlined
          at   node 0 `/f0//f1//f2//f3//f4//f5//f6//f7//f8//f9//f10//f11//f12//f13//f14//f15//f16//f17//f18//f19//f20//f21//f22//f23//f24//f25//f26//f27//f28//f29//f30//f31` (f.f31, opset 20)"#]],
    );
}

/// Found by changed models: what constants are folded with, and what is put together of a sequence, is checked first.
#[test]
fn constants_and_sequences_of_the_wrong_type() {
    let no = model(&[node("Not", &["c"], &["b"]), node("Add", &["x", "b"], &["y"])]);
    check(
        &with_tensor(no, tensor("c", &[1], &1.5_f32.to_le_bytes())),
        expect![[r#"
        error[DCC0105]: not of f32
          at   node 0 `/not` (Not, opset 20)"#]],
    );
    let flat = model(&[
        node("ReduceSum", &["x"], &["s"]),
        node("SequenceConstruct", &["x", "s"], &["l"]),
        with_int(with_int(node("ConcatFromSequence", &["l"], &["y"]), "axis", 2), "new_axis", 1),
    ]);
    check(
        &flat,
        expect![[r#"
        error[DCC0104]: cannot concatenate [2, 3, 1] and [1, 1, 1] along 2
          at   node 2 `/concatfromsequence` (ConcatFromSequence, opset 20): a sequence"#]],
    );
}

/// Operators that dcc does not have stand in the way of what depends on them alone.
#[test]
fn operators_that_nothing_wanted_needs() {
    let mut label = node("ArgMaxLabel", &["y"], &["label"]);
    label.domain = Some("ai.onnx.ml".to_owned());
    let unread = model(&[node("Relu", &["x"], &["y"]), label, node("Relu", &["x", "x"], &["more"])]);
    check(&unread, expect!["imported"]);
    let mut two = unread;
    two.graph.as_mut().expect("a graph").output.insert(0, value("label", &[]));
    let error = || {
        expect![[r#"
        error[DCC0102]: operators of domain `ai.onnx.ml` are not supported
          at   node 1 `/argmaxlabel` (ai.onnx.ml.ArgMaxLabel, opset 20)
          note output `label` depends on it; `--output y` does without
          help export with standard ONNX operators only"#]]
    };
    check(&two, error());
    let of = |name: &str| Options { output: Some(name.to_owned()), ..Options::default() };
    check_with(&two, &of("label"), error());
    check_with(&two, &of("y"), expect!["imported"]);
    let imported = onnx(&Model::decode(Bytes::from(two.encode_to_vec())).expect("a model"), &of("y")).expect("a graph");
    let told = "output `label` is left out: operators of domain `ai.onnx.ml` are not supported";
    assert_eq!(imported.warnings, [told]);
}

/// An output that is listed twice is one; of more dims than kernels have loops there is none.
#[test]
fn outputs_listed_twice_and_too_many_dims() {
    let mut twice = model(&[node("Relu", &["x"], &["y"])]);
    let graph = twice.graph.as_mut().expect("a graph");
    graph.output.push(value("y", &[]));
    let imported = onnx(&Model::decode(Bytes::from(twice.encode_to_vec())).expect("a model"), &Options::default());
    assert_eq!(imported.expect("a graph").graph.outputs.len(), 1);
    let mut deep = model(&[node("Relu", &["x"], &["y"])]);
    deep.graph.as_mut().expect("a graph").input = vec![value("x", &std::array::from_fn::<_, 17, _>(|_| size(1)))];
    let error = expect![[r#"
        error[DCC0108]: a tensor of 17 dims; there may be 16
          at   input `x`"#]];
    check(&deep, error);
}
