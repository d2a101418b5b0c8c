"""Every table of a recording, declared once: `tables` its columns, `streams` the rows that an engine writes.

The checks of a file, the rows people iterate over, the columns of SQL and of the page, the C++ header of the
row layout and the tables in ``docs/format.md`` come from here. ``make schema`` writes those that are text.
"""
