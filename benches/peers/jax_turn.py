"""JAX's turn: one jitted step whose weights and moments are donated; AdamW written out, after PyTorch's formula."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_models
import stored
import turn


def loss_of(p, case, batch, state):
    """The mean cross-entropy over labels that count, and the moved statistics."""
    inputs, state = {name: x for name, x in batch.items() if name != "labels"}, dict(state)
    kept = dict(state=state) if state else {}
    logits, labels = jax_models.MODELS[case.family](p, case.config, **inputs, **kept), batch["labels"]
    counted = labels != cases.IGNORED
    picked = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
    each = jax.nn.logsumexp(logits, -1) - picked
    return jnp.where(counted, each, 0).sum() / counted.sum(), state


def adamw(a, p, g, m, v, t):
    m = a["beta1"] * m + (1 - a["beta1"]) * g
    v = a["beta2"] * v + (1 - a["beta2"]) * g * g
    rate, deviation = a["lr"] / (1 - a["beta1"]**t), jnp.sqrt(v) / jnp.sqrt(1 - a["beta2"]**t) + a["eps"]
    return p * (1 - a["lr"] * a["weight_decay"]) - rate * m / deviation, m, v


def set_up(o):
    case = o["case"]
    a = cases.optimizer(case)
    values = jax_models.arranged(case, stored.weights(o["folder"]))
    p = {name: jax.device_put(np.array(array)) for name, array in values.items()}
    zeros = lambda: {name: jnp.zeros_like(array) for name, array in p.items()}
    kept = [p, zeros(), zeros(), jax_models.statistics(case, p), jnp.zeros((), jnp.int32)]

    def train(p, m, v, state, t, batch):
        (loss, state), g = jax.value_and_grad(loss_of, has_aux=True)(p, case, batch, state)
        t = t + 1
        new = {name: adamw(a, p[name], g[name], m[name], v[name], t) for name in p}
        return *({name: each[i] for name, each in new.items()} for i in range(3)), state, t, loss

    compiled = jax.jit(train, donate_argnums=(0, 1, 2, 3, 4))

    def step(batch):
        *kept[:], loss = compiled(*kept, batch)
        jax.block_until_ready(kept)
        return float(loss)

    return step


if __name__ == "__main__":
    o = turn.options()
    jax.config.update("jax_compilation_cache_dir", o["kernels"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    turn.run(o, lambda: set_up(o), {"jax": jax.__version__})
