"""T5's and CLIP's text encoders by NumPy in float64, caption by caption, from tensors under transformers' names."""

import math

import numpy as np


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _bucket(distance, num_buckets, max_distance):
    """Of key - query; by logarithms, as T5 has it."""
    half = num_buckets // 2
    exact = half // 2
    found, n = half * (distance > 0), abs(distance)
    if n < exact:
        return found + n
    grown = math.log(n / exact) / math.log(max_distance / exact) * (half - exact)
    return found + min(exact + int(grown + 1e-9), half - 1)


def _heads(x, num_heads):
    return x.reshape(x.shape[0], num_heads, -1).transpose(1, 0, 2)


def _t5_attention(name, tensors, config, x, bias, mask):
    q, k, v = (_heads(x @ tensors[f"{name}.{part}.weight"].T, config["num_heads"]) for part in "qkv")
    scores = q @ k.transpose(0, 2, 1) + bias
    if mask is not None:
        scores = np.where(mask[None, None, :], scores, -1e30)
    out = (_softmax(scores) @ v).transpose(1, 0, 2).reshape(x.shape[0], -1)
    return out @ tensors[f"{name}.o.weight"].T


def _t5_mlp(name, tensors, config, x):
    def product(part, x):
        return x @ tensors[f"{name}.{part}.weight"].T

    if config["feed_forward_proj"] == "relu":
        return product("wo", np.maximum(product("wi", x), 0))
    gate = product("wi_0", x)
    gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return product("wo", gate * product("wi_1", x))


def t5_oracle(tensors, config, ids, mask=None):
    """(length, width) features of one caption; `config` and tensors as transformers writes them."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    first = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    sizes = config["relative_attention_num_buckets"], config["relative_attention_max_distance"]
    places = range(len(ids))
    buckets = np.array([[_bucket(key - query, *sizes) for key in places] for query in places])
    bias = tensors[first][buckets].transpose(2, 0, 1)

    def norm(name, x):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config["layer_norm_epsilon"]) * tensors[name]

    x = tensors["shared.weight"][ids]
    for i in range(config["num_layers"]):
        layer = f"encoder.block.{i}.layer"
        normed = norm(f"{layer}.0.layer_norm.weight", x)
        x = x + _t5_attention(f"{layer}.0.SelfAttention", tensors, config, normed, bias, mask)
        x = x + _t5_mlp(f"{layer}.1.DenseReluDense", tensors, config, norm(f"{layer}.1.layer_norm.weight", x))
    return norm("encoder.final_layer_norm.weight", x)


def _clip_activation(name, x):
    if name == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def clip_oracle(tensors, config, ids, mask=None):
    """(features (length, width), pooled (width)) of one caption; `config` and tensors as transformers 4 writes them."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def linear(name, x):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + config["layer_norm_eps"])
        return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    tables = "text_model.embeddings"
    length, num_heads = len(ids), config["num_attention_heads"]
    x = tensors[f"{tables}.token_embedding.weight"][ids]
    x = x + tensors[f"{tables}.position_embedding.weight"][:length]
    keep = np.tril(np.ones((length, length), bool)) & (True if mask is None else mask[None, :])
    for i in range(config["num_hidden_layers"]):
        layer = f"text_model.encoder.layers.{i}"
        normed = norm(f"{layer}.layer_norm1", x)
        q, k, v = (_heads(linear(f"{layer}.self_attn.{part}_proj", normed), num_heads) for part in "qkv")
        scores = np.where(keep[None], q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2]), -1e30)
        attended = (_softmax(scores) @ v).transpose(1, 0, 2).reshape(length, -1)
        x = x + linear(f"{layer}.self_attn.out_proj", attended)
        hidden = linear(f"{layer}.mlp.fc1", norm(f"{layer}.layer_norm2", x))
        x = x + linear(f"{layer}.mlp.fc2", _clip_activation(config["hidden_act"], hidden))
    features = norm("text_model.final_layer_norm", x)
    eos = config["eos_token_id"]
    return features, features[int(np.argmax(ids)) if eos == 2 else list(ids).index(eos)]
