"""Observers of a sharded model; nothing in the engine depends on them.

`record` (its events as a trace), `report` (memory and traffic beside the predictions), `replicas` (whether ranks that
must hold the same bytes do).
"""
