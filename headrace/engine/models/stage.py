"""One stage's part of a model: consecutive layers, in the first stage behind the embedding, in the last before the norm and the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.checkpoint.config import ModelConfig
from headrace.engine.models.decoder import DecoderFamily, Weight
from headrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage computes.

    Attributes:
        layers: their numbers in the whole model; at least one.
        is_first: it begins with the embedding; else with the residual stream of the stage before it.
        is_last: it ends with the final norm and the head; else with the residual stream, for the stage after it.
    """

    layers: range
    is_first: bool = True
    is_last: bool = True

    @classmethod
    def of(cls, config: ModelConfig, stage: int = 0, stages: int = 1) -> Stage:
        """Layers dealt as evenly as possible: numbers differ by at most 1.

        One more than others have first the stages in the middle, then the first: that has the embedding beside its layers, and the last has
        the head, each as large as several layers. Raises ModelError if there are more stages than layers.
        """
        layers = config.num_layers
        if stages > layers:
            raise ModelError(f"{stages} stages cannot share a model of {layers} layers: each needs at least one (pipeline_parallel_size)")
        size, left = divmod(layers, stages)
        larger = set([*range(1, stages - 1), 0][:left])
        start = sum(size + (before in larger) for before in range(stage))
        return cls(range(start, start + size + (stage in larger)), stage == 0, stage == stages - 1)

    def weights(self, family: DecoderFamily, config: ModelConfig) -> Iterator[Weight]:
        """Every weight that it reads, with its full name; a head that is tied to the embedding is the embedding."""
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            yield family.embedding
        if self.is_last:
            yield family.final_norm
            if not config.tie_word_embeddings:
                yield family.head
        for index in self.layers:
            yield from (family.layer(weight, index) for weight in family.layer_weights(config))
