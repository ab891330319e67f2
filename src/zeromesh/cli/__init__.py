"""The command line: ``zeromesh COMMAND``.

How to add a command: write ``cli/NAME.py`` with one function that has the command's name. Its parameters are the
options (``Annotated[type, typer.Option(help=...)]``), and its docstring is the help. Register it with one line in
``cli/app.py``::

    app.command()(plan.plan)

Three rules keep the commands alike:

- The top of a file imports only typer, the standard library and ``zeromesh.errors``. Functions import everything
  heavy, so that ``zeromesh --help`` and every ``COMMAND --help`` stay under .3 s and never import torch.
- A wrong input is raised as an ``InputError``; ``app.main`` prints its message and exits with 2. No command catches it.
- A command returns nothing on success and raises ``typer.Exit(code)`` to end with another code: 75 or 130 ended by a
  signal and saved.
"""
