"""Which versions of a library its integration knows: what the extra in pyproject.toml says."""

from __future__ import annotations

from importlib.metadata import requires, version

from zeromesh.errors import InputError


def require_known(library: str) -> None:
    """Of an integration whose extra has the library's name.

    Raises:
        InputError: the installed version is another than those it was written for.
    """
    from packaging.requirements import Requirement  # comes with each of the libraries

    installed = version(library)
    for requirement in map(Requirement, requires("zeromesh") or ()):
        asked = requirement.marker is not None and requirement.marker.evaluate({"extra": library})
        if asked and requirement.name == library and not requirement.specifier.contains(installed, prereleases=True):
            raise InputError(
                f"zeromesh's integration of {library} was written for {library} {requirement.specifier}, and "
                f"{installed} is installed, whose insides may differ: pip install 'zeromesh[{library}]'"
            )
