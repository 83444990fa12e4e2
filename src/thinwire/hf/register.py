"""Tells transformers that there are models of type "thinwire"."""

from transformers import AutoConfig, AutoModelForCausalLM

from thinwire.hf.modeling import ThinwireConfig, ThinwireForCausalLM


def register() -> None:
    """Have the Auto classes open our folders; doing it twice does no harm."""
    AutoConfig.register(ThinwireConfig.model_type, ThinwireConfig, exist_ok=True)
    AutoModelForCausalLM.register(ThinwireConfig, ThinwireForCausalLM, exist_ok=True)
