"""Random training programs whose truth is known, and an auditor that compares each sentence with it."""
