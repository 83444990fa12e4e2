"""Which family of models a config is of."""

from thinwire.model.base import Architecture
from thinwire.model.config import ModelConfig
from thinwire.model.llama import Llama
from thinwire.model.resnet import ResNet, ResNetShape


def architecture(config: ModelConfig) -> Architecture:
    """What is to be known of the model of a resolved config."""
    if config.sees_images:
        return ResNet(ResNetShape(config.dim, config.classes, config.channels, config.side))
    return Llama(config)
