"""The cases in jax.numpy: `p` maps the names of the ONNX graph to arrays, of which `arranged` has turned linear weights into
[in, out] and convolutions into HWIO. Each function gives logits."""

import jax
import jax.numpy as jnp
from jax import lax


def arranged(case, values):
    """{name: array as these models want it} of {name: array as PyTorch has it}."""
    turned = {}
    for name, array in values.items():
        is_table = "embed" in name or name.endswith(("wte.weight", "wpe.weight"))
        if array.ndim == 4:
            turned[name] = array.transpose(2, 3, 1, 0)
        elif array.ndim == 2 and not is_table and case.family != "gpt" and "decoder" not in name:
            turned[name] = array.T
        else:
            turned[name] = array
    return turned


def linear(p, name, x):
    return x @ p[name + ".weight"] + p[name + ".bias"]


def layer_norm(p, name, x, eps):
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + eps) * p[name + ".weight"] + p[name + ".bias"]


def heads(x, count):
    return x.reshape(*x.shape[:-1], count, -1)


def attention(q, k, v, **kw):
    """Of [batch, length, heads, size]."""
    y = jax.nn.dot_product_attention(q, k, v, **kw)
    return y.reshape(*y.shape[:2], -1)


def mlp(p, c, image):
    x, last = image, len(c["widths"]) - 2
    for i in range(last):
        x = jax.nn.relu(linear(p, f"fc.{i}", x))
    return linear(p, f"fc.{last}", x)


def gpt(p, c, input_ids):
    x = p["lm_head.weight"][input_ids] + p["transformer.wpe.weight"][:input_ids.shape[1]]
    for i in range(c["layers"]):
        h = f"transformer.h.{i}."
        qkv = linear(p, h + "attn.c_attn", layer_norm(p, h + "ln_1", x, 1e-5))
        q, k, v = (heads(y, c["heads"]) for y in jnp.split(qkv, 3, -1))
        x = x + linear(p, h + "attn.c_proj", attention(q, k, v, is_causal=True))
        y = jax.nn.gelu(linear(p, h + "mlp.c_fc", layer_norm(p, h + "ln_2", x, 1e-5)), approximate=True)
        x = x + linear(p, h + "mlp.c_proj", y)
    return layer_norm(p, "transformer.ln_f", x, 1e-5) @ p["lm_head.weight"].T


