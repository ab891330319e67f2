"""Hardware as data: a device, the levels that join many of it, files to describe them and a catalogue.

Files are read by pydantic, which a bare GPU machine may lack (docs/first-day.md): whoever needs none of them imports
neither `read` nor `catalogue`.
"""
