"""Hardware as data: a device, the levels that join many of them, files that describe them, and a catalogue.

pydantic reads the files, and a bare GPU machine may lack it (docs/first-day.md). So modules that need no file import
neither `read` nor `catalogue`.
"""
