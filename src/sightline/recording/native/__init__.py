"""The native engine: an observer in C++, compiled on first use for the torch that is installed.

`builder` compiles it with the `toolchain`, `engine` loads and chooses it, `session` records with it. The C++
sources are in this folder and are part of the wheel.
"""
