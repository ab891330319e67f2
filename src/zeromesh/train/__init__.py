"""A training loop and its configuration: `zeromesh train`.

Read in this order: `config` (one TOML file), `corpus` and `sampler` (tokens, and which are used when), `loop` (steps).
"""
