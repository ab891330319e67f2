"""``python -m zeromesh.cli`` is the command ``zeromesh``."""

from zeromesh.cli.app import main

main()
