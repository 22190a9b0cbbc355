"""Exports the committed ONNX graphs from PyTorch and strips their weights.

Each graph keeps every initializer's name, dtype and shape; parameters point into `weights.bin`, which is not there, so that
`--init SEED` or `--weights` must fill them. Buffers and constants (and, in optimized exports,
what the exporter computed from parameters) stay inline. Stack traces and class names are dropped from the metadata, all
metadata and value infos from the many graphs of `attention/`. Before it is written, every graph (but those with dropout and
the 124 M one) is filled by the init formula, run by onnxruntime (or the ONNX reference evaluator) and compared with PyTorch.

    python samples/export.py [NAME ...]      # all graphs, or the named ones; --ops prints the operators of each
"""

import contextlib
import io
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch

import families
import init
import models

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(vocab=31, length=8, width=16, layers=1, heads=2)
GPT = dict(vocab=256, length=128, width=256, layers=8, heads=4)
LLAMA = dict(vocab=256, length=128, width=256, layers=6, heads=8, kv_heads=4)


def graphs():
    """{file under the repository root: (make module and inputs, export options)}"""
    tests = {
        "mlp": (models.mlp, {}),
        "mlp_optimized": (models.mlp, dict(optimize=True)),
        "mlp_legacy": (models.mlp, dict(dynamo=False, opset=17)),
        "mlp_legacy_dropout": (partial(models.mlp, dropout=0.1), dict(dynamo=False, opset=17)),
        "norm_mlp": (models.norm_mlp, dict(compare=False)),
        "norm_mlp_legacy": (models.norm_mlp, dict(dynamo=False, opset=17, compare=False)),
        "lstm": (partial(models.recurrent, "LSTM", num_layers=2), {}),
        "lstm_legacy": (partial(models.recurrent, "LSTM", bidirectional=True), dict(dynamo=False, opset=17)),
        "gru_legacy": (partial(models.recurrent, "GRU", bidirectional=True), dict(dynamo=False, opset=17)),
        "families/gru": (partial(models.recurrent, "GRU", num_layers=2), dict(bare=True)),
        "gru_optimized": (partial(models.recurrent, "GRU"), dict(optimize=True)),
        "families/static_lstm": (partial(models.recurrent, "LSTM", batch=8, num_layers=2, bidirectional=True),
                        dict(static=True, optimize=True)),
        "cnn": (models.cnn, {}),
        "cnn_legacy": (models.cnn, dict(dynamo=False, opset=13)),
        "two_inputs": (models.two_inputs, dict(outputs=("prediction", "side"), unbatched=("basis",))),
        "gpt2_tiny": (models.gpt2, dict(opset=23)),
        "gpt2_tiny_opset20": (models.gpt2, {}),
        "gpt2_tiny_opset18": (models.gpt2, dict(opset=18)),
        "gpt2_tiny_optimized": (models.gpt2, dict(opset=23, optimize=True)),
        "gpt2_tiny_mask": (partial(models.with_mask, models.gpt2), dict(opset=23)),
        "gpt2_tiny_legacy": (partial(models.with_mask, models.gpt2), dict(opset=17, dynamo=False)),
        "gpt2_tiny_dropout": (partial(models.gpt2, dropout=0.1), {}),
        "gpt2_tiny_shuffled": (models.gpt2, dict(opset=23, bare=True, shuffle=True)),
        "gpt2_50257": (partial(models.gpt2, vocab=50257, width=256), dict(opset=23)),
        "static_gpt": (partial(models.gpt2, batch=8), dict(opset=23, static=True)),
        "static_mixer": (models.mixer, dict(static=True, bare=True)),
        "static_bert_classifier": (models.bert_classifier, dict(static=True, bare=True)),
        "static_neox": (models.neox, dict(static=True)),
        "gpt2_124m": (partial(models.gpt2, vocab=50257, length=1024, width=768, layers=12, heads=12, batch=2),
                      dict(opset=23, compare=False)),
        "llama_tiny": (models.llama, dict(opset=23)),
        "llama_tiny_opset20": (models.llama, {}),
        "llama_tiny_optimized": (models.llama, dict(opset=23, optimize=True)),
        "bert_tiny": (models.bert, dict(opset=23)),
        "bert_tiny_opset20": (models.bert, {}),
        "families/bert_tiny_legacy": (models.bert, dict(dynamo=False, opset=17, bare=True)),
    }
    tests["mlp_sce_legacy"] = (partial(models.mlp, loss="sce"), dict(dynamo=False, opset=17, outputs=("loss",)))
    for loss in ("sce", "nll"):
        tests[f"mlp_{loss}"] = (partial(models.mlp, loss=loss), dict(outputs=("loss",)))
    return {
        "samples/mlp/model.onnx": (partial(models.mlp, (64, 1024, 1024, 10)), {}),
        "samples/gpt/model.onnx": (partial(models.gpt2, **GPT), dict(opset=23)),
        "samples/llama/model.onnx": (partial(models.llama, **LLAMA), dict(opset=23)),
        "samples/resnet/model.onnx": (models.resnet, dict(compare=False)),
        "samples/lstm/model.onnx": (partial(models.recurrent, "LSTM", width=128, num_layers=2), {}),
    } | {f"tests/models/{name}.onnx": case for name, case in (tests | attention_graphs() | family_graphs()).items()}


