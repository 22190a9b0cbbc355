"""Pre-trained models that PyPI packages carry: each through `dcc eval`, against onnxruntime, and through `dcc run`.

    python tests/pretrained/run.py --dcc target/release/dcc [--only NAME] [--wheels FOLDER] [--least N]

Needs pip with a network (wheels stay in FOLDER, by default a temporary one), onnx and onnxruntime. A model passes where all
outputs lie within 1e-4 (absolute and relative) of onnxruntime's on random inputs, and where training the first float output towards
random targets lowers the loss. It is refused where dcc names what it does not support; anything else fails the run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

TOLERANCE, STEPS = 1e-4, 8
SYMBOLIC = 48  # of what a case does not name: at least one window, an even number of halvings


def letters(height=64, width=96):
    """Strokes in a row, dark on white: elsewhere a detector of text is saturated, and has no gradient to follow."""
    image, rng = np.ones((1, 3, height, width), np.float32), np.random.default_rng(7)
    for left in range(10, width - 16, 11):
        image[:, :, height // 2 - 10 : height // 2 + 10, left : left + 6] -= 2 * np.kron(rng.choice([0, 1], (5, 3)), np.ones((4, 2)))
    return image


class Case:
    """A file of a package; shapes and values of inputs that the file leaves open, and those that are one for the whole run."""

    def __init__(self, name, package, file, shapes={}, high=2, rate=1e-4, fixed={}, held=()):
        self.name, self.package, self.file, self.shapes = name, package, file, shapes
        self.high, self.rate, self.fixed, self.held = high, rate, fixed, held


SPEECH = dict(fixed={"sr": np.array(16000)}, held=("sr",))
CASES = [
    Case("basic-pitch", "basic-pitch", "nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)}),
    Case("captcha-recognizer", "captcha-recognizer", "slider.onnx"),
    Case("ddddocr", "ddddocr", "common.onnx", {"input1": (1, 1, 64, 96)}),
    Case("ddddocr detection", "ddddocr", "common_det.onnx"),
    Case("ddddocr quantized", "ddddocr", "common_old.onnx", {"input1": (1, 1, 64, 96)}),
    Case("magika", "magika", "model.onnx", {"bytes": (2, 2048)}, high=257),
    Case("onnx-asr features", "onnx-asr", "gigaam_v3_conv.onnx", {"waveforms": (2, 4000), "waveforms_lens": (2,)}, high=4000, rate=1e-6),
    Case("onnx-asr resampler", "onnx-asr", "resample_16_8.onnx", {"waveforms": (2, 4000), "waveforms_lens": (2,)}, high=4000),
    Case("piper-tts tashkeel", "piper-tts", "tashkeel/model.onnx", {"char_inputs": (2, 12), "diac_inputs": (2, 12), "input_lengths": (2,)},
         fixed={"input_lengths": np.array([12, 9])}),
    Case("piper-tts nakdimon", "piper-tts", "nakdimon.onnx", {"input_1": (2, 12)}, high=40),
    Case("rapidocr detection", "rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", fixed={"x": "letters"}),
    Case("rapidocr recognition", "rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 64)}),
    Case("rapidocr direction", "rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (2, 3, 48, 96)}),
    Case("silero-vad", "silero-vad", "silero_vad.onnx", {"input": (2, 576), "state": (2, 2, 128)}, **SPEECH),
    Case("silero-vad sequence", "silero-vad", "silero_vad_16k_sequence.onnx", {"input": (3, 576)}),
    Case("silero-vad opset 15", "silero-vad", "silero_vad_16k_op15.onnx", {"input": (2, 576), "state": (2, 2, 128)}, **SPEECH),
    Case("silero-vad without If", "silero-vad", "silero_vad_op18_ifless.onnx", {"input": (2, 576), "state": (2, 2, 128)}, **SPEECH),
]


def model_of(case, wheels, folder):
    """The file out of the package's wheel."""
    prefix = case.package.replace("-", "_")
    if not any(wheels.glob(f"{prefix}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", wheels, case.package]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(wheels.glob(f"{prefix}-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/" + case.file))
        path = folder / "model.onnx"
        path.write_bytes(wheel.read(name))
    return path


def inputs_of(case, path):
    rng = np.random.default_rng(7)
    graph = onnx.load(path).graph
    initial = {tensor.name for tensor in graph.initializer}
    inputs = {}
    for info in graph.input:
        if info.name in initial:
            continue
        kind = info.type.tensor_type
        shape = case.shapes.get(info.name) or [d.dim_value or SYMBOLIC for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if info.name in case.fixed:
            fixed = case.fixed[info.name]
            inputs[info.name] = (letters() if isinstance(fixed, str) else fixed).astype(dtype)
        elif dtype.kind == "f":
            whole = case.high > 2
            value = rng.integers(0, case.high, shape) if whole and len(shape) == 2 and "wave" not in info.name else rng.uniform(0, 1, shape)
            inputs[info.name] = value.astype(dtype)
        else:
            inputs[info.name] = rng.integers(1, case.high, shape).astype(dtype)
    return inputs


def call(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    error = next((i for i, line in enumerate(lines) if line.startswith("error")), None)
    return done.returncode, done.stdout, " ".join(line.strip() for line in lines[error : error + 2]) if error is not None else ""


def forward(case, dcc, path, folder, inputs, wanted):
    """The largest difference in units of the tolerance, or a refusal."""
    np.savez(folder / "inputs.npz", **inputs)
    code, _, why = call([dcc, "eval", path, "--inputs", folder / "inputs.npz", "--outputs", folder / "outputs.npz"])
    if code:
        return code, f"forward: {why or code}"
    found = np.load(folder / "outputs.npz")
    worst = 0.0
    for name, value in wanted.items():
        got = found[name]
        if got.shape != value.shape or got.dtype != value.dtype:
            return 1, f"`{name}` is {got.dtype}{got.shape}, not {value.dtype}{value.shape}"
        if value.dtype.kind == "f":
            error = np.abs(got.astype(np.float64) - value) / (TOLERANCE * (1 + np.abs(value)))
            worst = max(worst, float(error.max(initial=0)))
        elif (got != value).any():
            return 1, f"`{name}` differs in {np.count_nonzero(got != value)} of {value.size} integers"
    return (0, worst) if worst <= 1 else (1, f"{worst:.2f} times the tolerance away from onnxruntime")


def train(case, dcc, path, folder, inputs, wanted):
    """First and last loss of a few steps towards random targets, or a refusal."""
    output = next(name for name, value in wanted.items() if value.dtype.kind == "f")
    target = np.random.default_rng(8).uniform(0, 1, wanted[output].shape).astype(np.float32)
    arrays = {name: np.stack([value] * STEPS) for name, value in {**inputs, "target": target}.items()}
    held = {name: arrays.pop(name)[0] for name in case.held}
    np.savez(folder / "data.npz", **arrays)
    metrics = folder / "metrics.jsonl"
    command = [dcc, "run", path, "--data", folder / "data.npz", "--layout", "steps", "--order", "sequential", "--steps", STEPS, "--loss", "mse",
               "--output", output, "--lr", case.rate, "--batch-norm", "frozen", "--metrics-file", metrics]
    for name, value in held.items():
        np.save(folder / f"{name}.npy", value)
        command += ["--input", f"{name}=@{folder / name}.npy"]
    code, _, why = call(command)
    if code:
        return code, f"training: {why or code}"
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    if len(losses) == STEPS and losses[-1] < losses[0]:
        return 0, f"loss {losses[0]:.6f} → {losses[-1]:.6f}"
    return 1, f"losses {losses}"


def check(case, dcc, wheels):
    """`passed`, `refused` or `wrong`, and a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path = model_of(case, wheels, folder)
        inputs = inputs_of(case, path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        wanted = dict(zip(names, session.run(names, inputs)))
        code, worst = forward(case, dcc, path, folder, inputs, wanted)
        if not code:
            code, line = train(case, dcc, path, folder, inputs, wanted)
            if not code:
                return "passed", f"forward {worst:.1e} × 1e-4, {line}"
            worst = line
        return "wrong" if code in (1, 101) or code < 0 else "refused", worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcc", default="target/release/dcc")
    parser.add_argument("--only", default="")
    parser.add_argument("--wheels", type=Path, help="keep downloads here")
    parser.add_argument("--least", type=int, default=5, help="fail where fewer pass")
    args = parser.parse_args()
    verdicts = []
    with tempfile.TemporaryDirectory() as scratch:
        wheels = args.wheels or Path(scratch)
        wheels.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            if args.only in case.name:
                verdict, line = check(case, args.dcc, wheels)
                verdicts.append(verdict)
                print(f"{verdict:8} {case.name:24} {line}", flush=True)
    passed = verdicts.count("passed")
    print(f"{passed} of {len(verdicts)} pre-trained files pass, {verdicts.count('refused')} refused, {verdicts.count('wrong')} wrong")
    sys.exit(passed < min(args.least, len(verdicts)) or "wrong" in verdicts)


main()
