"""Our model as transformers knows models: for checkpoints whose cuts do not fold.

The layers and boundaries are those of training (hf/cuts.py). transformers gives them its loading,
its key-value cache and its `generate`.
"""

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from thinwire.hf.cuts import MODEL_TYPE, Whole, settings_of
from thinwire.hf.shape import KEYS
from thinwire.model.llama import Block


class ThinwireConfig(transformers.PretrainedConfig):
    """The shape of a model and of its cuts: `settings` is what thinwire needs to build it."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, settings: dict[str, Any] | None = None, **others: Any):
        self.settings = settings or {}
        model = self.settings.get("model", {})
        for ours, theirs in KEYS.items():
            setattr(self, theirs, model.get(ours))
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)


class ThinwireForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A trained model with its narrow cuts; codecs are left out."""

    config_class = ThinwireConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: ThinwireConfig):
        super().__init__(config)
        settings = settings_of(config.settings)
        # Not on a device without memory, even if asked to: rotary tables are computed, not loaded.
        self._whole = Whole(settings, torch.device("cpu"), self)
        self.to(torch.get_default_dtype())
        block = next(module for module in self.modules() if isinstance(module, Block))
        self._positions = block.cos_TE.clone(), block.sin_TE.clone()
        self._context = settings.model.context
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Also called after loading, for what no file has: the rotary tables."""
        if isinstance(module, Block):
            for table, filled in zip((module.cos_TE, module.sin_TE), self._positions, strict=True):
                table.copy_(filled)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        """The token table of the first stage."""
        return self.get_submodule("model.embed_tokens")

    def get_output_embeddings(self) -> nn.Module:
        """The head of the last stage."""
        return self.get_submodule("lm_head")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of every position, the loss if there are labels, and the cache if it is used."""
        _check_padding(attention_mask)
        if use_cache and past_key_values is None:
            past_key_values = transformers.DynamicCache()
        seen = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        if seen + input_ids.shape[1] > self._context:
            raise ValueError(
                f"{seen + input_ids.shape[1]} positions, but this model has a context of "
                f"{self._context}: give fewer tokens, or lower max_new_tokens"
            )
        pasts = None if past_key_values is None else self._pasts(past_key_values)
        # Behind a past our attention takes one position at a time.
        parts = input_ids.split(1, dim=1) if seen else (input_ids,)
        logits = torch.cat([self._whole.logits(part, False, pasts) for part in parts], dim=1)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        kept = logits_to_keep
        logits = logits[:, slice(-kept, None) if isinstance(kept, int) else kept]  # 0: all
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output.to_tuple() if return_dict is False else output

    def _pasts(self, cache: Any) -> list[list[Any]]:
        """The cache as our layers see it, stage by stage."""
        numbers = itertools.count()

        def past(layer: nn.Module) -> Any:
            return _CachedKeyValues(cache, next(numbers)) if isinstance(layer, Block) else None

        return [[past(layer) for layer in stage.layers] for stage in self._whole.stages]


class _CachedKeyValues:
    """The keys and values of one block, kept in a cache of transformers."""

    def __init__(self, cache: Any, block: int):
        self._cache = cache
        self._block = block

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length(self._block))

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.update(k_BKTE, v_BKTE, self._block)
        return keys, values


def _check_padding(attention_mask: Tensor | None) -> None:
    """Only padding behind the tokens is harmless: causal attention never sees it."""
    if attention_mask is None or bool(attention_mask.all()):
        return
    if attention_mask.ndim != 2 or bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError(
            "a thinwire model takes no padding before its tokens, and no masks of other kinds: "
            "give one prompt at a time, or prompts of the same number of tokens"
        )


def register() -> None:
    """Have the Auto classes open our folders; doing it twice does no harm."""
    transformers.AutoConfig.register(ThinwireConfig.model_type, ThinwireConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(ThinwireConfig, ThinwireForCausalLM, exist_ok=True)
