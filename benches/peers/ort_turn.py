"""onnxruntime-training's turn, and the artifacts that it needs, made once for each case.

    python ort_turn.py --artifacts FOLDER CASE      writes FOLDER/ort, with refused.txt where the trainer refuses the model

The package's `__init__` imports torch for its ORTModule. The offline artifacts and their API need none of it: the parts are imported
one by one.
"""

import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime

_package = types.ModuleType("onnxruntime.training")
_package.__path__ = [str(Path(onnxruntime.__file__).parent / "training")]
sys.modules["onnxruntime.training"] = _package

from onnxruntime.training import api

import cases
import stored
import turn


def artifacts(folder):
    import onnx
    from onnxruntime.training import artifacts, onnxblock

    class Loss(onnxblock.Block):
        """Cross-entropy of logits whose last dim counts classes; its `labels` are flat."""

        def build(self, logits):
            graph = self.base.graph
            shape = next(o for o in graph.output if o.name == logits).type.tensor_type.shape.dim
            rows = int(np.prod([d.dim_value for d in shape[:-1]]))
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([rows, shape[-1].dim_value]), "loss.shape"))
            graph.input.append(onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, [rows]))
            node = onnx.helper.make_node
            graph.node.append(node("Reshape", [logits, "loss.shape"], ["loss.logits"]))
            graph.node.append(node("SoftmaxCrossEntropyLoss", ["loss.logits", "labels"], ["loss", "loss.log_prob"],
                                   ignore_index=cases.IGNORED))
            return "loss"

    model, values = onnx.load(folder / "ort.onnx", load_external_data=False), stored.weights(folder)
    for t in model.graph.initializer:
        if t.name in values:
            t.CopyFrom(onnx.numpy_helper.from_array(np.array(values[t.name]), t.name))
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":  # its gradient reads mean and deviation
            node.output.extend(f"{node.output[0]}.{name}" for name in ("mean", "inv_std")[len(node.output) - 1:])
    out = folder / "ort"
    a = cases.ADAMW
    adamw = onnxblock.optim.AdamW(betas=(a["beta1"], a["beta2"]), eps=a["eps"], weight_decay=a["weight_decay"])
    artifacts.generate_artifacts(model, requires_grad=list(values), loss=Loss(), optimizer=adamw, artifact_directory=out)
    optimizer = onnx.load(out / "optimizer_model.onnx")
    for attribute in optimizer.graph.node[0].attribute:
        if attribute.name == "adam_mode":
            attribute.i = 0  # PyTorch's formula
    onnx.save(optimizer, out / "optimizer_model.onnx")


def set_up(o):
    out = Path(o["folder"]) / "ort"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = o["threads"]
    state = api.CheckpointState.load_checkpoint(str(out / "checkpoint"))
    module = api.Module(str(out / "training_model.onnx"), state, session_options=options)
    optimizer = api.Optimizer(str(out / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(o["case"].rate)
    names = module.input_names()

    def step(batch):
        feed = batch | {"labels": batch["labels"].ravel()}
        loss = module(*(feed[name] for name in names))
        optimizer.step()
        module.lazy_reset_grad()
        return float(loss)

    return step


def refusal(folder, case):
    """Makes the artifacts and tries a step. The trainer's message where it cannot train the model; other exceptions pass."""
    try:
        artifacts(folder)
        set_up({"folder": folder, "case": case, "threads": 1})(stored.batches(folder)[0])
    except Exception as error:
        if not (isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime")):
            raise
        return f"{type(error).__name__}: {error}".strip()


def main():
    onnxruntime.set_default_logger_severity(3)
    if sys.argv[1] == "--artifacts":
        folder, case = Path(sys.argv[2]), cases.CASES[sys.argv[3]]
        note = folder / "ort/refused.txt"
        note.parent.mkdir(exist_ok=True)
        note.unlink(missing_ok=True)
        if message := refusal(folder, case):
            note.write_text(message)
        return
    o = turn.options()
    turn.run(o, lambda: set_up(o), {"onnxruntime-training": onnxruntime.__version__})


if __name__ == "__main__":
    main()
