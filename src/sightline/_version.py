"""The version: this line is the only place it is written; the build reads it from here."""

__version__ = "0.1.0"
