"""The plain engine: records in Python, through a dispatch mode, a function mode and global hooks.

It is the fallback where the native engine cannot be built, and the reference the native one is checked
against: it is written to be read.
"""
