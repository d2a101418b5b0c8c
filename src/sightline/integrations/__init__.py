"""Callbacks for trainers and a plugin for pytest, each imported only where it is used."""
