"""Owns a lab until it is killed. Prints the lab's name, then the process numbers of a rank and of a daemon of its."""

from lab import Lab

with Lab("2@200mbit,1") as lab:
    print(lab.name, flush=True)
    lab.run(
        # A daemon leaves the rank's process group, and the parent-death signal does not reach it.
        ["sh", "-c", "setsid sleep 300 & echo $$ $!; exec sleep 300"],
        ranks=[1],
        on_line=lambda rank, stream, line: print(line, flush=True),
    )
