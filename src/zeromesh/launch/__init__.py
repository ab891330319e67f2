"""Starts the ranks of this machine, finds out who a process is among them, and brings them together."""
