"""zeromesh: a ZeRO stage for every level of the network."""

__version__ = "0.1.0.dev0"
