"""The command line: ``zeromesh COMMAND``.

How to add a command. Write ``cli/NAME.py`` with one function that has the command's name, whose parameters are the
options (``Annotated[type, typer.Option(help=...)]``) and whose docstring is the help, and register it with one line in
``cli/app.py``::

    app.command()(plan.plan)

Three rules keep the commands alike:

- At the top of a file only typer, the standard library and ``zeromesh.errors``; everything heavy is imported inside the
  function, so that ``zeromesh --help`` and every ``COMMAND --help`` stay under .3 s and never import torch.
- A wrong input is raised as an ``InputError``; ``app.main`` prints its message and exits with 2. No command catches it.
- A command returns nothing on success and raises ``typer.Exit(code)`` to end with another code: 75 or 130 ended by a
  signal and saved.
"""
