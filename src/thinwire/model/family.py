"""Which family of models does a task."""

from thinwire.model.base import Architecture
from thinwire.model.config import ModelConfig
from thinwire.model.llama import Llama
from thinwire.model.resnet import ResNet
from thinwire.model.task import IMAGES, TEXT


def architecture(config: ModelConfig) -> Architecture:
    """What is to be known of the model of a resolved config."""
    return {TEXT: Llama, IMAGES: ResNet}[config.task](config)
