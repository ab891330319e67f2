"""Which levels ranks are joined by: read from what machines and launchers say, measured where they say nothing.

Each source is a small reader of texts or files; `find` asks them on the ranks, `partition` makes levels of the answers.
"""