def family_graphs():
    """A small model of each family, by the exporters that take it."""
    tests = {"families/llama_tiny_opset18": (models.llama, dict(opset=18, bare=True))}
    trained, legacy = dict(bare=True, compare=False), dict(dynamo=False, opset=17)
    for name in ("resnet", "mobilenet", "efficientnet", "unet"):
        tests[f"families/{name}"] = (getattr(families, name), trained)
    for name in ("convnext", "vit", "swin", "autoencoder", "moe", "gshard", "dlrm"):
        tests[f"families/{name}"] = (getattr(families, name), dict(bare=True))
    tests["families/your_model"] = (your_model, dict(opset=23, bare=True, compare=False))
    tests["families/two_towers"] = (families.two_towers, {})  # what trains, `scale` among them, is in the metadata
    tests["families/resnet_optimized"] = (families.resnet, dict(optimize=True, compare=False))
    for name in ("resnet", "mobilenet", "efficientnet", "unet"):
        tests[f"families/{name}_legacy"] = (getattr(families, name), trained | legacy)
    # The dynamo exporter fails at the reshape after its other attention.
    tests["families/t5"] = (partial(families.t5, attn_implementation="eager"), dict(bare=True))
    tests["families/vit_legacy"] = (families.vit, dict(bare=True, static=True) | legacy)
    for name in ("convnext", "swin", "autoencoder", "moe", "gshard", "dlrm", "two_towers", "t5"):
        tests[f"families/{name}_legacy"] = (getattr(families, name), dict(bare=True) | legacy)
    return tests


def your_model():
    """The module of docs/your-model.md."""
    text = (ROOT / "docs/your-model.md").read_text()
    scope = {"__name__": "model"}
    exec(text.split("```python\n", 1)[1].split("```", 1)[0], scope)
    return scope["Net"]().train(), {"image": torch.randn(2, 1, 8, 8)}


