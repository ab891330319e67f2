"""Checks a library's version, and that the private parts which its integration uses still exist.

The extra in pyproject.toml gives the range. Its upper end is one minor version beyond the newest that was tested, so
private attributes are looked up before they are set or called. All differences raise one kind of error.
"""

from __future__ import annotations

import inspect
from importlib.metadata import requires, version

from zeromesh.errors import InputError


def require_known(library: str) -> None:
    """Checks the installed version against the extra that has the library's name. Raises InputError if the installed
    version is outside of the range."""
    from packaging.requirements import Requirement  # each of the libraries requires it

    installed = version(library)
    for requirement in map(Requirement, requires("zeromesh") or ()):
        asked = requirement.marker is not None and requirement.marker.evaluate({"extra": library})
        if asked and requirement.name == library and not requirement.specifier.contains(installed, prereleases=True):
            raise InputError(
                f"zeromesh's integration of {library} was written for {library} {requirement.specifier}, and "
                f"{installed} is installed, whose insides may differ: pip install 'zeromesh[{library}]'"
            )


def require_attributes(library: str, owner: object, *names: str) -> None:
    """Raises InputError if `owner`, an object of the library, lacks one of these private attributes."""
    for name in names:
        if not hasattr(owner, name):
            raise changed(library, f"{type(owner).__name__} has no {name}")


def require_overridden(library: str, ours: type, theirs: type) -> None:
    """Compares the methods of `ours` that are marked with `typing_extensions.override` with those of `theirs`. Raises
    InputError if `theirs` has no such method, or if its method has a parameter that ours does not take."""
    for name, method in vars(ours).items():
        if not getattr(method, "__override__", False):
            continue
        if not hasattr(theirs, name):
            raise changed(library, f"{theirs.__name__} has no {name}")
        own = inspect.signature(method).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
        new = inspect.signature(getattr(theirs, name)).parameters.keys() - own.keys()
        if new and not takes_any:
            raise changed(library, f"{theirs.__name__}.{name} takes {', '.join(sorted(new))} as well")


def changed(library: str, difference: str) -> InputError:
    """The error for a library that differs from the one its integration was written for."""
    return InputError(
        f"zeromesh's integration of {library} was not written for {library} {version(library)}: {difference}. "
        f"Install an older one (docs/support.md has those that were run), or a newer zeromesh"
    )
