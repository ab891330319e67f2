"""Collectives over the axes of a mesh, and the lanes they run on."""
