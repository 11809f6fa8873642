"""A Llama in NumPy, for processes that must start without the seconds that torch and transformers take to import."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class NumpyLlama:
    """Computes logits in float64 with the weights of a Hugging Face folder, which are in fp32.

    Shapes: T tokens, D features, H query heads and G heads of keys and values, each of width W.
    """

    def __init__(self, model_dir: Path) -> None:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        self._num_layers: int = config["num_hidden_layers"]
        self._num_heads: int = config["num_attention_heads"]
        self._num_key_value_heads: int = config["num_key_value_heads"]
        self._epsilon: float = config["rms_norm_eps"]
        self._rotary_base: float = config["rope_parameters"]["rope_theta"]
        tensors = load_file(model_dir / "model.safetensors")
        self._weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def compute_logits(self, token_ids: list[int]) -> np.ndarray:
        """Return the logits after each token, float64 [T, vocabulary]."""
        embedding = self._weights["model.embed_tokens.weight"]
        hidden = embedding[token_ids]  # [T, D]
        for layer in range(self._num_layers):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden))
            hidden = hidden + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", hidden))
        head = self._weights.get("lm_head.weight", embedding)
        return np.asarray(self._norm("model.norm", hidden) @ head.T)

    def _norm(self, name: str, hidden: np.ndarray) -> np.ndarray:
        mean_square = np.mean(hidden**2, axis=-1, keepdims=True)
        return np.asarray(hidden / np.sqrt(mean_square + self._epsilon) * self._weights[f"{name}.weight"])

    def _project(self, name: str, hidden: np.ndarray) -> np.ndarray:
        return np.asarray(hidden @ self._weights[f"{name}.weight"].T)

    def _attention(self, name: str, hidden: np.ndarray) -> np.ndarray:
        queries = self._rotate(self._split_heads(self._project(f"{name}.q_proj", hidden), self._num_heads))
        keys = self._rotate(self._split_heads(self._project(f"{name}.k_proj", hidden), self._num_key_value_heads))
        values = self._split_heads(self._project(f"{name}.v_proj", hidden), self._num_key_value_heads)
        # consecutive query heads share a head of keys and values
        queries_per_key = self._num_heads // self._num_key_value_heads
        keys = keys.repeat(queries_per_key, axis=0)  # [H, T, W]
        values = values.repeat(queries_per_key, axis=0)
        scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])  # [H, T, T]
        is_later = np.triu(np.ones(scores.shape[1:], dtype=bool), k=1)
        scores[:, is_later] = -np.inf
        attended = softmax(scores) @ values  # [H, T, W]
        joined = attended.transpose(1, 0, 2).reshape(len(hidden), -1)
        return self._project(f"{name}.o_proj", joined)

    def _split_heads(self, projected: np.ndarray, num_heads: int) -> np.ndarray:
        return projected.reshape(len(projected), num_heads, -1).transpose(1, 0, 2)

    def _rotate(self, heads: np.ndarray) -> np.ndarray:
        """Turn features i and i + W/2 of each head by an angle that grows with the position (arXiv:2104.09864)."""
        _, num_tokens, width = heads.shape
        half = width // 2
        frequencies = self._rotary_base ** -(np.arange(half) / half)
        angles = np.outer(np.arange(num_tokens), frequencies)  # [T, W/2]
        first = heads[..., :half]
        second = heads[..., half:]
        turned_first = first * np.cos(angles) - second * np.sin(angles)
        turned_second = second * np.cos(angles) + first * np.sin(angles)
        return np.concatenate([turned_first, turned_second], axis=-1)

    def _mlp(self, name: str, hidden: np.ndarray) -> np.ndarray:
        gate = self._project(f"{name}.gate_proj", hidden)
        gate = gate / (1 + np.exp(-gate))
        return self._project(f"{name}.down_proj", gate * self._project(f"{name}.up_proj", hidden))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of the scores along the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the scores along the last axis."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