def attention_graphs():
    """One layer of each family by each exporter, opset and attention implementation that it can be exported with."""
    tests = {}
    for family in ("gpt2", "llama", "bert"):
        for kind in ("sdpa", "eager"):
            make = partial(getattr(models, family), attention=kind, **TINY | ({"kv_heads": 1} if family == "llama" else {}))
            masked = make if family == "bert" else partial(models.with_mask, make)
            for opset in (18, 20, 21, 23):
                tests[f"attention/{family}_{kind}_dynamo{opset}"] = (make, dict(opset=opset, bare=True))
            for opset in (17, 20):
                tests[f"attention/{family}_{kind}_legacy{opset}"] = (masked, dict(opset=opset, dynamo=False, bare=True))
    for sdpa in (True, False):
        for dynamo, opset in ((True, 18), (True, 23), (False, 17), (False, 20)):
            name = f"attention/nanogpt_{'sdpa' if sdpa else 'eager'}_{'dynamo' if dynamo else 'legacy'}{opset}"
            tests[name] = (partial(models.nanogpt, sdpa), dict(opset=opset, dynamo=dynamo, bare=True))
    return tests


def export(module, inputs, opset=20, dynamo=True, optimize=False, static=False, outputs=("logits",), unbatched=()):
    """The ONNX model as the exporter writes it, weights inside (dynamo) or as initializers (legacy)."""
    batched = [] if static else [name for name in inputs if name not in unbatched]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        if dynamo:
            batch = torch.export.Dim("batch")
            shapes = {name: {0: batch} if name in batched else None for name in inputs}
            torch.onnx.export(module, (), path, kwargs=inputs, dynamo=True, optimize=optimize, opset_version=opset,
                              output_names=list(outputs), dynamic_shapes=None if static else shapes, external_data=True,
                              verbose=False)
        else:
            torch.onnx.export(module, tuple(inputs.values()), path, dynamo=False,
                              opset_version=opset, do_constant_folding=False, training=torch.onnx.TrainingMode.TRAINING,
                              input_names=list(inputs), output_names=list(outputs),
                              dynamic_axes={name: {0: "batch"} for name in [*batched, *outputs] if name != "loss"})
        return onnx.load(path)


def clean(model, bare):
    """Drops what names machines or repeats the source: stack traces, class names, doc strings."""
    if bare:
        del model.graph.value_info[:]
    keep = lambda entry: not entry.key.endswith(("stack_trace", "class_hierarchy", "namespace"))
    for item in [model, model.graph, *model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output,
                 *model.graph.initializer]:
        item.ClearField("doc_string")
        kept = [(e.key, e.value) for e in item.metadata_props if keep(e)]
        del item.metadata_props[:]
        for key, text in [] if bare else kept:
            item.metadata_props.add(key=key, value=text)


def strip(model, names):
    """Replaces the data of the named initializers (float32) by references to an absent weights.bin."""
    offset = 0
    for t in model.graph.initializer:
        if t.name not in names:
            continue
        length = 4 * int(np.prod(t.dims))
        t.ClearField("raw_data")
        t.ClearField("float_data")
        del t.external_data[:]
        t.data_location = onnx.TensorProto.EXTERNAL
        for key, text in (("location", "weights.bin"), ("offset", offset), ("length", length)):
            t.external_data.add(key=key, value=str(text))
        offset += -(-length // 64) * 64


def shuffle(model, parameters):
    """Renames every node, value and parameter, and puts the nodes into a random topological order; returns the renamed
    parameters. Inputs and outputs of the graph keep their names."""
    rng, graph, fixed = random.Random(1), model.graph, {v.name for v in [*model.graph.input, *model.graph.output]} | {""}
    values = [t.name for t in graph.initializer] + [o for n in graph.node for o in n.output if o not in fixed]
    new = dict(zip(values, (f"t{i}" for i in rng.sample(range(len(values)), len(values)))))
    waiting, done, order = list(graph.node), fixed | {t.name for t in graph.initializer}, []
    while waiting:
        ready = [i for i, n in enumerate(waiting) if all(x in done for x in n.input)]
        node = waiting.pop(rng.choice(ready))
        done |= set(node.output)
        order.append(node)
    order = [onnx.NodeProto.FromString(n.SerializeToString()) for n in order]
    for i, node in enumerate(order):
        node.name = f"n{i}"
        node.input[:] = [new.get(x, x) for x in node.input]
        node.output[:] = [new.get(x, x) for x in node.output]
    del graph.node[:]
    graph.node.extend(order)
    for t in graph.initializer:
        t.name = new[t.name]
    tensors = sorted(graph.initializer, key=lambda t: int(t.name[1:]))
    tensors = [onnx.TensorProto.FromString(t.SerializeToString()) for t in tensors]
    del graph.initializer[:]
    graph.initializer.extend(tensors)
    return {new[name]: target for name, target in parameters.items()}


def parameter_of(model, module):
    """{initializer: (torch name, transposed)}: by name, else (folded or anonymous weights) by equal values."""
    state = {n: p.detach().numpy() for n, p in module.named_parameters(remove_duplicate=False)}
    found = {}
    for t in model.graph.initializer:
        if t.name in state:
            found[t.name] = (t.name, False)
        elif t.data_type == onnx.TensorProto.FLOAT and t.dims:
            array = onnx.numpy_helper.to_array(t)
            same = [(n, turned) for n, p in state.items() for turned in (False, True)
                    if np.array_equal(p.T if turned else p, array)]
            found |= {t.name: same[0]} if same else {}
    return found


def forward(model, inputs):
    """Outputs by onnxruntime, or by the ONNX reference evaluator where onnxruntime lacks a kernel."""
    feed = {i.name: inputs[i.name].numpy() for i in model.graph.input}
    try:
        import onnxruntime
        onnxruntime.set_default_logger_severity(4)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed), "onnxruntime"
    except Exception:
        from onnx.reference import ReferenceEvaluator
        return ReferenceEvaluator(model).run(None, feed), "reference"


