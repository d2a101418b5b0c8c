"""sightline where people work: callbacks for trainers and a plugin for pytest, each imported by its user."""
