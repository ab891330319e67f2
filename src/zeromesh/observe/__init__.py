"""Observers of a sharded model. Nothing in the engine depends on them.

`record` writes its events as a trace, `report` compares memory and traffic with predictions, and `replicas` checks that
ranks which must hold the same bytes do.
"""
