"""Runs the node cases of the installed `onnx` package through `dcc eval`; prints `N of M` per operator and in all.

    python tests/conformance/run.py --dcc target/release/dcc [--only GLOB] [--slice N] [--refused FILE] [--least N] [--least-tiers SHARE]

A case passes where every output has the dtype, the shape and, within the case's own tolerance, the values of ONNX's reference;
halves within two units in their last place, because the reference rounds every intermediate and dcc only results. Otherwise it is
refused (an error message, exit code above 1), wrong, or broken (a panic, a signal, a minute); the latter two fail the run.
Cases that draw random numbers from NumPy's generator cannot be compared and count as `random`, not as passed. A refusal whose
message does not name an operator of the case fails the run too. The file of --refused lists each refusal with its message.

--slice takes N cases, the same each time: one of each operator, then of each in proportion to how many it has.
--least-tiers bounds the share that passes of the cases of operators that models are made of (TIERS), in numbers and bools of
the common widths.
"""

import argparse
import fnmatch
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_node_model_tests

SECONDS = 60
UNITS = {onnx.TensorProto.FLOAT16: 2.0**-10, onnx.TensorProto.BFLOAT16: 2.0**-7}
TIERS = set("""
    MatMul Gemm Conv ConvTranspose Einsum Add Sub Mul Div Pow Sqrt Reciprocal Neg Abs Exp Log Erf Tanh Sigmoid Relu Gelu Softplus Swish
    SwiGLU LeakyRelu Elu HardSigmoid HardSwish Clip Min Max Where Sin Cos LayerNormalization RMSNormalization GroupNormalization
    InstanceNormalization BatchNormalization Softmax LogSoftmax SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss Dropout Attention
    RotaryEmbedding MaxPool AveragePool GlobalAveragePool ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceSumSquare
    ReduceLogSumExp Gather GatherElements GatherND ScatterElements ScatterND CumSum Reshape Transpose Concat Split Slice Expand Unsqueeze
    Squeeze Flatten Pad Tile Trilu Identity Cast CastLike Constant ConstantOfShape Shape Size Range Equal Less LessOrEqual Greater
    GreaterOrEqual And Or Not IsNaN ArgMax OneHot
    LSTM GRU RNN Resize GridSample TopK LRN LpNormalization LpPool GlobalMaxPool GlobalLpPool CumProd ReduceL1 ReduceLogSum ReduceProd
    Celu Selu PRelu Mish Softsign ThresholdedRelu Shrink Round Floor Ceil Sign Mod IsInf Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh
    DepthToSpace SpaceToDepth Col2Im Sum Mean If Scan Loop ReverseSequence TensorScatter SplitToSequence SequenceAt
""".split())
NUMBERS = {"FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE", "BOOL"} | {f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)}
RANDOM = {f"test_training_dropout{kind}" for kind in ("", "_default", "_default_mask", "_mask")}
RANDOM |= {f"test_bernoulli{kind}{form}" for kind in ("", "_double", "_seed") for form in ("", "_expanded")}


def proto(value, info):
    """A TensorProto of an input, or None where it is no tensor."""
    if isinstance(value, onnx.TensorProto):
        return value
    if value is None or isinstance(value, (list, dict)) or not info.type.HasField("tensor_type"):
        return None
    return numpy_helper.from_array(np.asarray(value), info.name)


def operator(case, models):
    """What the case is of: its only node, or that of the case which it expands."""
    base = case.name.split("_expanded")[0]
    graph = models.get(base, case.model).graph
    kinds = [node.op_type for node in graph.node]
    return kinds[0] if len(set(kinds)) == 1 else next((k for k in kinds if k.lower() in base.replace("_", "")), kinds[-1])


def element_types(ty):
    """The element types in a type, in sequences and optional ones too."""
    kind = ty.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        return {onnx.TensorProto.DataType.Name(getattr(ty, kind).elem_type)}
    return element_types(getattr(ty, kind).elem_type) if kind in ("sequence_type", "optional_type") else {str(kind)}


def in_tiers(case, op):
    infos = [*case.model.graph.input, *case.model.graph.output]
    return op in TIERS and set().union(*(element_types(info.type) for info in infos)) <= NUMBERS


def names_operator(case, message):
    return any(node.op_type in message for node in case.model.graph.node)


def array(tensor):
    """The elements as numbers that compare: small floats widened."""
    value = tensor if isinstance(tensor, np.ndarray) else numpy_helper.to_array(tensor)
    return value.astype(np.float64) if value.dtype.kind not in "biuOSU" else value


def difference(case, got, wanted):
    if isinstance(wanted, (list, dict)) or wanted is None:
        return "the case wants no tensor"
    kind = wanted.data_type if isinstance(wanted, onnx.TensorProto) else onnx.helper.np_dtype_to_tensor_dtype(np.asarray(wanted).dtype)
    wanted = array(wanted if isinstance(wanted, onnx.TensorProto) else np.asarray(wanted))
    if got.data_type != kind:
        return f"dtype {onnx.TensorProto.DataType.Name(got.data_type)}, not {onnx.TensorProto.DataType.Name(kind)}"
    got = array(got)
    if got.shape != wanted.shape:
        return f"shape {got.shape}, not {wanted.shape}"
    rtol = max(case.rtol, 2 * UNITS.get(kind, 0))
    same = np.allclose(got, wanted, rtol=rtol, atol=case.atol, equal_nan=True) if wanted.dtype.kind == "f" else (got == wanted).all()
    if same:
        return None
    worst = np.nanargmax(np.abs(got.astype(np.float64) - wanted.astype(np.float64))) if wanted.size else 0
    return f"value {got.flat[worst]}, not {wanted.flat[worst]}"


