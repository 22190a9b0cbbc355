"""Numbers for `tests/suite/ops/torch.rs`: results and gradients in PyTorch float64 where the meaning is subtle.

    python tests/golden/ops/torch.py > tests/golden/ops/torch.json      # torch 2.15

Each case: inputs by name, the result, and the gradient of sum(result * cos(0, 1, 2, ...)) for each float input.
"""

import json
import math

import torch
import torch.nn.functional as F

INF, NAN = math.inf, math.nan
CASES = {}


def values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encode(t):
    data = [x if math.isfinite(x) else str(x) for x in t.double().reshape(-1).tolist()]
    return {"shape": list(t.shape), "data": data, "dtype": {torch.int64: "i64", torch.bool: "bool"}.get(t.dtype, "f64")}


def case(name, function, **inputs):
    inputs = {k: v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=torch.float64) for k, v in inputs.items()}
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    result = function(**leaves)
    weights = torch.arange(result.numel(), dtype=torch.float64).cos().reshape(result.shape)
    (result * weights).sum().backward()
    gradients = {k: encode(v.grad) for k, v in leaves.items() if v.grad is not None}
    inputs = {k: encode(v) for k, v in inputs.items()}
    CASES[name] = {"inputs": inputs, "result": encode(result.detach()), "gradients": gradients}


def attention(q, k, v, mask=None, causal=False, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


q, k, v = values(1, 2, 3, 5, 4), values(2, 2, 3, 5, 4), values(3, 2, 3, 5, 2)
case("attention", attention, q=q, k=k, v=v)
case("attention_causal", lambda q, k, v: attention(q, k, v, causal=True, scale=0.3), q=q, k=k, v=v)
case("attention_longer_keys_causal", lambda q, k, v: attention(q, k, v, causal=True), q=q[:, :, :3], k=k, v=v)
keep = values(4, 2, 1, 5, 5) > -0.5
keep[..., 0] = True
case("attention_boolean", lambda q, k, v: attention(q, k, v, mask=keep), q=q, k=k, v=v)
CASES["attention_boolean"]["inputs"]["mask"] = encode(keep.reshape(2, 5, 5))
additive = values(5, 5, 5).masked_fill(values(6, 5, 5) > 1.0, -INF)
case("attention_additive", lambda q, k, v: attention(q, k, v, mask=additive), q=q, k=k, v=v)
CASES["attention_additive"]["inputs"]["mask"] = encode(additive)

case("gelu", lambda x: F.gelu(x), x=[-30.0, -3.0, -1e-3, 0.0, 1e-9, 0.5, 2.0, 30.0])
case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), x=[-30.0, -3.0, -1e-3, 0.0, 1e-9, 0.5, 2.0, 30.0])
case("logsumexp", lambda x: torch.logsumexp(x, 1), x=[[1e3, 1e3 + 1.0, -5.0], [-1e3, -1e3, -INF], [0.1, 0.2, 0.3]])
case("softmax", lambda x: F.softmax(x, 1), x=[[1e3, 1e3 + 1.0, -5.0], [-1e3, -1e3, -INF], [0.1, 0.2, 0.3]])
case("amax_ties", lambda x: x.amax(1), x=[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, -2.0]])
case("amin_ties", lambda x: x.amin((0, 1)), x=[[1.0, 3.0, 3.0], [2.0, 1.0, 2.0]])
case("maximum_ties", torch.maximum, input=[1.0, 2.0, 3.0, NAN], other=[1.0, 3.0, 2.0, 0.0])
case("minimum_ties", torch.minimum, input=[1.0, 2.0, 3.0, 0.0], other=[1.0, 3.0, 2.0, NAN])
case("abs", torch.abs, input=[-2.0, 0.0, -0.0, 3.0])
case("prod_zeros", lambda x: x.prod(1), x=[[2.0, 3.0, 4.0], [2.0, 0.0, 4.0], [0.0, 0.0, 4.0]])
case("pow", torch.pow, input=[0.0, 2.0, 0.0, 1.5, 0.0], exponent=[2.0, 3.0, 0.0, -0.5, 1.0])
case("pow_constant", lambda x: x.pow(2.0) + x.pow(3.0) + x.pow(1.0) + x.pow(0.0), x=[-2.0, 0.0, 1.5])
case("fmod", torch.fmod, input=[5.5, -5.5, 5.5, -5.5, 1.0], other=[2.0, 2.0, -2.0, -2.0, 3.0])
case("round", torch.round, input=[-2.5, -1.5, -0.5, 0.5, 1.5, 2.4])
case("erf", torch.erf, input=[-6.5, -3.0, -0.9, -1e-12, 0.0, 0.3, 1.0, 2.5, 5.9])
case("logistic", torch.sigmoid, input=[-800.0, -40.0, -1.0, 0.0, 1.0, 40.0, 800.0])
case("rsqrt", torch.rsqrt, input=[1e-12, 0.25, 1e12])
case("cumsum_reversed", lambda x: x.flip(1).cumsum(1).flip(1), x=values(7, 2, 4))
case("top_k", lambda x: x.topk(3, 1).values, x=values(13, 4, 9))
ordered = [[NAN, 1.0, INF, -0.0, 1.0, -INF, NAN, 0.0], [2.0, -0.0, NAN, 2.0, 0.0, -1.0, -0.0, 2.0]]
case("sort_descending", lambda x: x.sort(dim=1, descending=True, stable=True).values, x=ordered)
case("sort_ascending", lambda x: x.sort(dim=1, stable=True).values, x=ordered)
case("embedding", lambda w: F.embedding(torch.tensor([[1, 3, 1], [0, 4, 1]]), w), w=values(8, 5, 3))
case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-5), x=values(9, 3, 4), w=values(10, 4), b=values(11, 4))
labels = torch.tensor([0, -100, 3, 1])
case("cross_entropy", lambda x: F.cross_entropy(x, labels, ignore_index=-100), x=values(12, 4, 5) * 10)
CASES["cross_entropy"]["inputs"]["labels"] = encode(labels)

if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(body)}" for name, body in CASES.items()]
    print("{\n" + ",\n".join(lines) + "\n}")
