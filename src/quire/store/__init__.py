"""Models as people name them: names, files by content, downloads from a hub."""
