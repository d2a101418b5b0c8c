"""The web page of a recording: `payload` packs what it shows, `document` writes the one file it is."""
