"""A decoder of given sizes, for plans of models that are not written yet."""

from __future__ import annotations

from torch import Tensor, nn

from stratagem.errors import ConfigurationError

_HEAD_SIZE = 128


class PlannedDecoder(nn.Module):
    """A decoder-only transformer: RMS norms, causal attention, a gated feed-forward layer.

    The feed-forward layer gets the width with which the model has about the number of parameters,
    a multiple of 8.

    Args:
        parameters: of the model; its embedding and its head are separate.
        layers: how many.
        hidden: the width of the model.
        vocabulary: the number of tokens.

    Raises:
        ConfigurationError: a model of these sizes has more parameters already.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = PlannedDecoder(6.738416e9, layers=32, hidden=4096, vocabulary=32000)
        >>> round(sum(p.numel() for p in model.parameters()) / 1e9, 2), model.feed_forward
        (6.74, 11008)
    """

    def __init__(self, parameters: float, *, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        heads = max(1, hidden // _HEAD_SIZE)
        if hidden % (2 * heads):
            raise ConfigurationError(
                f"hidden={hidden}: expected an even number, and a multiple of {_HEAD_SIZE} if it "
                "is larger than that"
            )
        outside = (2 * vocabulary + 1) * hidden
        attention = 4 * hidden**2 + 2 * hidden
        self.feed_forward = round(((parameters - outside) / layers - attention) / (3 * hidden))
        # Layers divide between the ranks of a tensor axis.
        self.feed_forward = round(self.feed_forward / 8) * 8 or self.feed_forward
        if self.feed_forward < 1:
            raise ConfigurationError(
                f"a decoder with layers={layers}, hidden={hidden} and vocabulary={vocabulary} has "
                f"{outside + layers * attention:.3g} parameters without its feed-forward layers, "
                f"received parameters={parameters:.3g}: pass smaller sizes or more parameters"
            )
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, self.feed_forward) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next-token loss of tokens of shape (batch, length)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // _HEAD_SIZE)
        self.norms = nn.ModuleList((nn.RMSNorm(hidden), nn.RMSNorm(hidden)))
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, feed_forward, bias=False)
        self.up = nn.Linear(hidden, feed_forward, bias=False)
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        given = self.norms[0](hidden)
        query, key, value = (
            layer(given).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        given = self.norms[1](hidden)
        return hidden + self.down(nn.functional.silu(self.gate(given)) * self.up(given))  # type: ignore[no-any-return]
