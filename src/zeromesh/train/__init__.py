"""A thin reference training loop and its configuration: what `zeromesh train` runs.

Read in this order: `config` (one TOML file), `sampler` (which sequence is used when), `corpus` (text to tokens),
`launch` (processes), `loop` (the steps).
"""

from zeromesh.train.config import TrainConfig, load_config
from zeromesh.train.launch import train
from zeromesh.train.sampler import Sampler

__all__ = ["Sampler", "TrainConfig", "load_config", "train"]
