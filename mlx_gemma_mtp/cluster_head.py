"""The two-step output head of a drafter: pick clusters of tokens, score only the tokens in them.

A cluster is to the head what an expert is to a mixture of experts: the centroids route, and mlx-lm's switch layer
multiplies by whole clusters (one gather_mm, or gather_qmm when quantized). Nothing is scattered to the vocabulary.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear


class ClusterHead(nn.Module):
    """Scores of the tokens of the best clusters.

    centroids: [C, d].  tokens: output table [C, V / C, d], a row per token, ordered by cluster.
    ordering: [C, V / C] int32, the token id of each row.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_clusters: int, scored_clusters: int):
        super().__init__()
        size = vocab_size // num_clusters
        self.centroids = nn.Linear(hidden_size, num_clusters, bias=False)
        self.tokens = SwitchLinear(hidden_size, size, num_clusters, bias=False)
        self.ordering = mx.zeros((num_clusters, size), mx.int32)
        self.scored_clusters = min(scored_clusters, num_clusters)

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden: [B, d]. Returns scores [B, N] and the ids [B, N] int32 they belong to, N = scored clusters * V / C."""
        rows = hidden.shape[0]
        routes = self.centroids(hidden)  # [B, C]
        best = mx.argpartition(-routes, kth=self.scored_clusters - 1, axis=-1)[:, : self.scored_clusters]  # [B, k]
        # gather_mm checks no bounds: the left side must be [B, 1, 1, 1, d] for indices [B, 1, k].
        scores = self.tokens(hidden[:, None, None, None], best[:, None])  # [B, 1, k, 1, V / C]
        return scores.reshape(rows, -1), self.ordering[best].reshape(rows, -1)
