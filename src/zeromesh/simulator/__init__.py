"""Runs a schedule on a virtual clock, for step time, traffic, memory and a trace before anyone books the cluster."""
