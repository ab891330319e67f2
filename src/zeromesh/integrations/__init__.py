"""Integrations with the libraries that people train with. Each module needs its own library and none of the others."""
