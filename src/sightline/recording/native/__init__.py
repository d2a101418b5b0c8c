"""The native engine: an observer in C++, compiled on first use for the torch that is installed.

`build` compiles, loads and chooses it; `toolchain` knows the compiler and its flags. The C++ sources are in
this folder and are part of the wheel.
"""