def compare(model, module, inputs, names):
    """Largest difference between the filled graph and PyTorch with the same weights, relative to the largest output."""
    values = init.model_values(model, 7)
    filled = onnx.ModelProto()
    filled.CopyFrom(model)
    init.fill_onnx(filled, values)
    init.fill_torch(module, values, names)
    with torch.no_grad():
        out = module(**inputs)
    expected = [out.logits] if hasattr(out, "logits") else list(out) if isinstance(out, tuple) else [out]
    got, by = forward(filled, inputs)
    return max(float(np.abs(g - e.numpy()).max() / np.abs(e.numpy()).max()) for g, e in zip(got, expected)), by


def make(path, build, options):
    """Exports, strips, checks and writes one graph; returns the model and a line of report."""
    torch.manual_seed(1)
    options = dict(options)
    check, bare, mix = (options.pop(name, default) for name, default in (("compare", True), ("bare", False), ("shuffle", False)))
    module, inputs = build()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model = export(module, inputs, **options)
    onnx.checker.check_model(model, full_check=True)
    clean(model, bare)
    names = parameter_of(model, module)
    names = shuffle(model, names) if mix else names
    strip(model, names)
    report = f"{len(model.graph.node)} nodes, {len(names)} parameters"
    if check and not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in module.modules()):
        error, by = compare(model, module, inputs, names)
        report += f", {error:.1e} from torch by {by}"
        assert error < 1e-4, report
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return model, f"{report}, {path.stat().st_size // 1000} kB"


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    wanted, show_ops = [a for a in sys.argv[1:] if a != "--ops"], "--ops" in sys.argv
    for file, (build, options) in graphs().items():
        if wanted and not any(w in (file, Path(file).stem, str(Path(file).with_suffix(""))) for w in wanted):
            continue
        try:
            model, report = make(ROOT / file, build, options)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            print(f"{file}: NOT EXPORTED: {type(error).__name__}: {lines[0][:150]}")
            continue
        print(f"{file}: opset {model.opset_import[0].version}, {report}", flush=True)
        if show_ops:
            ops = Counter(f"{n.domain + '.' if n.domain else ''}{n.op_type}" for n in model.graph.node)
            print("   ", ", ".join(f"{op} {count}" for op, count in sorted(ops.items())))


if __name__ == "__main__":
    main()
