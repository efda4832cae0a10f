"""One step of the MTP drafter: four query-only layers over the target's keys and values."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer

from .checkpoint import read_tensors
from .cluster_head import ClusterHead
from .config import DrafterConfig, load_drafter_config
from .joined import join_layer
from .target import load_checkpoint

# Position of the drafter's query relative to the pending token's, the same in all steps of a round. References disagree:
# transformers, LiteRT-LM and OpenVINO use the pending token's position (0), vLLM, SGLang and Ollama one less (-1).
POSITION_OFFSET = 0


class Drafter(nn.Module):
    """Parameters under the names of the Hugging Face checkpoint, but for the head (see sanitize)."""

    def __init__(self, config: DrafterConfig, num_clusters: int):
        """num_clusters: 0 for a dense head."""
        super().__init__()
        text = config.args
        self.config = config
        self.position_offset = POSITION_OFFSET
        self.pre_projection = nn.Linear(2 * config.backbone_hidden_size, text.hidden_size, bias=False)
        self.layers = [DecoderLayer(text, i) for i in range(text.num_hidden_layers)]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.post_projection = nn.Linear(text.hidden_size, config.backbone_hidden_size, bias=False)
        if num_clusters:
            self.head = ClusterHead(text.hidden_size, text.vocab_size, num_clusters, config.scored_clusters)
        else:
            self.head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    @property
    def layer_types(self) -> list[str]:
        """The kinds of target layers this drafter reads, each once."""
        return list(dict.fromkeys(self.config.args.layer_types))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Hugging Face names -> ours; the output table is reordered so that the tokens of a cluster are contiguous."""
        renamed = {name.removeprefix("model."): value for name, value in weights.items()}
        ordering = renamed.pop("masked_embedding.token_ordering", None)
        table = {n: renamed.pop(n) for n in list(renamed) if n.startswith("embed_tokens.")}
        for name, value in table.items():  # the weight, and scales and biases when quantized: a row per token
            part = name.removeprefix("embed_tokens.")
            if ordering is None:
                renamed[f"head.{part}"] = value
            else:
                clusters = self.head.ordering.shape
                renamed[f"head.tokens.{part}"] = value[ordering].reshape(*clusters, -1)
                renamed["head.ordering"] = ordering.astype(mx.int32).reshape(clusters)
        return {name.replace("masked_embedding.centroids.", "head.centroids."): value for name, value in renamed.items()}

    def candidates(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Scores [B, N] of hidden states [B, d], and the ids [B, N] they belong to (None: all of the vocabulary)."""
        return self.head(x) if isinstance(self.head, ClusterHead) else (self.head(x), None)

    def step(self, embedding: mx.array, hidden: mx.array, position: mx.array, lent: dict) -> tuple:
        """One draft token's scores.

        embedding: [B, D] the target's scaled embedding of the last token.  hidden: [B, D] the target's hidden state that
        chose it, or the previous step's.  position: [B] of the pending token.  lent: per layer type, the target's
        committed keys, values and mask (LayerCache.lend).
        Returns scores and ids as `candidates`, and the next step's hidden [B, D].
        """
        x = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))[:, None]
        position = position + self.position_offset
        for layer in self.layers:
            keys, values, mask = lent[layer.layer_type]
            x, _, _ = layer(x, mask, shared_kv=(keys, values), offset=position)
        x = self.norm(x[:, 0])
        return *self.candidates(x), self.post_projection(x)


def load_drafter(directory: Path, dtype: mx.Dtype | None) -> Drafter:
    """The drafter in a Hugging Face or mlx-community directory, quantized or not, evaluated.

    Raises CheckpointError.
    """
    raw, config = load_drafter_config(directory)
    clusters = count_clusters(directory)

    class Args:  # mlx-lm builds the model from the raw config; ours is checked and complete already
        from_dict = staticmethod(lambda _: config)

    model = load_checkpoint(directory, raw, lambda **_: (lambda args: Drafter(args, clusters), Args))
    if dtype is not None:
        model.set_dtype(dtype)
    for layer in model.layers:
        join_layer(layer)
    mx.eval(model.state)
    return model


def count_clusters(directory: Path) -> int:
    """Clusters of the head, 0 for a dense one. The tensors decide: configs of dense heads name centroids too."""
    tensors = read_tensors(directory)
    names = [n for n in ("masked_embedding.centroids.weight", "head.centroids.weight") if n in tensors]
    return tensors[names[0]].shape[0] if names else 0
