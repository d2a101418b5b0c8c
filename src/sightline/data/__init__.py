"""The recording as plain data: columns, typed rows over them, and their invariants. No torch here."""