def rms_norm(x, gain):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def rotated(x):
    """Rotary positions (Su et al. 2021) of [batch, length, heads, size], halves apart."""
    size = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama(p, c, input_ids):
    x = p["model.embed_tokens.weight"][input_ids]
    for i in range(c["layers"]):
        h = f"model.layers.{i}."
        y = rms_norm(x, p[h + "input_layernorm.weight"])
        q, k, v = (heads(y @ p[h + f"self_attn.{n}_proj.weight"], c[count]) for n, count in
                   (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")))
        x = x + attention(rotated(q), rotated(k), v, is_causal=True) @ p[h + "self_attn.o_proj.weight"]
        y = rms_norm(x, p[h + "post_attention_layernorm.weight"])
        y = jax.nn.silu(y @ p[h + "mlp.gate_proj.weight"]) * (y @ p[h + "mlp.up_proj.weight"])
        x = x + y @ p[h + "mlp.down_proj.weight"]
    return rms_norm(x, p["model.norm.weight"]) @ p["lm_head.weight"]


def bert(p, c, input_ids, attention_mask, token_type_ids):
    e = "bert.embeddings."
    x = p["cls.predictions.decoder.weight"][input_ids] + p[e + "token_type_embeddings.weight"][token_type_ids]
    x = layer_norm(p, e + "LayerNorm", x + p[e + "position_embeddings.weight"], 1e-12)
    mask = attention_mask[:, None, None, :] != 0
    for i in range(c["layers"]):
        h = f"bert.encoder.layer.{i}."
        q, k, v = (heads(linear(p, h + "attention.self." + n, x), c["heads"]) for n in ("query", "key", "value"))
        y = linear(p, h + "attention.output.dense", attention(q, k, v, mask=mask))
        x = layer_norm(p, h + "attention.output.LayerNorm", x + y, 1e-12)
        y = linear(p, h + "output.dense", jax.nn.gelu(linear(p, h + "intermediate.dense", x), approximate=False))
        x = layer_norm(p, h + "output.LayerNorm", x + y, 1e-12)
    t = "cls.predictions.transform."
    x = layer_norm(p, t + "LayerNorm", jax.nn.gelu(linear(p, t + "dense", x), approximate=False), 1e-12)
    return x @ p["cls.predictions.decoder.weight"].T + p["cls.predictions.decoder.bias"]


def convolved(x, kernel, stride=1, around=0):
    """NHWC; `around`: pixels of padding on each side."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(around, around)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def vit(p, c, image):
    e = "vit.vit.embeddings."
    x = image.transpose(0, 2, 3, 1)
    x = convolved(x, p[e + "patch_embeddings.projection.weight"], c["patch"]) + p[e + "patch_embeddings.projection.bias"]
    x = x.reshape(x.shape[0], -1, c["width"])
    first = jnp.broadcast_to(p[e + "cls_token"], (x.shape[0], 1, c["width"]))
    x = jnp.concatenate([first, x], 1) + p[e + "position_embeddings"]
    for i in range(c["layers"]):
        h = f"vit.vit.layers.{i}."
        y = layer_norm(p, h + "layernorm_before", x, 1e-12)
        q, k, v = (heads(linear(p, h + f"attention.{n}_proj", y), c["heads"]) for n in "qkv")
        x = x + linear(p, h + "attention.o_proj", attention(q, k, v))
        y = jax.nn.gelu(linear(p, h + "mlp.fc1", layer_norm(p, h + "layernorm_after", x, 1e-12)), approximate=False)
        x = x + linear(p, h + "mlp.fc2", y)
    return linear(p, "vit.classifier", layer_norm(p, "vit.vit.layernorm", x, 1e-12)[:, 0])


def batch_norm(p, name, x, state):
    """By the batch's statistics; the running ones go into `state` as PyTorch moves them."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size // x.shape[-1]
    for kind, value in (("mean", mean), ("var", var * count / (count - 1))):
        state[f"{name}.{kind}"] = 0.9 * state[f"{name}.{kind}"] + 0.1 * value
    return (x - mean) * lax.rsqrt(var + 1e-5) * p[name + ".weight"] + p[name + ".bias"]


def resnet(p, c, image, state):
    """Also moves `state`, the running statistics."""
    relu = jax.nn.relu

    def layer(name, norm, x, **kw):
        return batch_norm(p, norm, convolved(x, p[name + ".weight"], **kw), state)

    x = relu(layer("conv", "norm", image.transpose(0, 2, 3, 1), stride=2, around=3))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    strides = [2 if stage and not i else 1 for stage, count in enumerate(c["blocks"]) for i in range(count)]
    for i, stride in enumerate(strides):
        b = f"blocks.{i}."
        if c["bottleneck"]:
            y = relu(layer(b + "narrow.0", b + "narrow.1", x))
            y = relu(layer(b + "middle.0", b + "middle.1", y, stride=stride, around=1))
            y, around = layer(b + "wide.0", b + "wide.1", y), b + "around"
        else:
            y = relu(layer(b + "conv1", b + "norm1", x, stride=stride, around=1))
            y, around = layer(b + "conv2", b + "norm2", y, around=1), b + "down"
        x = relu(y + (layer(around + ".0", around + ".1", x, stride=stride) if around + ".0.weight" in p else x))
    return linear(p, "head", x.mean((1, 2)))


def statistics(case, p):
    """The running statistics of a model with BatchNorm, of any other none."""
    norms = [name.removesuffix(".bias") for name in p if name.endswith(".bias") and name != "head.bias"]
    norms = norms if case.family == "resnet" else []
    size = lambda norm: p[norm + ".bias"].shape
    return {f"{n}.mean": jnp.zeros(size(n)) for n in norms} | {f"{n}.var": jnp.ones(size(n)) for n in norms}


MODELS = dict(mlp=mlp, gpt=gpt, llama=llama, bert=bert, vit=vit, resnet=resnet)
