"""Errors of a lab."""

from zeromesh.errors import InputError


class LabError(InputError):
    """An emulated cluster cannot be set up here: privileges, tools, or what the kernel refuses."""
