"""What a sharded model does and holds, observed from outside: nothing of the engine depends on it.

`record` (its events as a trace), `report` (memory and traffic beside the predictions), `replicas` (whether ranks that
must hold the same bytes do).
"""
