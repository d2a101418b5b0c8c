"""The web page of a recording: `payload` packs its data, `document` writes it as one file."""