def exact(case, inputs, wanted):
    """Zeros of the reference's inverse transform are rounding errors above the case's own tolerance: here it is computed in double."""
    if case.name not in ("test_dft_inverse", "test_dft_inverse_opset19"):
        return wanted
    result = np.fft.ifft(inputs[0].astype(np.float64).view(np.complex128)[..., 0], axis=1)
    return [np.stack([result.real, result.imag], -1).astype(np.float32)]


def run(case, dcc):
    """`passed`, `refused`, `wrong` or `broken`, and why."""
    if case.name in RANDOM:
        return "random", ""
    inputs, wanted = case.data_sets[0]
    graph = case.model.graph
    initial = {tensor.name for tensor in graph.initializer}
    infos = [info for info in graph.input if info.name not in initial]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "in").mkdir()
        (folder / "model.onnx").write_bytes(case.model.SerializeToString())
        for position, (value, info) in enumerate(zip(inputs, infos)):
            tensor = proto(value, info)
            if tensor is not None:
                (folder / "in" / f"input_{position}.pb").write_bytes(tensor.SerializeToString())
        command = [dcc, "eval", folder / "model.onnx", "--inputs", folder / "in", "--outputs", folder / "out", "--threads", "1"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "broken", f"no end after {SECONDS} s"
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if line.startswith("error")), lines[0] if lines else "")
        if done.returncode < 0 or done.returncode in (1, 101, 134) or "panicked" in done.stderr:
            return "broken", next((" ".join(lines[i : i + 2]) for i, line in enumerate(lines) if "panicked" in line), first)
        if done.returncode:
            place = " ".join(line.strip() for line in lines if line.strip().startswith(("at ", "note ")))
            return "refused", f"{first} {place}".replace(str(folder), "")
        for position, value in enumerate(exact(case, inputs, wanted)):
            got = onnx.TensorProto.FromString((folder / "out" / f"output_{position}.pb").read_bytes())
            why = difference(case, got, value)
            if why:
                return "wrong", f"output {position}: {why}"
    return "passed", ""


def sliced(cases, ops, count):
    """`count` of the cases, in their order; of one operator those that lie far apart first."""
    of_operator = {}
    for case in cases:
        of_operator.setdefault(ops[case.name], []).append(case.name)
    turns = {}
    for names in of_operator.values():
        apart = sorted(range(len(names)), key=lambda i: i * 0.6180339887498949 % 1)
        turns |= {names[i]: (turn > 0, turn / len(names), ops[names[i]]) for turn, i in enumerate(apart)}
    taken = set(sorted(turns, key=turns.get)[:count])
    return [case for case in cases if case.name in taken]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcc", default="target/release/dcc")
    parser.add_argument("--only", default="*", help="names of cases, or operators")
    parser.add_argument("--slice", type=int, help="take so many of them, spread over the operators")
    parser.add_argument("--refused", type=Path, help="list refusals in this file")
    parser.add_argument("--least", type=int, default=0, help="fail where fewer pass")
    parser.add_argument("--least-tiers", type=float, default=0, help="fail where a smaller share of the common cases passes")
    args = parser.parse_args()
    cases = sorted(load_node_model_tests(), key=lambda case: case.name)
    models = {case.name: case.model for case in cases}
    ops = {case.name: operator(case, models) for case in cases}
    cases = [case for case in cases if fnmatch.fnmatch(case.name, args.only) or fnmatch.fnmatch(ops[case.name], args.only)]
    if args.slice:
        cases = sliced(cases, ops, args.slice)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda case: run(case, args.dcc), cases))
    totals, passed, counts, refusals, common, unnamed = Counter(), Counter(), Counter(), [], [], 0
    for case, (verdict, why) in zip(cases, results):
        op = ops[case.name]
        totals[op] += 1
        passed[op] += verdict == "passed"
        counts[verdict] += 1
        if in_tiers(case, op):
            common.append(verdict)
            if verdict not in ("passed", "refused"):
                print(f"common, but {verdict}: {op} {case.name}")
        if verdict == "refused":
            refusals.append(f"{op} {case.name}: {why}")
            if not names_operator(case, why):
                unnamed += 1
                print(f"NAMES NO OPERATOR {op} {case.name}: {why}")
            elif in_tiers(case, op):
                print(f"common, but refused: {op} {case.name}: {why}")
        elif verdict not in ("passed", "random"):
            print(f"{verdict.upper()} {op} {case.name}: {why}")
    for op in sorted(totals):
        print(f"{op:32} {passed[op]:4} of {totals[op]:4}")
    base = [verdict for case, (verdict, _) in zip(cases, results) if "_expanded" not in case.name]
    print(f"{sum(passed.values())} of {len(cases)} ({base.count('passed')} of {len(base)} without expanded ones);", dict(counts))
    share = common.count("passed") / max(len(common), 1)
    print(f"{common.count('passed')} of {len(common)} common cases, {share:.2%}; {unnamed} refusals that name no operator")
    if args.refused:
        args.refused.write_text("".join(line + "\n" for line in sorted(refusals)))
    failed = counts["wrong"] + counts["broken"] + unnamed > 0
    sys.exit(failed or sum(passed.values()) < args.least or share < args.least_tiers)


main()
